"""The buffer under a plugin that writes checkpoints in a thread, and files that two checkpoints share."""

import errno
import shutil
import threading
from contextlib import contextmanager

import pytest
import torch

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

import pytorch_lightning
from lightning_learner import QUIET, ROWS, filled_buffer, make_learner

from torchreplay.lightning import PriorityFeedback, ReplayCheckpoint, ReplayDataModule

# Lightning remarks on runs that are resumed, in another directory or in the same.
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory .* exists")


def plugin_of(library):
    return library.plugins.io.AsyncCheckpointIO()


def trainer_of(library, directory, steps, *callbacks, plugin=None, every=5, **arguments):
    saving = library.callbacks.ModelCheckpoint(
        directory, **{"every_n_train_steps": every, "save_top_k": -1, "save_last": True, **arguments}
    )
    callbacks = [PriorityFeedback(), ReplayCheckpoint(), *callbacks, saving]
    options = QUIET | {"enable_checkpointing": True, "callbacks": callbacks}
    return library.Trainer(max_steps=steps, plugins=[plugin] if plugin else [], **options)


def data_of(buffer):
    return ReplayDataModule(buffer, 8, steps_per_epoch=20)


def checkpoints(directory):
    """The names of the checkpoints, each of which has a whole buffer beside it, and of no more."""
    names = sorted(path.name for path in directory.glob("*.ckpt"))
    assert sorted(path.name.removesuffix(".replay") for path in directory.glob("*.replay")) == names
    for name in names:
        with tr.ReplayBuffer.load(directory / f"{name}.replay") as buffer:
            assert len(buffer) == ROWS
    return names


def files_of(directory):
    """The inodes of the files with rows."""
    return {path.stat().st_ino for path in directory.rglob("*.safetensors")}


@contextmanager
def saves_held(monkeypatch):
    """Has every save wait for the event yielded; yields the threads that saved, too."""
    go_on, threads, save = threading.Event(), [], tr.ReplayBuffer.save

    def held(self, directory):
        threads.append(threading.current_thread())
        assert go_on.wait(60)
        save(self, directory)

    monkeypatch.setattr(tr.ReplayBuffer, "save", held)
    yield go_on, threads
    monkeypatch.setattr(tr.ReplayBuffer, "save", save)


