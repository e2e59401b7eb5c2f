"""Scenes of buffers in which a draw changes what can be drawn, and of items that become too old."""

import contextlib

import numpy as np
import torch
from faulty_lives import DIED, Fault, faulty
from forked import shared_counters
from scene import Scene

import torchreplay as tr


class Epochs(Scene):
    """A process draws without replacement, through the ends of epochs."""

    ITEMS, DRAWN = 40, 16

    def __init__(self, name):
        self.buffer = tr.ReplayBuffer(
            {"x": tr.Field((), "int64")}, self.ITEMS, sampler=tr.Uniform(replacement=False), seed=0
        )
        self.buffer.extend(x=np.arange(self.ITEMS))
        self.got = shared_counters(self.ITEMS)

    def draw(self):
        for _ in range(6):
            for item in self.buffer.sample(self.DRAWN)["x"].tolist():
                self.got[item] += 1

    def perform(self, start):
        with start(self.draw) as process:
            return process.wait()

    def check(self):
        ended, due, items = self.buffer._segment.epoch(False)
        assert items == self.ITEMS
        left = np.zeros(self.ITEMS, int)
        if due:
            for batch in tr.ReplayDataset(self.buffer, self.DRAWN, epochs=1):
                left[batch["x"].numpy()] += 1
        assert left.sum() == due
        assert left.max() <= 1
        owed = ended + 1 - left - np.asarray(self.got[:])  # of what each was to be drawn
        assert (owed >= 0).all(), "an item came twice before others came once"
        assert owed.max() <= 2, "more than a batch was lost"
        assert owed.sum() <= 2 * self.DRAWN, "more than a batch was lost"
        whole = np.zeros(self.ITEMS, int)
        for batch in tr.ReplayDataset(self.buffer, self.DRAWN, epochs=2):
            np.add.at(whole, batch["x"].numpy(), 1)
        assert (whole == 2).all()


class DrawCounts(Scene):
    """A process draws items that leave after so many draws. Another has died in a draw."""

    ITEMS, DRAWN, MOST = 40, 8, 2

    def __init__(self, name):
        kinds = [tr.Uniform(max_draws=self.MOST), tr.Prioritized(max_draws=self.MOST)]
        kinds.append(tr.Uniform(replacement=False, max_draws=self.MOST))
        self.buffers = [tr.ReplayBuffer({"x": tr.Field((), "int64")}, self.ITEMS, sampler=kind) for kind in kinds]
        for buffer in self.buffers:
            buffer.extend(x=np.arange(self.ITEMS))
        self.got = [shared_counters(self.ITEMS) for _ in kinds]

    def draw(self, batches=3):
        for buffer, got in zip(self.buffers, self.got, strict=True):
            for _ in range(batches):
                if self.ITEMS * self.MOST - sum(got[:]) >= 4 * self.DRAWN:
                    stream = iter(tr.ReplayDataset(buffer, self.DRAWN, prefetch=2))
                    for item in next(stream)["x"].tolist():
                        got[item] += 1
                    stream.close()

    def perform(self, start):
        with faulty(self.draw, faults=[Fault("counts.counted")]) as dead:
            assert dead.wait() == DIED
        with start(self.draw) as process:
            return process.wait()

    def check(self):
        for buffer, got in zip(self.buffers, self.got, strict=True):
            while buffer.num_items:
                for item in buffer.sample(1)["x"].tolist():
                    got[item] += 1
            assert max(got[:]) <= self.MOST, "an item came too often"
            assert self.MOST * self.ITEMS - sum(got[:]) <= 6 * self.DRAWN, "more was lost than the dead had drawn"
            stats = buffer.stats()
            assert stats.drawable == 0


class Versions(Scene):
    """A process takes items away that are too old for the learner, and draws others. Another has died in that."""

    ITEMS, DRAWN = 40, 8

    def __init__(self, name):
        spec = {"x": tr.Field((), torch.int64), "policy_version": tr.Field((), torch.int64)}
        kinds = [tr.Fifo(max_age=1), tr.Uniform(max_draws=2, max_age=1), tr.Prioritized(max_age=1)]
        self.buffers = [tr.ReplayBuffer(spec, self.ITEMS, sampler=kind) for kind in kinds]
        for buffer in self.buffers:
            versions = np.arange(self.ITEMS) // (self.ITEMS // 4)  # 0 to 3
            buffer.extend(x=np.arange(self.ITEMS), policy_version=versions)

    def draw(self):
        for buffer in self.buffers:
            version = min(4, buffer.policy_version + 1)
            buffer.policy_version = version
            with buffer.claim(self.DRAWN) if isinstance(buffer.sampler, tr.Fifo) else self.drawn(buffer) as batch:
                assert batch["age"].tolist() == (version - batch["policy_version"]).tolist()
                assert batch["age"].max() <= 1

    @contextlib.contextmanager
    def drawn(self, buffer):
        yield buffer.sample(self.DRAWN)

    def perform(self, start):
        with faulty(self.draw, faults=[Fault("dirty.set")]) as dead:
            assert dead.wait() == DIED
        with faulty(self.draw, faults=[Fault("expire.item", 3)]) as dead:
            assert dead.wait() in (0, DIED)
        with start(self.draw) as process:
            return process.wait()

    def check(self):
        for buffer in self.buffers:
            buffer.policy_version = 4
            with buffer.claim(1) if isinstance(buffer.sampler, tr.Fifo) else self.drawn(buffer) as batch:
                assert batch["policy_version"].tolist() == [3] * len(batch["key"])
            left = buffer.num_items
            assert 0 < left <= self.ITEMS // 4
            buffer.policy_version = 5
            assert buffer.num_items == 0
