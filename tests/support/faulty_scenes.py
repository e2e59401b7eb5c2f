"""The scenes in which each fault is tried, by what is in the buffer.

Everything here runs in an interpreter whose native module has fault points (`fault_build.py`).
"""

import contextlib
import itertools
import signal

import numpy as np
import pytest
import torch
from draw_scenes import DrawCounts, Epochs, Versions
from faulty_lives import BATCH, Fault, await_stop, faulty, live
from forked import Forked
from queue_scenes import Admitted, DeadCommit, DroppedItems, LongValues, Queue, SlowEpisode, StoppedWriter
from restore_scenes import ExplorersAfterARestore, Load, Restore, RestoreBesideAnExplorer, RestoreInVain, RestoreTooLate
from scene import Scene, after_a_death_at
from torch.utils._pytree import tree_map

import torchreplay as tr
from torchreplay.schema.batch_plan import names_of


def learn_at_other_scales(lives, buffer, first):
    """Feeds back TD errors so large that the sums of priorities need another grid, and then so small that they do."""
    for index, scale in enumerate((1e12, 1e-12)):
        for _ in range(3):
            batch = buffer.sample(BATCH)
            buffer.update_priorities(batch, torch.linspace(0.1, 7.0, BATCH) * scale)
        keys1 = buffer._segment.column(-2)
        keys = keys1[keys1 > 0] - 1
        buffer.update_priorities(keys, torch.full((len(keys),), scale))
        lives.write(buffer, first + index)


class ChangesOfTheGrid(Scene):
    """Priorities become much larger, and then much smaller."""

    def play(self, start):
        with start(learn_at_other_scales, self.lives, self.buffer, self.new_index()) as process:
            return process.wait()


def rewrite_in_vain(buffer):
    """Gives all rows the values that they have."""
    keys = buffer.keys(rows=True)
    slots = keys % buffer.capacity
    values = tree_map(lambda column: column[slots], buffer.storage)
    if not isinstance(buffer.view, tr.Rows):
        values = {name: value for name, value in values.items() if name not in ("terminated", "truncated")}
    buffer.rewrite(keys, **values)


def end_and_clear(lives, buffer, first):
    """Ends an episode by hand, where there are any, discards what there is, takes all rows away, and writes others."""
    lives.write(buffer, first)
    rewrite_in_vain(buffer)
    buffer.discard(buffer.keys(rows=True))
    if not isinstance(buffer.view, tr.Rows):
        values = tree_map(lambda field: torch.zeros(field.shape, dtype=field.dtype), buffer.spec)
        observed = {name: values[name] for name in names_of(buffer.view.observation)}
        with buffer.writer() as writer:
            writer.reset(**observed)
            writer.step(**values)
            writer.step(**values)
            writer.end_episode()
    buffer.clear()
    lives.write(buffer, first + 1)


class EndsAndClears(Scene):
    """It ends an episode by hand, and takes all rows away."""

    def play(self, start):
        with start(end_and_clear, self.lives, self.buffer, self.new_index()) as process:
            return process.wait()

    def check(self):
        self.buffer.clear()  # its own episode is none that the others' numbers know
        assert len(self.buffer) == self.buffer.num_items == 0
        super().check()


class BesideAStoppedExplorer(Scene):
    """It holds a slot for more than a turn of the ring, and writes its row when it goes on."""

    def play(self, start):
        fault = Fault("append.busy", stop=True)
        with faulty(self.lives.write, self.buffer, self.new_index(), faults=[fault]) as explorer:
            assert await_stop(explorer)
            status = super().play(start)
            explorer.signal(signal.SIGCONT)
            assert explorer.wait() == 0
        return status


class OvertakenDraw(Scene):
    """The ring turns between a draw and the copy of its rows."""

    def play(self, start):
        fault = Fault("draw.drawn", stop=True)
        with start(live, self.lives, self.buffer, self.new_index(), faults=[fault]) as process:
            if await_stop(process):
                self.turn_the_ring()
                process.signal(signal.SIGCONT)
            return process.wait()


class RewrittenDraw(Scene):
    """The rows of a batch are rewritten between the draw and their copy."""

    def play(self, start):
        fault = Fault("draw.drawn", stop=True)
        with start(live, self.lives, self.buffer, self.new_index(), faults=[fault]) as process:
            if await_stop(process):
                rewrite_in_vain(self.buffer)
                process.signal(signal.SIGCONT)
            return process.wait()


class OutrunsALearner(Scene):
    """It is a turn of the ring ahead of a learner, gives way, and goes on when that does not come back."""

    def play(self, start):
        with contextlib.suppress(tr.ReplayTimeout):
            self.buffer.sample(BATCH, timeout=0)
        with start(self.turn_the_ring) as process:
            status = process.wait()
        self.new_index()
        return status


