"""`MixedDataset` and `PriorityFeedback` under the Trainer of `pytorch_lightning` and of `lightning.pytorch` alike."""

import pytest
import torch
from mixed_buffers import priorities
from torch.utils.data import DataLoader

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

from lightning_learner import BARE, QUIET, filled_buffer, make_learner, td_of

from torchreplay.lightning import PriorityFeedback

# Lightning's own: under a torch newer than it knows, and of loaders that share steps between workers.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*`__len__` defined")


@pytest.fixture
def pair():
    """Two buffers; the numbers, and so the TD errors, of the second start at 1000, the keys of both at 0."""
    spec = {"number": tr.Field((), torch.int64), "obs": tr.Field((4,))}
    second = tr.ReplayBuffer(spec, capacity=64, sampler=tr.Prioritized(alpha=1.0), seed=3)
    second.extend(number=1000 + torch.arange(64), obs=torch.ones(64, 4))
    buffers = filled_buffer(), second
    yield buffers
    for buffer in buffers:
        buffer.close()


def assert_priorities_belong_to(buffer, updated, first_number):
    raw = [td_of(key + first_number) if key in updated else 1.0 for key in range(64)]
    torch.testing.assert_close(priorities(buffer, 64), torch.tensor(raw, dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize("loading", ["dataset", "loader", "workers"])
def test_feedback_reaches_the_rows_of_every_buffer(lightning, pair, loading):
    dataset = tr.MixedDataset({pair[0]: 3, pair[1]: 1}, 8, steps=6)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"} if loading == "workers" else {}
    loader = dataset if loading == "dataset" else DataLoader(dataset, batch_size=None, **workers)
    learner = make_learner(lightning)
    lightning.Trainer(max_epochs=1, callbacks=[PriorityFeedback(dataset)], **BARE).fit(learner, loader)
    assert [buffer.stats().updated for buffer in pair] == [6 * 6, 6 * 2]
    for position, (buffer, first_number) in enumerate(zip(pair, (0, 1000), strict=True)):
        mine = slice(0, 6) if position == 0 else slice(6, 8)
        assert_priorities_belong_to(buffer, {key for keys in learner.seen for key in keys[mine]}, first_number)


def test_feedback_goes_by_name_where_batches_do(lightning, pair):
    def training_step(self, batches, batch_idx):
        self.seen.append({name: batch["key"].tolist() for name, batch in batches.items()})
        loss = sum(self.q(batch["obs"]).square().mean() for batch in batches.values())
        return {"loss": loss, "td_error": {name: td_of(batch["number"].float()) for name, batch in batches.items()}}

    dataset = tr.MixedDataset({"red": pair[0], "blue": pair[1]}, 8)
    learner = make_learner(lightning, training_step=training_step)
    lightning.Trainer(max_steps=4, callbacks=[PriorityFeedback(dataset)], **BARE).fit(learner, dataset)
    for name, buffer, first_number in (("red", pair[0], 0), ("blue", pair[1], 1000)):
        assert buffer.stats().updated == 4 * 8
        assert_priorities_belong_to(buffer, {key for keys in learner.seen for key in keys[name]}, first_number)


def several_loaders(pair):
    return {"red": tr.ReplayDataset(pair[0], 8), "blue": tr.ReplayDataset(pair[1], 8), "other": DataLoader(range(99))}


@pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers")
def test_feedback_goes_to_the_part_of_several_loaders_that_it_is_for(lightning, pair):
    def training_step(self, batches, batch_idx):
        self.seen.append({name: batches[name]["key"].tolist() for name in ("red", "blue")})
        loss = sum(self.q(batches[name]["obs"]).square().mean() for name in ("red", "blue"))
        names = ("red", "blue") if batch_idx else ("red",)
        tds = {name: td_of(batches[name]["number"].float()) for name in names}
        return {"loss": loss, "td_error": tds, "td_red": tds["red"]}

    for red in (PriorityFeedback(pair[0], part="red"), PriorityFeedback(pair[0], key="td_red", part="red")):
        learner = make_learner(lightning, training_step=training_step)
        before = [buffer.stats().updated for buffer in pair]
        callbacks = [red, PriorityFeedback(pair[1], part="blue")]
        lightning.Trainer(max_steps=4, callbacks=callbacks, **BARE).fit(learner, several_loaders(pair))
        after = [buffer.stats().updated for buffer in pair]
        assert [now - then for now, then in zip(after, before, strict=True)] == [4 * 8, 3 * 8]
    for name, buffer, first_number in (("red", pair[0], 0), ("blue", pair[1], 1000)):
        updated = {key for seen in learner.seen[name == "blue" :] for key in seen[name]}
        raw = priorities(buffer, 64)
        assert all(raw[key].item() == pytest.approx(td_of(key + first_number), rel=1e-4) for key in updated)


@pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers")
@pytest.mark.parametrize(
    ("loaders", "part", "message"),
    [
        (several_loaders, None, r"a dict of \['red', 'blue', 'other'\] and no ReplayBatch.* part=\.\.\.\)"),
        (several_loaders, "green", r"a dict of \['red', 'blue', 'other'\] .* part is 'green'"),
        (lambda pair: list(several_loaders(pair).values()), "red", "the batch is a list .* as a dict"),
        (lambda pair: several_loaders(pair)["red"], "red", "part is 'red', and the batch is that of a single loader"),
    ],
)
def test_what_is_no_part_of_the_batch_is_an_error_that_says_so(lightning, pair, loaders, part, message):
    step = {"training_step": lambda self, batch, batch_idx: {"loss": self.q.weight.sum(), "td_error": torch.ones(8)}}
    trainer = lightning.Trainer(max_steps=1, callbacks=[PriorityFeedback(pair[0], part=part)], **BARE)
    with pytest.raises(ValueError, match=message):
        trainer.fit(make_learner(lightning, **step), loaders(pair))


def test_infinite_td_errors_stop_the_run_and_change_no_buffer(lightning, pair):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8)
    learner = make_learner(lightning, lambda loss, td, step: {"loss": loss, "td_error": td / 0})
    trainer = lightning.Trainer(max_steps=2, callbacks=[PriorityFeedback(dataset)], **BARE)
    with pytest.raises(ValueError, match="8 of 8 of the TD errors are NaN or infinite"):
        trainer.fit(learner, dataset)
    assert [buffer.stats().updated for buffer in pair] == [0, 0]


def test_feedback_to_one_of_the_buffers_is_refused(lightning, pair):
    trainer = lightning.Trainer(max_steps=2, callbacks=[PriorityFeedback(pair[0])], **BARE)
    with pytest.raises(ValueError, match="the batch mixes items of several buffers"):
        trainer.fit(make_learner(lightning), tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8))


def test_a_checkpoint_holds_the_place_in_all_streams_and_a_resumed_run_goes_on_there(lightning, tmp_path):
    def train(max_steps, checkpoint=None):
        buffers = [filled_buffer(sampler=tr.Uniform()) for _ in range(2)]
        dataset = tr.MixedDataset({buffers[0]: 1, buffers[1]: 1}, 8, steps=6)
        learner = make_learner(lightning)
        trainer = lightning.Trainer(max_steps=max_steps, callbacks=[PriorityFeedback(dataset)], **QUIET)
        trainer.fit(learner, dataset, ckpt_path=checkpoint, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{max_steps}.ckpt")
        return learner.seen

    whole = train(10)
    assert train(4) + train(10, checkpoint=tmp_path / "4.ckpt") == whole
    (saved,) = torch.load(tmp_path / "4.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert [(part["draws"], part["position"]) for part in saved["parts"]] == [(4, 4)] * 2
