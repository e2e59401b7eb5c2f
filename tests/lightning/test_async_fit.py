"""`AsyncReplay.fit`: a Trainer of either Lightning package makes the steps, and all the rest is as it is in `run`."""

import pytest
import torch
from mixed_buffers import priorities
from numbered_rows import make_buffer, row

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

from lightning_learner import BARE, QUIET, ROWS, filled_buffer, make_learner, td_of

from torchreplay.lightning import EvaluationMonitor, PriorityFeedback, ReplayCheckpoint, WeightPublisher
from torchreplay.ray import AsyncReplay, Evaluator, ExplorerPool, ExplorersFailed

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def explore_nothing(ctx):
    while not ctx.stopped:
        ctx.pull_weights(torch.nn.Linear(4, 1))


def evaluate(q, seed):
    return [q.weight.sum().item()]


def layer():
    return torch.nn.Linear(4, 1)


def pool_of(buffer, weights=None, explore=explore_nothing, **arguments):
    return ExplorerPool(explore, 1, buffer, weights, backend="process", **arguments)


@pytest.mark.slow
def test_a_trainer_makes_the_steps_of_the_whole_arrangement(lightning):
    buffer, learner = filled_buffer(), make_learner(lightning)
    weights = tr.SharedWeights(learner.q)
    evaluator = Evaluator(evaluate, weights, layer, every=100, backend="process")
    trainer = lightning.Trainer(max_steps=25, callbacks=[own := lightning.Callback()], **BARE)
    with buffer:
        replay = AsyncReplay(
            pool_of(buffer, weights), learner, learner.q, batch_size=8, publish_every=10, evaluator=evaluator
        )
        stats = replay.fit(trainer)
        assert (stats.steps, stats.items, stats.publications) == (25, 200, 3)  # after 10 and 20, and the last ones
        assert stats.evaluation.version == weights.version == 3
        assert stats.evaluation.mean_return == pytest.approx(learner.q.weight.sum().item())
        assert [explorer.state for explorer in stats.explorers] == ["stopped"]
        assert {part: timing.count for part, timing in stats.timings.items()} == {
            "draw": 25,
            "learn": 25,
            "feedback": 25,
            "publish": 3,
        }
        assert len(learner.seen) == 25
        raw = [td_of(key) if key in {key for keys in learner.seen for key in keys} else 1.0 for key in range(ROWS)]
        torch.testing.assert_close(priorities(buffer, ROWS), torch.tensor(raw, dtype=torch.float64), rtol=1e-4, atol=0)
        assert trainer.callbacks[0] is own
        trainer.fit_loop.epoch_loop.max_steps = 30
        assert replay.fit(trainer).steps == 30  # it goes on
        assert not any(isinstance(callback, PriorityFeedback) for callback in trainer.callbacks)


def test_without_priorities_a_training_step_needs_no_errors(lightning):
    learner = make_learner(lightning, returned=lambda loss, td, step: loss)
    with filled_buffer(sampler=tr.Uniform()) as buffer:
        replay = AsyncReplay(pool_of(buffer), learner, batch_size=8)
        assert replay.fit(lightning.Trainer(max_steps=5, **BARE)).steps == 5
        assert buffer.stats().updated == 0
    with filled_buffer() as buffer, pytest.raises(KeyError, match="td_error"):
        AsyncReplay(pool_of(buffer), learner, batch_size=8).fit(lightning.Trainer(max_steps=5, **BARE))


def test_several_policies_get_batches_and_give_feedback_by_name(lightning):
    def training_step(self, batches, batch_idx):
        loss = sum(self.q(batch["obs"]).square().mean() for batch in batches.values())
        return {"loss": loss, "td_error": {name: td_of(batch["number"].float()) for name, batch in batches.items()}}

    learner = make_learner(lightning, training_step=training_step)
    with filled_buffer() as red, filled_buffer() as blue:
        weights = {"red": tr.SharedWeights(learner.q), "blue": tr.SharedWeights(learner.q)}
        pool = pool_of({"red": red, "blue": blue}, weights, explore=lambda ctx: None)
        modules = {"red": learner.q, "blue": learner.q}
        stats = AsyncReplay(pool, learner, modules, batch_size=4, publish_every=2).fit(
            lightning.Trainer(max_steps=6, **BARE)
        )
        assert (stats.steps, stats.items) == (6, 48)
        assert [weights[name].version for name in weights] == [4, 4]
        assert [buffer.stats().updated for buffer in (red, blue)] == [24, 24]


