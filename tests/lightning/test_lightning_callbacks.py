"""The Lightning callbacks, under the Trainer of `pytorch_lightning` and of `lightning.pytorch` alike."""

import dataclasses
import importlib
import itertools
import math

import pytest
import torch

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

from late_copies import OnDevice, send_late
from lightning_learner import BARE, QUIET, ROWS, filled_buffer, fit, make_learner, make_td3_learner, td_of

from torchreplay.lightning import (
    EvaluationMonitor,
    PriorityFeedback,
    ReplayCheckpoint,
    ReplayDataModule,
    ReplayMonitor,
    WeightPublisher,
)

# Lightning's own, under a torch newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


@pytest.fixture
def buffer():
    buffer = filled_buffer()
    yield buffer
    buffer.close()


def assert_priorities_belong_to(buffer, updated):
    """Checks P(key) against |td| / sum for updated rows, and 1 / sum for the others."""
    raw = {key: td_of(key) if key in updated else 1.0 for key in range(ROWS)}
    total = sum(raw.values())
    batch = buffer.sample(4096)
    expected = torch.tensor([raw[key] / total for key in batch["key"].tolist()])
    torch.testing.assert_close(batch["probability"].float(), expected, rtol=1e-4, atol=0)


def rows_of(learner, steps=None):
    return set(itertools.chain.from_iterable(learner.seen[:steps]))


# PriorityFeedback: which rows get which TD error.


@pytest.mark.parametrize(
    "loading",
    [
        {"max_steps": 6},
        {"max_steps": 6, "limit_train_batches": 3},
        {"max_epochs": 2, "steps_per_epoch": 3},
        {"max_epochs": 2, "limit_train_batches": 3},
        {"max_steps": 6, "precision": "bf16-mixed"},
        {"max_steps": 6, "precision": "64-true"},
    ],
)
def test_feedback_reaches_the_rows_of_the_batch_however_it_was_drawn(lightning, buffer, loading):
    learner = make_learner(lightning)
    fit(lightning, buffer, learner, **loading)
    assert len(learner.seen) == 6
    assert buffer.stats().sampled == 6 * 8
    assert buffer.stats().updated == 6 * 8
    assert_priorities_belong_to(buffer, rows_of(learner))


def test_feedback_survives_true_bfloat16(lightning, buffer):
    # 1 + key needs at most seven bits, so bfloat16 holds it exactly.
    learner = make_learner(lightning)
    fit(lightning, buffer, learner, max_steps=4, precision="bf16-true")
    assert_priorities_belong_to(buffer, rows_of(learner))


def test_feedback_is_given_per_micro_batch_under_gradient_accumulation(lightning, buffer):
    learner = make_learner(lightning)
    trainer = fit(lightning, buffer, learner, max_steps=3, accumulate_grad_batches=4)
    assert trainer.global_step == 3
    assert buffer.stats().updated == 12 * 8
    assert_priorities_belong_to(buffer, rows_of(learner))


def test_feedback_works_under_manual_optimisation_without_a_loss(lightning, buffer):
    learner = make_learner(lightning, lambda loss, td, step: {"td_error": td}, manual=True)
    fit(lightning, buffer, learner, max_steps=4)
    assert_priorities_belong_to(buffer, rows_of(learner))


def test_a_skipped_step_changes_nothing(lightning, buffer):
    learner = make_learner(lightning, lambda loss, td, step: None if step > 2 else {"loss": loss, "td_error": td})
    fit(lightning, buffer, learner, max_epochs=1, steps_per_epoch=4)
    assert len(learner.seen) == 4
    assert buffer.stats().updated == 2 * 8
    assert_priorities_belong_to(buffer, rows_of(learner, steps=2))


