"""`ReplayDataModule`, under the Trainer of `pytorch_lightning` and of `lightning.pytorch` alike."""

import gc
import importlib
import types
import warnings

import pytest
import torch

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

from lightning_learner import BARE, QUIET, filled_buffer, fit, make_learner

from torchreplay.lightning import ReplayDataModule

# Lightning's own, under a torch newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


@pytest.fixture
def buffer():
    buffer = filled_buffer()
    yield buffer
    buffer.close()


# What Lightning sees of it.


def test_lightning_finds_nothing_to_warn_about(lightning, buffer, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loading in ({"max_steps": 3}, {"max_epochs": 2, "steps_per_epoch": 3}):
            learner = make_learner(lightning, on_after_backward=lambda self: self.log("one", 1.0, on_epoch=True))
            fit(lightning, buffer, learner, **loading, **QUIET, barebones=False)
    texts = [str(warning.message) for warning in caught]
    for complaint in ("does not have many workers", "__len__", "not resumable", "infer the batch_size"):
        assert not [text for text in texts if complaint in text]


def test_the_stream_is_one_plain_iterable_without_a_dataset_attribute(buffer):
    data = ReplayDataModule(buffer, 8)
    data.setup("fit")
    stream = data.train_dataloader()
    assert data.train_dataloader() is stream
    assert not isinstance(stream, torch.utils.data.DataLoader)
    assert not hasattr(stream, "dataset")
    assert next(iter(stream))["key"].shape == (8,)


def test_a_stream_asked_for_before_setup_is_an_error_that_says_so(buffer):
    with pytest.raises(RuntimeError, match=r'call `setup\("fit"\)` first'):
        ReplayDataModule(buffer).train_dataloader()


def test_epochs_may_be_overfitted_and_reloaded(lightning, buffer):
    learner = make_learner(lightning)
    fit(lightning, buffer, learner, max_epochs=2, steps_per_epoch=4, overfit_batches=2)
    fit(lightning, buffer, learner, max_epochs=2, steps_per_epoch=4, reload_dataloaders_every_n_epochs=1)
    assert len(learner.seen) == 2 * 2 + 2 * 4
    assert buffer.stats().sampled == len(learner.seen) * 8


def test_the_tuner_tries_the_batch_sizes_that_it_tells_of(lightning, buffer, tmp_path):
    learner, data = make_learner(lightning), ReplayDataModule(buffer, 4)
    trainer = lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    tuner = importlib.import_module(f"{lightning.__name__}.tuner").Tuner(trainer)
    found = tuner.scale_batch_size(learner, datamodule=data, init_val=4, max_trials=4, steps_per_trial=2)
    assert [len(keys) for keys in learner.seen] == [4, 4, 8, 8, 16, 16, 32, 32]
    assert found == data.batch_size == 32


def test_what_is_set_between_epochs_holds_for_the_next_loader(lightning, buffer):
    def on_train_epoch_end(self):
        data = self.trainer.datamodule
        data.batch_size, data.steps_per_epoch = 2 * data.batch_size, data.steps_per_epoch + 1

    learner = make_learner(lightning, on_train_epoch_end=on_train_epoch_end)
    fit(lightning, buffer, learner, max_epochs=3, steps_per_epoch=1, reload_dataloaders_every_n_epochs=1)
    assert [len(keys) for keys in learner.seen] == [8, 16, 16, 32, 32, 32]
    data = ReplayDataModule(buffer)
    data.setup("fit")
    data.batch_size = 0
    with pytest.raises(ValueError, match="batch_size is 0"):
        data.train_dataloader()


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_learner_that_validates_takes_its_loader_from_a_subclass_or_does_without(lightning, buffer):
    class WithValidation(ReplayDataModule):
        def val_dataloader(self):
            return tr.ReplayDataset(self.buffer, batch_size=2, steps=3)

    for kind, validated in ((ReplayDataModule, 0), (WithValidation, 3)):
        count = []
        learner = make_learner(lightning, validation_step=lambda self, batch, batch_idx: count.append(batch_idx))  # noqa: B023
        fit(lightning, kind(buffer, 8, steps_per_epoch=2), learner, max_epochs=1)
        assert len(count) == validated


@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_a_loader_that_nobody_defined_is_missed_by_its_name(lightning, buffer, stage):
    data = ReplayDataModule(buffer, 8, steps_per_epoch=2)
    for _ in range(2):
        with pytest.raises(Exception, match=f"`{stage}_dataloader` must be implemented"):
            getattr(data, f"{stage}_dataloader")()
        fit(lightning, data, max_epochs=1)


@pytest.mark.parametrize("state", ["new", "fitted"])
def test_printing_the_module_draws_nothing(lightning, buffer, state):
    data = ReplayDataModule(buffer, 8, steps_per_epoch=2)
    if state == "fitted":
        fit(lightning, data, max_epochs=1)
    before = buffer.stats().sampled
    assert "ReplayDataModule(batch_size=8, steps_per_epoch=2, buffer=" in str(data)
    assert str(data) == repr(data)
    assert buffer.stats().sampled == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1 << 30}, "batch_size is 1073741824: expected an int from 1 to 16777216"),
        ({"steps_per_epoch": -1}, "steps_per_epoch is -1"),
        ({"prefetch": None}, "prefetch is None"),
        ({"timeout": "1"}, "timeout is '1'"),
    ],
)
def test_a_number_out_of_range_is_named_at_once(buffer, arguments, message):
    with pytest.raises(ValueError, match=message):
        ReplayDataModule(buffer, **arguments)