def test_weights_that_no_optimiser_has_changed_are_not_published(lightning):
    buffer, learner = filled_buffer(), make_learner(lightning)
    weights = tr.SharedWeights(learner.q)
    versions = []
    learner.on_train_batch_start = lambda batch, batch_idx: versions.append(weights.version)
    with buffer:
        for publish_every, seen in ((1, [0, 0, 0, 0, 1, 1, 1, 1]), (3, [3, 3, 3, 3, 4, 4, 4, 4])):
            replay = AsyncReplay(
                pool_of(buffer, weights), learner, learner.q, batch_size=8, publish_every=publish_every
            )
            stats = replay.fit(lightning.Trainer(max_steps=2, accumulate_grad_batches=4, **BARE))
            assert (stats.steps, stats.items) == (8, 64)
            assert stats.items_per_second > 0  # in less than the second between two looks
            assert versions == seen
            versions.clear()


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("validates", [False, True])
def test_the_modules_own_validation_takes_place(lightning, several, validates):
    validated = []
    methods = {"validation_step": lambda self, batch, batch_idx: validated.append(int(batch))}
    methods |= {"val_dataloader": lambda self: torch.arange(2)} if validates else {}
    learner = make_learner(lightning, training_step=lambda self, batch, batch_idx: self.q.weight.sum(), **methods)
    with filled_buffer(sampler=tr.Uniform()) as buffer:
        pool = pool_of({"red": buffer} if several else buffer, explore=lambda ctx: None)
        trainer = lightning.Trainer(max_steps=4, val_check_interval=2, check_val_every_n_epoch=None, **QUIET)
        AsyncReplay(pool, learner, batch_size=8).fit(trainer)
    assert validated == [0, 1] * 3 * validates  # the sanity check before is the first


def test_a_checkpoint_brings_back_the_buffer_before_explorers_begin(lightning, tmp_path):
    def explore_on(ctx):
        with ctx.writer() as writer:
            writer.append(number=writer.rows + 1000, obs=torch.zeros(4))

    def fit(buffer, max_steps, **arguments):
        learner = make_learner(lightning)
        callbacks = [
            ReplayCheckpoint(buffer),
            (lightning.callbacks if hasattr(lightning, "callbacks") else lightning).ModelCheckpoint(
                dirpath=tmp_path, filename="last", every_n_train_steps=5, save_top_k=-1, enable_version_counter=False
            ),
        ]
        trainer = lightning.Trainer(max_steps=max_steps, callbacks=callbacks, **{**QUIET, "enable_checkpointing": True})
        return AsyncReplay(pool_of(buffer, explore=explore_on), learner, batch_size=8).fit(trainer, **arguments)

    with filled_buffer(capacity=2 * ROWS) as buffer:
        assert fit(buffer, 5).steps == 5
    with tr.ReplayBuffer(buffer.spec, 2 * ROWS, sampler=tr.Prioritized(alpha=1.0), seed=3) as restored:
        fit(restored, 10, ckpt_path=tmp_path / "last.ckpt")
        numbers = restored.gather(torch.arange(ROWS))["number"]
        assert numbers.tolist() == list(range(ROWS))
        assert restored.stats().updated == 5 * 8 + 5 * 8


def test_versions_go_on_where_a_checkpoint_brings_back_the_buffer(lightning, tmp_path):
    number = tr.Field((), torch.int64)
    spec = {"number": number, "obs": tr.Field((4,)), "policy_version": number}

    def run(buffer, max_steps, **arguments):
        learner = make_learner(lightning)
        weights = tr.SharedWeights(learner.q)
        trainer = lightning.Trainer(max_steps=max_steps, callbacks=[ReplayCheckpoint(buffer)], **QUIET)
        replay = AsyncReplay(pool_of(buffer, weights), learner, learner.q, batch_size=8, publish_every=2)
        publications = replay.fit(trainer, **arguments).publications
        assert weights.version == buffer.policy_version
        return trainer, publications

    with tr.ReplayBuffer(spec, ROWS, sampler=tr.Prioritized(alpha=1.0)) as buffer:
        buffer.extend(number=torch.arange(ROWS), obs=torch.zeros(ROWS, 4))
        trainer, reached = run(buffer, 4)
        assert buffer.policy_version == reached
        trainer.save_checkpoint(tmp_path / "4.ckpt")
    with tr.ReplayBuffer(spec, ROWS, sampler=tr.Prioritized(alpha=1.0)) as restored:
        _, publications = run(restored, 6, ckpt_path=tmp_path / "4.ckpt")
        assert restored.policy_version == reached + publications