def test_feedback_for_rows_overwritten_meanwhile_is_dropped_and_counted(lightning, buffer):
    def on_after_backward(self):
        buffer.extend(number=torch.arange(ROWS), obs=torch.ones(ROWS, 4))

    learner = make_learner(lightning, on_after_backward=on_after_backward)
    fit(lightning, buffer, learner, max_steps=4)
    assert buffer.stats().stale_updates == 4 * 8
    assert (buffer.sample(256)["probability"] == 1 / ROWS).all()


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (lambda loss, td, step: loss, r"\['loss'\]"),
        (lambda loss, td, step: {"loss": loss, "error": td}, r"\['error', 'loss'\]"),
    ],
)
def test_a_missing_td_error_is_an_error_that_says_what_was_returned(lightning, buffer, returned, names):
    with pytest.raises(KeyError, match=f"training_step returned {names}; PriorityFeedback needs 'td_error'"):
        fit(lightning, buffer, make_learner(lightning, returned), max_steps=1)


@pytest.mark.parametrize("manual", [False, True])
def test_a_hundred_steps_without_td_errors_from_the_first_are_warned_of(lightning, buffer, manual):
    learner = make_learner(lightning, lambda loss, td, step: None, manual=manual)
    with pytest.warns(UserWarning, match="no training_step of the first 100 has returned anything.*'td_error'"):
        fit(lightning, buffer, learner, max_epochs=1, steps_per_epoch=100)
    assert len(learner.seen) == 100


def test_steps_without_td_errors_after_one_with_some_are_skipped_ones(lightning, buffer, recwarn):
    learner = make_learner(lightning, lambda loss, td, step: {"td_error": td} if step == 1 else None, manual=True)
    fit(lightning, buffer, learner, max_steps=150)
    assert_priorities_belong_to(buffer, rows_of(learner, steps=1))
    assert not [warning for warning in recwarn if "training_step" in str(warning.message)]


def test_feedback_reads_another_name_and_buffer_when_given_them(lightning, buffer):
    learner = make_learner(lightning, lambda loss, td, step: {"loss": loss, "delta": td})
    trainer = lightning.Trainer(max_steps=2, callbacks=[PriorityFeedback(buffer, key="delta")], **BARE)
    trainer.fit(learner, tr.ReplayDataset(buffer, batch_size=8))
    assert_priorities_belong_to(buffer, rows_of(learner))


def test_infinite_td_errors_stop_the_run_and_change_nothing(lightning, buffer):
    learner = make_learner(lightning, lambda loss, td, step: {"loss": loss, "td_error": td / 0})
    with pytest.raises(ValueError, match="8"):
        fit(lightning, buffer, learner, max_steps=1)
    assert_priorities_belong_to(buffer, set())


@pytest.mark.parametrize("callback", [PriorityFeedback, ReplayMonitor])
def test_a_callback_without_a_buffer_says_so_before_training(lightning, buffer, callback):
    learner = make_learner(lightning)
    trainer = lightning.Trainer(max_steps=1, callbacks=[callback()], **BARE)
    with pytest.raises(ValueError, match=f"{callback.__name__} was given no buffer and the Trainer has no Replay"):
        trainer.fit(learner, tr.ReplayDataset(buffer, batch_size=8))
    assert learner.seen == []


@pytest.fixture
def sent(monkeypatch):
    """The TD errors that went on their way from a device: they arrive when somebody waits for them."""
    return send_late(monkeypatch)


def test_td_errors_on_their_way_from_a_device_are_applied_when_the_training_ends(lightning, buffer, sent):
    learner = make_learner(lightning, lambda loss, td, step: {"loss": loss, "td_error": td.as_subclass(OnDevice)})
    fit(lightning, buffer, learner, max_steps=6)
    assert len(sent) == 6
    assert buffer.stats().updated == 6 * 8
    assert_priorities_belong_to(buffer, rows_of(learner))


def test_an_exception_is_not_hidden_by_td_errors_on_their_way_that_are_not_finite(lightning, sent):
    def returned(loss, td, step):
        if step == 3:
            raise ZeroDivisionError
        return {"loss": loss, "td_error": (td * math.nan).as_subclass(OnDevice)}

    with pytest.raises(ZeroDivisionError):
        fit(lightning, filled_buffer, make_learner(lightning, returned), max_steps=6)


def test_td_errors_of_the_last_step_that_are_not_finite_end_the_training_with_an_error(lightning, buffer, sent):
    def returned(loss, td, step):
        return {"loss": loss, "td_error": (td * (math.nan if step == 6 else 1.0)).as_subclass(OnDevice)}

    with pytest.raises(ValueError, match=r"update_priorities number 6 .* NaN"):
        fit(lightning, buffer, make_learner(lightning, returned), max_steps=6)
    assert buffer.stats().updated == 5 * 8