class RowsThatComeDuringAnAbsorption(Scene):
    """An explorer's row is committed when its slot has been looked at, and that of the next one has not."""

    def play(self, start):
        index = self.new_index() + 1  # one that writes whole episodes
        fault = Fault("append.busy", stop=True)
        with faulty(self.lives.write, self.buffer, index, faults=[fault]) as explorer:
            assert await_stop(explorer)
            fault = Fault("sync.done", stop=True)
            with start(len, self.buffer, faults=[fault]) as process:
                stopped = await_stop(process)
                explorer.signal(signal.SIGCONT)
                assert explorer.wait() == 0
                if stopped:
                    process.signal(signal.SIGCONT)
                return process.wait()


def wait_for_others(lives, buffer, first):
    """Waits for rows, and then for room."""
    with contextlib.suppress(tr.ReplayTimeout):
        buffer.sample(BATCH, timeout=0)
    buffer._segment.wait_rows(0, 1)
    for index in range(first, first + 2):
        lives.write(buffer, index)


class Waits(Scene):
    """A limiter makes it wait for others."""

    LIMITER = tr.SamplesPerInsert(1.0, 8, 0.5)

    def perform(self, start):
        with start(wait_for_others, self.lives, self.buffer, self.new_index()) as process:
            return self.attend(process)

    def attend(self, process):
        """Draws as long as somebody waits for it."""
        while process.is_running():
            if self.buffer._segment.census(True)["waiting"]:
                with contextlib.suppress(tr.ReplayTimeout):
                    self.buffer.sample(4, timeout=0)
        return process.wait()

    def check(self):
        assert self.buffer.stats().writers == 0, "a dead writer counts as alive"
        self.lives.check(self.buffer, self.indices)
        with Forked(self.lives.write, self.buffer, self.new_index()) as explorer:
            assert self.attend(explorer) == 0
        self.lives.check(self.buffer, self.indices)


class LongAbsorption(Scene):
    """So many rows that others may take the lock in between."""

    ROWS = 5000

    def __init__(self, name):
        self.stamps = np.arange(self.ROWS)
        self.buffer = tr.ReplayBuffer({"stamp": tr.Field((), torch.int64)}, self.ROWS, seed=0)

    def perform(self, start):
        self.buffer.extend(stamp=self.stamps)
        with start(len, self.buffer) as process:
            return process.wait()

    def check(self):
        batch = self.buffer.gather(self.stamps)
        assert torch.equal(batch["stamp"], torch.from_numpy(self.stamps))
        assert self.buffer.stats().drawable == self.ROWS


class Stop(Scene):
    def perform(self, start):
        with start(self.buffer.stop) as process:
            return process.wait()

    def check(self):
        assert self.buffer.stopped
        with pytest.raises(tr.Stopped):
            self.buffer.sample(1)


class Publication(Scene):
    """Weights on their way to the explorers."""

    def __init__(self, name):
        self.module = torch.nn.Linear(100, 100)
        self.weights = tr.SharedWeights(self.module)
        self.publish(1.0)

    def publish(self, value):
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(value)
        self.weights.publish(self.module)

    def pulled(self):
        """The weights there are, which are those of one publication."""
        module = torch.nn.Linear(100, 100)
        assert self.weights.pull(module)
        values = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).unique()
        assert len(values) == 1, "weights of two publications"
        return values.item()

    def perform(self, start):
        with start(self.publish, 2.0) as process:
            return process.wait()

    def check(self):
        assert self.pulled() in (1.0, 2.0)
        self.publish(3.0)
        assert self.pulled() == 3.0


OF_ROWS = {
    "in a sound buffer": Scene,
    "in changes of the grid": ChangesOfTheGrid,
    "in the end of an episode, and of all rows": EndsAndClears,
    "after a death in an absorption": after_a_death_at("adopt.rows"),
    "after a death in an update": after_a_death_at("tree.totals"),
    "after a death with a ticket": after_a_death_at("append.ticket"),
    "after a death in a row": after_a_death_at("append.header"),
    "beside a stopped explorer": BesideAStoppedExplorer,
    "in an overtaken draw": OvertakenDraw,
    "in a draw of rows that are rewritten": RewrittenDraw,
    "ahead of a learner": OutrunsALearner,
    "in waits": Waits,
    "in a load": Load,
    "in a restore": Restore,
    "in a restore in vain": RestoreInVain,
    "in a restore beside an explorer": RestoreBesideAnExplorer,
    "in a restore before explorers": ExplorersAfterARestore,
    "in a restore that comes too late": RestoreTooLate,
    "in a long absorption": LongAbsorption,
    "in a stop": Stop,
    "in a publication": Publication,
    "in epochs": Epochs,
    "in draws that are counted": DrawCounts,
    "in queues": Queue,
    "after a death in a commit": DeadCommit,
    "in a queue with an admission": Admitted,
    "of items that are too old": Versions,
    "beside a slow episode in a queue": SlowEpisode,
    "beside a stopped writer in a queue": StoppedWriter,
    "with values of any length": LongValues,
    "in queues that drop the oldest": DroppedItems,
}
OF_TRAJECTORIES = {
    **dict(itertools.islice(OF_ROWS.items(), 16)),
    "when rows come during an absorption": RowsThatComeDuringAnAbsorption,
}


def scenes_of(name):
    return OF_ROWS if name == "rows" else OF_TRAJECTORIES
