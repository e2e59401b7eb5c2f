"""A queue and a model agree: a run that was killed goes on with the items that its saved model had not seen."""

import os
import signal

import numpy as np
import pytest
import torch
from forked import Forked, shared_counters
from gloo_ranks import run_ranks
from lightning_learner import QUIET

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

import pytorch_lightning

from torchreplay.buffer.local_source import LocalSource
from torchreplay.lightning import ReplayCheckpoint, ReplayDataModule, checkpoint_io
from torchreplay.lightning.checkpoint_io import BufferCheckpointIO, _Writer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed", "ignore:Checkpoint directory .* exists", "ignore:Be aware that when using"
)

SPEC = {"x": tr.Field((), "int64")}
ITEMS, BATCH, EVERY = 42, 4, 2


class Learner(pytorch_lightning.LightningModule):
    """Its state says which items it has learnt from, in their order."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.full((2 * ITEMS,), -1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        n = len(batch["x"])
        self.seen[self.count : self.count + n] = batch["x"]
        self.count += n
        return self.weight.sum()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dying(owner, name, nth, after):
    """Has this process die at the nth call of a function, before it does anything or after it has done all."""
    done, calls = getattr(owner, name), 0

    def call(*args, **options):
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            die()
        result = done(*args, **options)
        if calls == nth and after:
            die()
        return result

    setattr(owner, name, call)


STEPS = {
    "the buffer": (BufferCheckpointIO, "save_buffer"),
    "both": (_Writer, "save_checkpoint"),
    "the wait for the disk": (checkpoint_io, "sync"),
    "the end of what was held": (LocalSource, "end_held"),
    "the next step": (Learner, "training_step"),
}
MANUAL = [(in_file, "manual", step) for in_file in (True, False) for step in STEPS]
NEXT = [(False, "next", step) for step in ("the buffer", "both", "the next step")]


def newest(directory):
    """The checkpoint that a run goes on from, if there is one."""
    last = directory / "last.ckpt"
    if last.exists():
        return last
    return max(directory.glob("*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2]), default=None)


def queue_of(directory, in_file, commit):
    """The queue of a run that begins or goes on."""
    path = directory / "queue" if in_file else None
    if in_file and path.exists():
        return tr.ReplayBuffer.open(path)
    queue = tr.ReplayBuffer(SPEC, 64, sampler=tr.Fifo(commit=commit), path=path)
    if newest(directory) is None:
        queue.extend(x=np.arange(ITEMS))
    return queue


def train(directory, in_file, commit, prefetch, learner, seen=None):
    torch.set_num_threads(1)
    with queue_of(directory, in_file, commit) as queue:
        # A name that is overwritten has the new buffer before the new model: by hand alone items are held that long.
        saving = pytorch_lightning.callbacks.ModelCheckpoint(
            directory, every_n_train_steps=EVERY, save_last=commit == "manual", save_top_k=-1
        )
        options = QUIET | {"enable_checkpointing": True, "max_epochs": 1}
        trainer = pytorch_lightning.Trainer(callbacks=[saving, ReplayCheckpoint()], **options)
        data = ReplayDataModule(queue, BATCH, prefetch=prefetch)
        trainer.fit(learner, datamodule=data, ckpt_path=newest(directory))
        if seen is not None:
            for place, item in enumerate(learner.seen.tolist()):
                seen[place] = item


def run_to_death(step, *given):
    dying(*step)
    train(*given)


def assert_each_item_once(directory, in_file, commit, prefetch):
    seen = shared_counters(2 * ITEMS)
    with Forked(train, directory, in_file, commit, prefetch, Learner(), seen) as run:
        assert run.wait() == 0
    assert seen[:].tolist() == [*range(ITEMS), *[-1] * ITEMS]


@pytest.mark.slow
@pytest.mark.parametrize(("in_file", "commit", "step"), MANUAL + NEXT)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_run_killed_at_any_step_of_a_save_goes_on_with_what_the_saved_model_had_not_seen(
    tmp_path, in_file, commit, step, after
):
    for nth, prefetch in ((1, 0), (4, 2)):
        directory = tmp_path / str(nth)
        directory.mkdir()
        with Forked(run_to_death, (*STEPS[step], nth, after), directory, in_file, commit, prefetch, Learner()) as run:
            assert run.wait() == -signal.SIGKILL
        assert_each_item_once(directory, in_file, commit, prefetch)


def test_a_second_fit_of_one_process_gets_again_what_came_after_the_checkpoint(tmp_path):
    with tr.ReplayBuffer(SPEC, 64, sampler=tr.Fifo(commit="manual")) as queue:
        queue.extend(x=np.arange(ITEMS))
        options = QUIET | {"enable_checkpointing": True}
        first, data = Learner(), ReplayDataModule(queue, BATCH)
        saving = pytorch_lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}")
        trainer = pytorch_lightning.Trainer(max_steps=3, callbacks=[saving, ReplayCheckpoint()], **options)
        trainer.fit(first, datamodule=data)
        assert first.count == 3 * BATCH
        assert queue.stats().held_items == BATCH
        second = Learner()
        trainer = pytorch_lightning.Trainer(max_epochs=1, callbacks=[ReplayCheckpoint()], **options)
        trainer.fit(second, datamodule=data, ckpt_path=tmp_path / "step=2.ckpt")
        assert second.seen[:ITEMS].tolist() == list(range(ITEMS))


def train_in_groups(directory, learner, seen=None):
    """Gives the Trainer groups of two: of an item, and of one that comes much later."""
    path = directory / "queue"
    if path.exists():
        queue = tr.ReplayBuffer.open(path)
    else:
        queue = tr.ReplayBuffer(SPEC | {"prompt": SPEC["x"]}, 64, sampler=tr.Fifo(commit="manual"), path=path)
        queue.extend(x=np.arange(ITEMS), prompt=np.arange(ITEMS) % (ITEMS // 2))
    saving = pytorch_lightning.callbacks.ModelCheckpoint(directory, every_n_train_steps=EVERY, save_top_k=-1)
    options = QUIET | {"enable_checkpointing": True, "max_epochs": 1}
    trainer = pytorch_lightning.Trainer(callbacks=[saving, ReplayCheckpoint(queue)], **options)
    trainer.fit(learner, tr.GroupDataset(queue, "prompt", 2, 2), ckpt_path=newest(directory))
    queue.close()
    if seen is not None:
        for place, item in enumerate(learner.seen.tolist()):
            seen[place] = item


@pytest.mark.slow
@pytest.mark.parametrize("step", ["both", "the next step"])
def test_a_killed_run_goes_on_with_the_groups_that_its_saved_model_had_not_seen(tmp_path, step):
    def run_and_die():
        dying(*STEPS[step], 3, False)
        train_in_groups(tmp_path, Learner())

    with Forked(run_and_die) as run:
        assert run.wait() == -signal.SIGKILL
    seen = shared_counters(2 * ITEMS)
    with Forked(train_in_groups, tmp_path, Learner(), seen) as run:
        assert run.wait() == 0
    groups = [item for first in range(ITEMS // 2) for item in (first, first + ITEMS // 2)]
    assert seen[:].tolist() == [*groups, *[-1] * ITEMS]


@pytest.mark.slow
def test_a_checkpoint_knows_what_all_ranks_have_learnt_from(tmp_path):
    items, ranks = 40, 2
    path, saved = tmp_path / "queue", tmp_path / "step=2.ckpt"
    with tr.ReplayBuffer(SPEC, 64, sampler=tr.Fifo(commit="manual"), path=path) as queue:
        queue.extend(x=np.arange(items))
    learnt, before = shared_counters(items), shared_counters(items)

    class Rank(Learner):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3 and not before[0]:
                die()
            for item in batch["x"].tolist():
                learnt[item] += self.global_step < 2 or before[0]
            return super().training_step(batch, batch_idx)

    def fit(rank):
        saving = pytorch_lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}")
        options = QUIET | {"enable_checkpointing": True, "devices": ranks, "strategy": "ddp", "max_steps": 5}
        trainer = pytorch_lightning.Trainer(callbacks=[saving, ReplayCheckpoint()], **options)
        data = ReplayDataModule(lambda: tr.ReplayBuffer.open(path), BATCH)
        trainer.fit(Rank(), datamodule=data, ckpt_path=saved if saved.exists() else None)
        return trainer.global_step

    assert {rank["status"] for rank in run_ranks(tmp_path, fit, ranks)} == {-signal.SIGKILL}
    assert sum(learnt[:]) == 2 * ranks * BATCH
    before[0] = 1
    assert [rank["value"] for rank in run_ranks(tmp_path, fit, ranks)] == [5, 5]
    assert learnt[:].tolist() == [1] * items