@pytest.mark.slow
def test_explorers_that_all_fail_end_the_training(lightning):
    def fail(ctx):
        raise KeyError("boom")

    with filled_buffer() as buffer:
        replay = AsyncReplay(pool_of(buffer, explore=fail, max_restarts=0), make_learner(lightning), batch_size=8)
        with pytest.raises(ExplorersFailed, match="boom"):
            replay.fit(lightning.Trainer(max_steps=-1, **BARE))


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_a_learner_that_waits_in_vain_is_told_what_its_explorers_failed_with(lightning, several):
    def fail(ctx):
        raise KeyError("boom")

    spec = {"number": tr.Field((), torch.int64), "obs": tr.Field((4,))}
    with tr.ReplayBuffer(spec, 10) as empty:
        pool = pool_of({"red": empty} if several else empty, explore=fail, max_restarts=0)
        replay = AsyncReplay(pool, make_learner(lightning), batch_size=8)
        with pytest.raises(tr.WouldBlockForever) as error:
            replay.fit(lightning.Trainer(max_steps=5, **BARE))
        assert any("boom" in note for note in error.value.__notes__)


def test_several_buffers_are_restored_before_explorers_begin(lightning, tmp_path):
    def training_step(self, batches, batch_idx):
        loss = sum(self.q(batch["obs"]).square().mean() for batch in batches.values())
        return {"loss": loss, "td_error": {name: td_of(batch["number"].float()) for name, batch in batches.items()}}

    def explore_on(ctx):
        for name in ("red", "blue"):
            with ctx.writer(name=name) as writer:
                writer.append(number=1000, obs=torch.zeros(4))

    def fit(buffers, max_steps, **arguments):
        learner = make_learner(lightning, training_step=training_step)
        checkpoint = lightning.callbacks.ModelCheckpoint(
            dirpath=tmp_path, filename="last", every_n_train_steps=5, save_top_k=-1, enable_version_counter=False
        )
        callbacks = [ReplayCheckpoint(buffers["red"]), checkpoint]
        trainer = lightning.Trainer(max_steps=max_steps, callbacks=callbacks, **{**QUIET, "enable_checkpointing": True})
        replay = AsyncReplay(pool_of(buffers, explore=explore_on), learner, batch_size=8)
        return replay.fit(trainer, **arguments)

    with filled_buffer(capacity=2 * ROWS) as red, filled_buffer(capacity=2 * ROWS) as blue:
        fit({"red": red, "blue": blue}, 5)
    with tr.ReplayBuffer(red.spec, 2 * ROWS, sampler=tr.Prioritized(alpha=1.0)) as red, filled_buffer() as blue:
        fit({"red": red, "blue": blue}, 10, ckpt_path=tmp_path / "last.ckpt")
        assert red.gather(torch.arange(ROWS))["number"].tolist() == list(range(ROWS))


def test_what_does_not_go_together_is_refused(lightning):
    buffer, learner = make_buffer(), make_learner(lightning)
    buffer.extend(**{name: torch.as_tensor(value).unsqueeze(0) for name, value in row(0, 0, 0).items()})
    weights = tr.SharedWeights(layer())
    evaluator = Evaluator(evaluate, weights, layer, every=1, backend="process")
    by_module, by_function = (AsyncReplay(pool_of(buffer), learn) for learn in (learner, print))
    with pytest.raises(TypeError, match=r"replay\.fit\(trainer\)"):
        by_module.run(1)
    with pytest.raises(TypeError, match=r"no LightningModule: replay\.run"):
        by_function.fit(lightning.Trainer(**BARE))
    for callback in (PriorityFeedback(), WeightPublisher(weights), EvaluationMonitor(evaluator)):
        with pytest.raises(ValueError, match=f"does what {type(callback).__name__} does"):
            by_module.fit(lightning.Trainer(callbacks=[callback], **BARE))
    with pytest.raises(ValueError, match="2 processes"):
        by_module.fit(lightning.Trainer(accelerator="cpu", devices=2, barebones=True))