def at(library, step, call):
    """Returns a callback that calls something after a step."""

    class At(library.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == step:
                call()

    return At()


# In a thread.


def test_steps_go_on_while_the_plugins_thread_saves_the_buffer(lightning, tmp_path, monkeypatch):
    buffer = filled_buffer()
    with saves_held(monkeypatch) as (go_on, threads):
        # The save of step 5 ends only once step 9 is over: in the training thread it would never.
        callback = at(lightning, 9, go_on.set)
        trainer = trainer_of(lightning, tmp_path, 10, callback, plugin=plugin_of(lightning))
        trainer.fit(make_learner(lightning), datamodule=data_of(buffer))
    assert threading.main_thread() not in threads
    assert checkpoints(tmp_path) == ["epoch=0-step=10.ckpt", "epoch=0-step=5.ckpt", "last.ckpt"]


def test_a_checkpoint_is_there_only_once_its_buffer_is(lightning, tmp_path, monkeypatch):
    buffer, seen = filled_buffer(), []
    with saves_held(monkeypatch) as (go_on, _):

        def look():
            seen.extend(path.name for path in tmp_path.glob("*.ckpt"))
            go_on.set()

        trainer = trainer_of(lightning, tmp_path, 7, at(lightning, 7, look), plugin=plugin_of(lightning))
        trainer.fit(make_learner(lightning), datamodule=data_of(buffer))
    assert seen == []
    assert checkpoints(tmp_path) == ["epoch=0-step=5.ckpt", "last.ckpt"]


@pytest.mark.parametrize("steps", [5, 30], ids=["at the end", "with a later save"])
def test_an_error_in_the_plugins_thread_ends_fit(lightning, tmp_path, monkeypatch, steps):
    def full(self, directory):
        raise OSError(errno.ENOSPC, "No space left on device", str(directory))

    monkeypatch.setattr(tr.ReplayBuffer, "save", full)
    trainer = trainer_of(lightning, tmp_path, steps, plugin=plugin_of(lightning))
    with filled_buffer() as buffer, pytest.raises(OSError, match="No space left"):
        trainer.fit(make_learner(lightning), datamodule=data_of(buffer))
    assert list(tmp_path.iterdir()) == []


def test_an_exception_waits_for_the_save_of_a_buffer_that_the_data_module_closes(lightning, tmp_path, monkeypatch):
    class Failure(Exception):
        pass

    def fail():
        threading.Timer(0.1, go_on.set).start()  # fit is on its way out by then, or will find all saved
        raise Failure

    with saves_held(monkeypatch) as (go_on, _):
        trainer = trainer_of(lightning, tmp_path, 9, at(lightning, 7, fail), plugin=plugin_of(lightning))
        with pytest.raises(Failure):
            trainer.fit(make_learner(lightning), datamodule=data_of(filled_buffer))
    assert checkpoints(tmp_path) == ["epoch=0-step=5.ckpt", "last.ckpt"]


def test_a_checkpoint_that_is_removed_before_it_is_written_does_not_stay(lightning, tmp_path, monkeypatch):
    with saves_held(monkeypatch) as (go_on, _):
        options = {"every": 2, "save_top_k": 1, "save_last": False}
        trainer = trainer_of(
            lightning, tmp_path, 8, at(lightning, 7, go_on.set), plugin=plugin_of(lightning), **options
        )
        trainer.fit(make_learner(lightning), datamodule=data_of(filled_buffer()))
    assert checkpoints(tmp_path) == ["epoch=0-step=8.ckpt"]


def test_a_run_resumes_from_what_the_plugins_thread_saved(lightning, tmp_path):
    plugin = plugin_of(lightning)
    trainer_of(lightning, tmp_path, 5, plugin=plugin).fit(make_learner(lightning), datamodule=data_of(filled_buffer()))
    buffer = tr.ReplayBuffer(filled_buffer().spec, ROWS, sampler=tr.Prioritized(alpha=1.0))
    resuming = trainer_of(lightning, tmp_path, 10, plugin=plugin)  # the same plugin, of a second Trainer
    resuming.fit(make_learner(lightning), datamodule=data_of(buffer), ckpt_path=tmp_path / "last.ckpt")
    assert resuming.global_step == 10
    assert len(buffer) == ROWS
    assert "epoch=0-step=10.ckpt" in checkpoints(tmp_path)


def test_a_plugin_saves_no_buffer_for_another_trainer(tmp_path):
    plugin = plugin_of(pytorch_lightning)
    trainer = trainer_of(pytorch_lightning, tmp_path, 5, plugin=plugin)
    trainer.fit(make_learner(pytorch_lightning), datamodule=data_of(filled_buffer()))
    options = QUIET | {"enable_checkpointing": True, "callbacks": [PriorityFeedback()]}
    other = pytorch_lightning.Trainer(max_steps=5, plugins=[plugin], default_root_dir=tmp_path / "other", **options)
    other.fit(make_learner(pytorch_lightning), datamodule=data_of(filled_buffer()))
    other.save_checkpoint(tmp_path / "other.ckpt")
    other.strategy.teardown()
    assert (tmp_path / "other.ckpt").exists()
    assert not (tmp_path / "other.ckpt.replay").exists()


def test_weights_that_a_spawned_rank_sends_home_take_no_buffer_along(tmp_path):
    trainer = trainer_of(pytorch_lightning, tmp_path, 5)
    trainer.fit(learner := make_learner(pytorch_lightning), datamodule=data_of(filled_buffer()))
    trainer.strategy.checkpoint_io.save_checkpoint(
        learner.state_dict(), tmp_path / ".temp.ckpt"
    )  # as its launcher does
    assert (tmp_path / ".temp.ckpt").exists()
    assert not (tmp_path / ".temp.ckpt.replay").exists()


# Shared files.


@pytest.mark.parametrize("in_thread", [False, True])
def test_last_beside_the_checkpoint_of_its_step_takes_no_second_copy(lightning, tmp_path, in_thread):
    plugin = plugin_of(lightning) if in_thread else None
    trainer = trainer_of(lightning, tmp_path, 5, plugin=plugin)
    trainer.fit(make_learner(lightning), datamodule=data_of(filled_buffer()))
    first, last = (tmp_path / f"{name}.ckpt.replay" for name in ("epoch=0-step=5", "last"))
    assert files_of(first) == files_of(last) != set()
    shutil.rmtree(first)
    with tr.ReplayBuffer.load(last) as buffer:
        assert buffer.gather(buffer.keys())["number"].tolist() == list(range(ROWS))


def test_a_last_that_is_saved_alone_has_what_was_written_since_the_best(tmp_path):
    buffer = filled_buffer(2 * ROWS)

    class WorseAndWorse(pytorch_lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            self.log("score", -float(trainer.global_step))
            if trainer.global_step == 7:
                buffer.extend(number=torch.arange(3), obs=torch.ones(3, 4))

    options = {"monitor": "score", "mode": "max", "save_top_k": 1}
    trainer = trainer_of(pytorch_lightning, tmp_path, 10, WorseAndWorse(), **options)
    trainer.fit(make_learner(pytorch_lightning), datamodule=data_of(buffer))
    for name, rows in (("epoch=0-step=5", ROWS), ("last", ROWS + 3)):
        with tr.ReplayBuffer.load(tmp_path / f"{name}.ckpt.replay") as loaded:
            assert len(loaded) == rows


def test_a_checkpoint_that_the_user_saves_has_what_was_written_since_the_one_before(tmp_path):
    buffer = filled_buffer(2 * ROWS)

    def save_twice():
        for name in ("first", "second"):
            trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
            buffer.extend(number=torch.arange(3), obs=torch.ones(3, 4))

    trainer = trainer_of(pytorch_lightning, tmp_path, 5, at(pytorch_lightning, 5, save_twice))
    trainer.fit(make_learner(pytorch_lightning), datamodule=data_of(buffer))
    for name, rows in (("first", ROWS), ("second", ROWS + 3), ("last", ROWS + 6)):
        with tr.ReplayBuffer.load(tmp_path / f"{name}.ckpt.replay") as loaded:
            assert len(loaded) == rows


def test_a_last_whose_twin_was_removed_is_saved_in_full(tmp_path, monkeypatch):
    save = tr.ReplayBuffer.save

    def taken_away(self, directory):
        save(self, directory)
        if "last" not in str(directory):
            shutil.rmtree(directory)

    monkeypatch.setattr(tr.ReplayBuffer, "save", taken_away)
    trainer = trainer_of(pytorch_lightning, tmp_path, 5)
    trainer.fit(make_learner(pytorch_lightning), datamodule=data_of(filled_buffer()))
    with tr.ReplayBuffer.load(tmp_path / "last.ckpt.replay") as buffer:
        assert len(buffer) == ROWS