def test_things_of_the_wrong_kind_are_refused(buffer):
    with pytest.raises(TypeError, match="buffer is int; it must be a ReplayBuffer or a function"):
        ReplayDataModule(3)
    with pytest.raises(TypeError, match="explorers is int; it must have start"):
        ReplayDataModule(buffer, explorers=4)
    with pytest.raises(TypeError, match=r"given as `buffer` returned None"):
        ReplayDataModule(lambda: None).setup("fit")
    with pytest.raises(TypeError, match=r"given as `explorers` returned None"):
        ReplayDataModule(buffer, explorers=lambda buffer: None).setup("fit")


def test_where_batches_go_is_passed_on_to_the_stream(buffer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    data = ReplayDataModule(buffer, 8, device="cuda", pin="ring")
    data.setup("fit")
    assert (str(data.train_dataloader().device), data.train_dataloader().pin) == ("cuda", "ring")
    data.teardown("fit")
    with pytest.raises(ValueError, match=r"pin is 'staging'.*device is None"):
        ReplayDataModule(buffer, 8, pin="staging")


def test_a_budget_bounds_the_elements_of_each_batch(lightning):
    with filled_buffer(ragged=True) as buffer:
        learner = make_learner(lightning)
        data = ReplayDataModule(buffer, 16, steps_per_epoch=6, budget={"words": 200})
        fit(lightning, data, learner, max_epochs=2)
    assert len(learner.seen) == 12, "batches of fewer items are batches"
    assert all(len(keys) < 16 and sum(keys) <= 200 for keys in learner.seen)


@pytest.mark.parametrize(("budget", "error"), [({"number": 9}, ValueError), ({"words": 0}, ValueError), (9, TypeError)])
def test_a_budget_that_is_none_is_refused_as_soon_as_there_is_a_buffer(budget, error):
    with filled_buffer(ragged=True) as buffer, pytest.raises(error, match="budget"):
        ReplayDataModule(buffer, budget=budget)
    made, explorers = [], RecordingExplorers()

    def make():
        made.append(filled_buffer(ragged=True))
        return made[0]

    data = ReplayDataModule(make, budget=budget, explorers=explorers)
    with pytest.raises(error, match="budget"):
        data.setup("fit")
    assert explorers.calls == ["start", "stop"]
    assert "closed" in repr(made[0])


def test_a_dataset_goes_through_all_items_in_each_epoch_of_a_trainer(lightning):
    with filled_buffer(sampler=tr.Uniform(replacement=False)) as buffer:
        ends = []
        learner = make_learner(lightning, on_train_epoch_end=lambda self: ends.append(len(self.seen)))
        trainer = lightning.Trainer(max_epochs=3, **BARE)
        trainer.fit(learner, tr.ReplayDataset(buffer, 24, epochs=1))
    assert ends == [3, 6, 9]
    for epoch in range(3):
        batches = learner.seen[3 * epoch : 3 * epoch + 3]
        assert [len(keys) for keys in batches] == [24, 24, 16]
        assert sorted(key for keys in batches for key in keys) == list(range(64))


def test_several_machines_are_refused_in_a_sentence(buffer):
    data = ReplayDataModule(buffer)
    data.trainer = types.SimpleNamespace(world_size=4, num_nodes=2, local_rank=0)
    with pytest.raises(
        RuntimeError, match=r"spans 2 machines.* lies in the memory of one.*torchreplay\.ray\.ShardedReplay"
    ):
        data.setup("fit")


# The life of the buffer and of the explorers.


class RecordingExplorers:
    """Explorers that write down what is done to them."""

    def __init__(self, buffer=None):
        self.buffer = buffer
        self.calls = []

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")


def test_explorers_run_for_as_long_as_fit_and_start_again_with_the_next(lightning, buffer):
    explorers = RecordingExplorers()
    calls = []
    learner = make_learner(lightning, on_train_batch_start=lambda self, *_: calls.append(list(explorers.calls)))
    data = ReplayDataModule(buffer, 8, steps_per_epoch=1, explorers=explorers)
    fit(lightning, data, learner, max_epochs=1)
    fit(lightning, data, learner, max_epochs=1)
    assert calls == [["start"], ["start", "stop", "start"]]
    assert explorers.calls == ["start", "stop"] * 2
    assert not buffer.stopped


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_explorers_are_stopped_and_a_made_buffer_is_closed_after_an_exception(lightning, error):
    made = []

    def interrupt(loss, td, step):
        raise error("in the training step")

    def make_explorers(buffer):
        made.append(RecordingExplorers(buffer))
        return made[-1]

    data = ReplayDataModule(filled_buffer, 8, explorers=make_explorers)
    with pytest.raises((RuntimeError, SystemExit)):
        fit(lightning, data, make_learner(lightning, interrupt), max_steps=1)
    assert [explorers.calls for explorers in made] == [["start", "stop"]]
    with pytest.raises(RuntimeError, match="closes it when `fit` ends"):
        _ = data.buffer


def test_explorers_that_fail_to_start_are_stopped(lightning, buffer):
    explorers = RecordingExplorers()
    explorers.start = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(lightning, ReplayDataModule(buffer, 8, explorers=explorers), max_steps=1)
    assert explorers.calls == ["stop"]


def test_explorers_of_a_forgotten_module_are_stopped(buffer):
    explorers = RecordingExplorers()
    data = ReplayDataModule(buffer, 8, explorers=explorers)
    data.setup("fit")
    del data
    gc.collect()
    assert explorers.calls == ["start", "stop"]


def test_teardown_may_come_twice_and_setup_too(buffer):
    explorers = RecordingExplorers()
    data = ReplayDataModule(buffer, 8, explorers=explorers)
    for _ in range(2):
        data.setup("fit")
    for _ in range(2):
        data.teardown("fit")
    data.on_exception(RuntimeError())
    assert explorers.calls == ["start", "stop"]


def test_other_stages_neither_make_a_buffer_nor_start_explorers():
    made = []
    data = ReplayDataModule(lambda: made.append(1), explorers=RecordingExplorers)
    for stage in ("validate", "test", "predict"):
        data.setup(stage)
        data.teardown(stage)
    assert made == []


def test_a_made_buffer_is_stopped_and_closed_and_a_given_one_stays_open(lightning, buffer):
    made = []

    def make_buffer():
        made.append(filled_buffer())
        return made[-1]

    seen_stopped = []
    explorers = RecordingExplorers()
    explorers.stop = lambda: seen_stopped.append(made[0].stopped)
    fit(lightning, ReplayDataModule(make_buffer, 8, explorers=explorers), max_steps=2)
    assert seen_stopped == [True]
    assert len(made) == 1
    with pytest.raises(Exception, match="closed"):
        made[0].sample(8)

    fit(lightning, ReplayDataModule(buffer, 8), max_steps=2)
    assert buffer.sample(8)["key"].shape == (8,)


# Checkpoints.


def test_a_resumed_run_draws_what_the_uninterrupted_run_draws(lightning, tmp_path):
    def train(max_steps, checkpoint=None):
        learner = make_learner(lightning)
        data = ReplayDataModule(lambda: filled_buffer(sampler=tr.Uniform()), 8, steps_per_epoch=6)
        trainer = lightning.Trainer(max_steps=max_steps, **QUIET)
        trainer.fit(learner, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{max_steps}.ckpt")
        return learner.seen

    whole = train(10)
    first = train(4)
    rest = train(10, checkpoint=tmp_path / "4.ckpt")
    assert first + rest == whole


@pytest.mark.parametrize("set_late", [False, True])
def test_batches_drawn_ahead_of_another_size_are_left_out(buffer, set_late):
    saved = tr.ReplayDataset(buffer, 8)
    next(iterator := iter(saved))
    state = saved.state_dict()
    iterator.close()
    data = ReplayDataModule(buffer, 8 if set_late else 16)
    data.setup("fit")
    data.train_dataloader().load_state_dict(state)
    data.batch_size = 16
    sizes = [len(batch["key"]) for batch, _ in zip(data.train_dataloader(), range(3), strict=False)]
    assert sizes == [16, 16, 16]
    data.teardown("fit")


def test_a_checkpoint_holds_the_place_in_the_stream_and_no_experience(lightning, buffer, tmp_path):
    trainer = fit(lightning, buffer, max_epochs=1, steps_per_epoch=3, **QUIET, barebones=False)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    place = {"draws": 3, "position": 0, "drawn": []}
    assert saved["ReplayDataModule"] == place
    assert saved["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [place]