# WeightPublisher.


def pulled_weight(weights):
    """What an explorer that pulls now would act with."""
    module = torch.nn.Linear(4, 1)
    assert weights.pull(module)
    return module.weight.detach().clone()


def test_weights_are_published_every_few_batches_and_at_the_end(lightning, buffer):
    learner = make_learner(lightning)
    weights = tr.SharedWeights(learner.q)
    versions = []
    learner.on_train_batch_start = lambda batch, batch_idx: versions.append(weights.version)
    fit(lightning, buffer, learner, [WeightPublisher(weights, every=2, module="q")], max_steps=5)
    assert versions == [0, 0, 1, 1, 2]
    assert weights.version == 3
    assert torch.equal(pulled_weight(weights), learner.q.weight)


def test_a_publisher_tells_the_buffer_the_version(lightning, buffer):
    learner = make_learner(lightning)
    publisher = WeightPublisher(tr.SharedWeights(learner.q), every=2, module="q", buffer=buffer)
    fit(lightning, buffer, learner, [publisher], max_steps=5)
    assert buffer.policy_version == publisher.weights.version == 3
    with pytest.raises(TypeError, match="buffer"):
        WeightPublisher(publisher.weights, buffer="queue")


@pytest.mark.parametrize(("every", "versions"), [(2, [0, 0, 1, 1, 2, 2]), (3, [0, 0, 0, 1, 1, 1])])
def test_several_optimisers_that_step_in_one_batch_count_as_one_for_the_publisher(lightning, buffer, every, versions):
    learner = make_td3_learner(lightning)
    weights = tr.SharedWeights(learner.q)
    seen = []
    learner.on_train_batch_start = lambda batch, batch_idx: seen.append(weights.version)
    data = ReplayDataModule(buffer, 8, steps_per_epoch=6)
    trainer = fit(lightning, data, learner, [WeightPublisher(weights, every, "q")], max_epochs=1)
    assert seen == versions
    assert weights.version == 6 // every + 1
    assert trainer.global_step == 6 + 3
    assert torch.equal(pulled_weight(weights), learner.q.weight)


def test_a_batch_without_a_step_of_an_optimiser_publishes_nothing(lightning, buffer):
    def training_step(self, batch, batch_idx):  # accumulates by hand
        self.manual_backward(self.q(batch["obs"]).square().mean())
        if batch_idx % 4 == 3:
            self.optimizers().step()

    learner = make_learner(lightning, manual=True, training_step=training_step)
    weights = tr.SharedWeights(learner.q)
    fit(lightning, buffer, learner, [WeightPublisher(weights, module="q")], max_steps=3)
    assert weights.version == 3 + 1


def test_feedback_is_given_once_per_batch_whatever_optimisers_step_in_it(lightning, buffer):
    learner = make_td3_learner(lightning)
    fit(lightning, ReplayDataModule(buffer, 8, steps_per_epoch=6), learner, max_epochs=1)
    assert len(learner.seen) == 6
    assert buffer.stats().updated == buffer.stats().sampled == 6 * 8
    assert_priorities_belong_to(buffer, rows_of(learner))


def test_accumulated_micro_batches_are_not_optimiser_steps(lightning, buffer):
    learner = make_learner(lightning)
    weights = tr.SharedWeights(learner)
    fit(lightning, buffer, learner, [WeightPublisher(weights)], max_steps=3, accumulate_grad_batches=4)
    assert weights.version == 3 + 1


def test_a_resumed_run_publishes_its_weights_before_the_first_step(lightning, buffer, tmp_path):
    learner = make_learner(lightning)
    trainer = fit(lightning, buffer, learner, max_steps=2, **QUIET, barebones=False)
    trainer.save_checkpoint(tmp_path / "2.ckpt")
    fresh = make_learner(lightning)
    weights = tr.SharedWeights(fresh.q)
    at_first_step = []
    fresh.on_train_batch_start = lambda batch, batch_idx: at_first_step.append(
        (weights.version, pulled_weight(weights))
    )
    trainer = lightning.Trainer(max_steps=3, callbacks=[WeightPublisher(weights, 100, "q")], **QUIET)
    trainer.fit(fresh, datamodule=ReplayDataModule(buffer, 8), ckpt_path=tmp_path / "2.ckpt")
    [(version, weight)] = at_first_step
    assert version == 1
    assert torch.equal(weight, learner.q.weight)


