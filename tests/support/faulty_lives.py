"""What explorers and learners do, in lives that end or stop at chosen fault points.

Everything here runs in an interpreter whose native module has fault points (`fault_build.py`).
"""

import contextlib
import itertools
import os

import lapping_explorers as rows
import numpy as np
import torch
from forked import Forked
from numbered_episodes import EPISODES, LANES, STEPS, assert_streams_are_unbroken, spec, writing
from numbered_items import VIEWS, assert_exactly_the_complete_items_can_be_drawn, held_codes

import torchreplay as tr
from torchreplay import _C

DIED = 86  # exit status of a process that died at a fault point
BATCH = 16
INDICES = 8  # of explorers that one life may use, a multiple of 4


# The lives of a buffer's users. They do everything that explorers and learners do, and always the same.


def learn(buffer):
    buffer.stats()
    with contextlib.suppress(tr.ReplayTimeout):  # there may be no complete item
        batch = buffer.sample(BATCH, timeout=0)
        buffer.update_priorities(batch, torch.linspace(0.1, 7.0, BATCH))
        buffer.gather(batch["key"])
    buffer._segment.export_rows(0, buffer.capacity)  # what save() copies


class RowLives:
    """Of rows that are items by themselves; their explorers' stamps show whether they are whole."""

    WAYS = (0,)  # explorers that write in different ways

    def buffer(self, limiter=None, capacity=rows.CAPACITY):
        return tr.ReplayBuffer(rows.SPEC, capacity, sampler=tr.Prioritized(0.6), limiter=limiter, seed=0)

    def write(self, buffer, index):
        """Writes a quarter of the ring as explorer `index`."""
        pool = rows.pool_of(index)
        with buffer.writer() as writer:
            for row in pool[:3]:
                writer.append(**row)
            writer.extend(**rows.stacked(pool[3:]), priority=np.linspace(0.5, 2 + index % 7, len(pool) - 3))

    def check(self, buffer, indices):
        """While nobody writes: all rows are whole, and can be drawn."""
        size = len(buffer)
        key1 = buffer._segment.column(-2)
        batch = buffer.gather(key1[key1 > 0] - 1)
        rows.assert_whole(batch, indices)
        assert len(batch["key"]) == size == buffer.stats().drawable

    def check_unbroken(self, buffer):
        """While the ring has not turned: the rows are the first ones of one explorer."""
        assert buffer.storage["stamp"][: len(buffer)].tolist() == [rows.stamp_of(0, i) for i in range(len(buffer))]

    def check_last(self, buffer, indices):
        rows.assert_every_slot_takes_a_new_row(buffer, indices)
        rows.assert_priorities_are_sound(buffer)


class LinkedLives:
    """Of rows linked in time, under one of the views of `numbered_items`."""

    CAPACITY = 96
    WAYS = (0, 1, 2, 3, 7)

    def __init__(self, name):
        self.items = VIEWS[name]

    def buffer(self, limiter=None, capacity=CAPACITY):
        view, sampler = self.items.view, tr.Prioritized(0.6)
        return tr.ReplayBuffer(spec(), capacity, view=view, sampler=sampler, limiter=limiter, seed=0)

    def write(self, buffer, index):
        """Writes about a quarter of the ring as explorer `index`, in one of four ways."""
        calls = writing(buffer, index)
        written = 0
        while written < self.CAPACITY // 4:
            written += next(calls)
        calls.close()

    def check(self, buffer, indices):
        assert_exactly_the_complete_items_can_be_drawn(buffer, self.items, indices * LANES)

    def check_unbroken(self, buffer):
        assert_streams_are_unbroken(held_codes(buffer))

    def check_last(self, buffer, indices):
        """One more turn of the ring leaves no slot and no item of the dead."""
        for index in range(indices, indices + 6):
            self.write(buffer, index)
        assert len(buffer) == self.CAPACITY
        assert held_codes(buffer).min() >= indices * LANES * EPISODES * STEPS, "a slot is stuck"
        self.check(buffer, indices + 6)


def lives_of(name):
    return RowLives() if name == "rows" else LinkedLives(name)


def live(lives, buffer, first):
    """What a process does in which a fault is tried: it is explorers with indices from `first` on, and a learner."""
    learn(buffer)
    for index in range(first, first + 5):
        lives.write(buffer, index)
        learn(buffer)


def live_until_told(lives, buffer, first, turns, told):
    """Goes on beside deaths of others, in explorers that take turns."""
    for turn in itertools.count():
        lives.write(buffer, first + turn % INDICES)
        learn(buffer)
        turns[0] += 1
        if told[0]:
            return


class Fault:
    """Where a process is to die, or to stop: the `nth` time that it comes to a point."""

    def __init__(self, point, nth=1, stop=False):
        self.arguments = point, nth, stop

    def arm(self):
        _C.arm_fault(*self.arguments)

    def __str__(self):
        point, nth, stop = self.arguments
        return f"{'stopped' if stop else 'dead'} at {point}, the {nth}. time"


def faulty(body, *args, faults=()):
    """Starts a process that runs `body(*args)` with these faults."""

    def armed():
        for fault in faults:
            fault.arm()
        body(*args)

    return Forked(armed)


def await_stop(process):
    """Returns when it has stopped (True) or ended (False)."""
    state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return state.si_code == os.CLD_STOPPED