def test_versions_go_on_where_a_buffer_of_another_process_is_restored(lightning, buffer, tmp_path):
    def run(buffer, **options):
        learner = make_learner(lightning)
        publisher = WeightPublisher(tr.SharedWeights(learner.q), module="q", buffer=buffer)
        versions = []
        learner.on_train_batch_start = lambda batch, batch_idx: versions.append(buffer.policy_version)
        bounds = options.pop("bounds")
        trainer = lightning.Trainer(callbacks=[ReplayCheckpoint(buffer), publisher], **bounds, **QUIET)
        trainer.fit(learner, datamodule=ReplayDataModule(buffer, 8), **options)
        assert buffer.policy_version == publisher.weights.version
        assert torch.equal(pulled_weight(publisher.weights), learner.q.weight)
        return trainer, versions

    trainer, _ = run(buffer, bounds={"max_steps": 3})
    trainer.save_checkpoint(tmp_path / "3.ckpt")
    reached = buffer.policy_version
    with tr.ReplayBuffer(buffer.spec, ROWS, sampler=tr.Prioritized(alpha=1.0)) as restored:
        _, versions = run(restored, bounds={"max_steps": 5}, ckpt_path=tmp_path / "3.ckpt")
    assert versions == [reached + 1, reached + 2]


def test_a_part_that_does_not_exist_is_named_before_training(lightning, buffer):
    learner = make_learner(lightning)
    publisher = WeightPublisher(tr.SharedWeights(learner), module="actor")
    with pytest.raises(ValueError, match=r"publish 'actor', which Learner does not have .* modules are \['q'\]"):
        fit(lightning, buffer, learner, [publisher], max_steps=1)
    assert learner.seen == []


def test_publishing_every_zero_steps_is_refused():
    with pytest.raises(ValueError, match="every is 0"):
        WeightPublisher(tr.SharedWeights(torch.nn.Linear(4, 1)), every=0)


# ReplayMonitor.


class Recorder:
    """What a logger was given: scalars by step, histograms as the keyword arguments of TensorBoard's raw call."""

    def __init__(self):
        self.scalars = []
        self.histograms = []

    def add_histogram_raw(self, tag, **arguments):
        self.histograms.append((tag, arguments))


@pytest.fixture
def logger(lightning):
    class RecordingLogger(importlib.import_module(f"{lightning.__name__}.loggers").Logger):
        name, version, experiment = "recorder", 0, Recorder()

        def log_metrics(self, metrics, step=None):
            self.experiment.scalars.append((step, metrics))

        def log_hyperparams(self, params):
            pass

    return RecordingLogger()


COUNTERS = ("inserted", "sampled", "updated")


def monitored(lightning, buffer, logger, **trainer):
    arguments = {**QUIET, "logger": logger, "barebones": False, "log_every_n_steps": 4, **trainer}
    fit(lightning, buffer, callbacks=[ReplayMonitor(histogram_every=8)], **arguments)
    return logger.experiment


def test_the_monitor_logs_every_finite_statistic_as_often_as_the_trainer_logs(lightning, buffer, logger):
    data = ReplayDataModule(buffer, 8, prefetch=0)  # ahead of the learner others would be counted, too
    recorded = monitored(lightning, data, logger, max_steps=10)
    steps, metrics = zip(*[(step, m) for step, m in recorded.scalars if "replay/size" in m], strict=True)
    assert steps == (0, 3, 7)  # the first step is 0, as in what the Trainer logs
    names = {field.name for field in dataclasses.fields(buffer.stats())}
    for logged in metrics:
        assert {name.removeprefix("replay/") for name in logged} - names <= {f"{n}_per_second" for n in COUNTERS}
        assert all(math.isfinite(value) for value in logged.values())
    assert [logged["replay/sampled"] for logged in metrics] == [0, 32, 64]  # batches of eight
    assert metrics[0]["replay/inserted"] == ROWS
    assert metrics[1]["replay/inserted_per_second"] == 0.0
    assert metrics[1]["replay/sampled_per_second"] > 0.0


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("optimisers", [1, 2])
def test_the_monitor_logs_at_the_steps_of_the_trainers_own_metrics(lightning, buffer, logger, accumulated, optimisers):
    def training_step(self, batch, batch_idx):
        self.log("own", 1.0)
        loss = self.q(batch["obs"]).square().mean()
        if optimisers == 1:
            return {"loss": loss, "td_error": td_of(batch["number"].float())}
        self.manual_backward(loss)
        if (batch_idx + 1) % accumulated == 0:
            for optimizer in self.optimizers():
                optimizer.step()
        return {"td_error": td_of(batch["number"].float())}

    def configure_optimizers(self):
        every = [torch.optim.SGD(self.parameters(), lr=1e-3) for _ in range(optimisers)]
        return every if optimisers == 2 else every[0]

    methods = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    learner = make_learner(lightning, manual=optimisers == 2, **methods)
    data = ReplayDataModule(buffer, 8, steps_per_epoch=24)
    accumulate = {} if optimisers == 2 else {"accumulate_grad_batches": accumulated}
    arguments = {**QUIET, "logger": logger, "barebones": False, "log_every_n_steps": 3, **accumulate}
    fit(lightning, data, learner, [ReplayMonitor()], max_epochs=1, **arguments)
    own, ours = (
        [step for step, metrics in logger.experiment.scalars if name in metrics] for name in ("own", "replay/size")
    )
    assert ours[0] == 0
    assert ours[1:] == own


def test_the_monitor_gives_histograms_to_loggers_that_take_them(lightning, buffer, logger):
    recorded = monitored(lightning, buffer, logger, max_steps=17)
    assert {(tag, arguments["global_step"]) for tag, arguments in recorded.histograms} == {
        (f"replay/{name}", step) for name in ("priority", "age") for step in (7, 15)
    }
    for _, arguments in recorded.histograms:
        assert arguments["num"] == sum(arguments["bucket_counts"]) == ROWS
        assert len(arguments["bucket_limits"]) == len(arguments["bucket_counts"])


def test_a_logger_without_histograms_gets_scalars_alone(lightning, buffer, logger, monkeypatch):
    monkeypatch.delattr(Recorder, "add_histogram_raw")
    assert monitored(lightning, buffer, logger, max_steps=9).scalars


def test_tensorboard_takes_the_histograms(lightning, buffer, tmp_path):
    loggers = importlib.import_module(f"{lightning.__name__}.loggers")
    logger = loggers.TensorBoardLogger(tmp_path)
    monitored(lightning, buffer, logger, max_steps=9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda given: WeightPublisher(given), r"weights is .*: expected torchreplay\.SharedWeights"),
        (lambda given: PriorityFeedback(given), "buffer is .*: expected a ReplayBuffer or a MixedDataset"),
        (lambda given: ReplayMonitor(given), "buffer is .*: expected a ReplayBuffer"),
        (lambda given: ReplayCheckpoint(given), "buffer is .*: expected a ReplayBuffer"),
        (lambda given: EvaluationMonitor(given), r"evaluator is .*: expected a torchreplay\.ray\.Evaluator"),
        (lambda given: PriorityFeedback(key=given), "key is .*: expected the name"),
        (lambda given: PriorityFeedback(part=given), "part is .*: expected the name"),
    ],
)
@pytest.mark.parametrize("given", [3, {"buffer": 1}, torch.nn.Linear(1, 1)], ids=lambda given: type(given).__name__)
def test_what_a_callback_cannot_use_is_a_type_error_before_training(make, message, given):
    with pytest.raises(TypeError, match=message):
        make(given)


@pytest.mark.parametrize("state", [None, 3, {}, []], ids=repr)
def test_what_is_no_state_of_a_data_module_is_a_value_error(buffer, state):
    with pytest.raises(ValueError, match="a ReplayDataModule's state has 'draws'"):
        ReplayDataModule(buffer).load_state_dict(state)
