"""Explorers and learners that die or stop at chosen fault points, and what must hold of the buffer afterwards.

Everything here runs in an interpreter whose native module has fault points (`fault_build.py`).
"""

import contextlib
import itertools
import os
import random
import signal
import tempfile

import lapping_explorers as rows
import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
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
    """Of rows that are items by themselves; their explorers' stamps tell whether they are whole."""

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
    """Goes on whatever happens to others, in explorers that take turns."""
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


# Deaths of explorers alone

ROWS_BEGUN = {"append.busy": 1, "append.header": 1, "append.copied": 1, "append.done": 0, "append.committed": 0}


def lose_the_row_being_written(name, seed):
    """In a ring that never turns a death at any step of any row leaves all rows before it."""
    chance, lives = random.Random(seed), lives_of(name)
    for index, (point, begun) in itertools.product(lives.WAYS, ROWS_BEGUN.items()):
        buffer, nth = lives.buffer(capacity=200), chance.randint(1, 16)
        with faulty(lives.write, buffer, index, faults=[Fault(point, nth)]) as explorer:
            assert explorer.wait() == DIED
        assert len(buffer) == nth - begun, point
        lives.check_unbroken(buffer)
        lives.check(buffer, INDICES)


# Two deaths


def die_in_pairs(name, pairs, seed):
    """Two processes die at random points while another lives on. Returns how many of them died before their end."""
    chance, deaths = random.Random(seed), 0
    points = sorted(rehearse(Scene(name)).items())
    for _ in range(pairs):
        scene = Scene(name)
        faults = [Fault(point, chance.randint(1, count)) for point, count in chance.sample(points, 2)]
        try:
            deaths += scene.lose(faults)
            scene.check()
        except BaseException as error:
            error.add_note(f"with one process {faults[0]}, and another {faults[1]}")
            raise
    return deaths


# Scenes: what happens to a buffer while a process lives in which a fault is tried.


class Scene:
    """A life in a full buffer that is sound. Every time it is made it goes the same way."""

    LIMITER = None

    def __init__(self, name):
        self.lives = lives_of(name)
        self.buffer = self.lives.buffer(self.LIMITER)
        self.indices = 0

    def new_index(self):
        """The first of some indices that no explorer has had."""
        self.indices += INDICES
        return self.indices - INDICES

    def turn_the_ring(self):
        first = self.new_index()
        for index in range(first, first + 5):
            self.lives.write(self.buffer, index)

    def perform(self, start):
        """`start(body, *args)` starts the process in question. Returns its exit status."""
        self.turn_the_ring()
        len(self.buffer)
        return self.play(start)

    def play(self, start):
        with start(live, self.lives, self.buffer, self.new_index()) as process:
            return process.wait()

    def lose(self, faults):
        """Processes with these faults live beside one that has none. Returns how many died."""
        turns, told = shared_counters(1), shared_counters(1)
        with contextlib.ExitStack() as running:
            survivor = running.enter_context(
                Forked(live_until_told, self.lives, self.buffer, self.new_index(), turns, told)
            )
            victims = [
                running.enter_context(faulty(live, self.lives, self.buffer, self.new_index(), faults=[fault]))
                for fault in faults
            ]
            ends = [victim.wait() for victim in victims]
            assert set(ends) <= {0, DIED}
            later = turns[0] + 2
            eventually(lambda: turns[0] >= later)
            told[0] = 1
            assert survivor.wait() == 0
        return ends.count(DIED)

    def check(self):
        """Nothing is torn, lost or stuck, and whoever is left can use all of it."""
        assert self.buffer.stats().writers == 0, "a dead writer counts as alive"
        self.lives.check(self.buffer, self.indices)
        self.lives.check_last(self.buffer, self.indices)


def after_a_death_at(point):
    """What one who died has left, the others have to put right."""

    class AfterADeath(Scene):
        def play(self, start):
            with faulty(live, self.lives, self.buffer, self.new_index(), faults=[Fault(point)]) as dead:
                assert dead.wait() == DIED
            return super().play(start)

    return AfterADeath


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
    buffer._segment.wait_rows(1)
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


class Load(Scene):
    """Of a checkpoint, which stays as it is."""

    def perform(self, start):
        self.turn_the_ring()
        self.directory = tempfile.TemporaryDirectory()
        self.buffer.save(self.directory.name)
        with start(tr.ReplayBuffer.load, self.directory.name) as process:
            return process.wait()

    def check(self):
        self.buffer = tr.ReplayBuffer.load(self.directory.name)
        super().check()


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
    "after a death in an absorption": after_a_death_at("adopt.rows"),
    "after a death in an update": after_a_death_at("tree.totals"),
    "after a death with a ticket": after_a_death_at("append.ticket"),
    "after a death in a row": after_a_death_at("append.header"),
    "beside a stopped explorer": BesideAStoppedExplorer,
    "in an overtaken draw": OvertakenDraw,
    "in waits": Waits,
    "in a load": Load,
    "in a long absorption": LongAbsorption,
    "in a stop": Stop,
    "in a publication": Publication,
}
OF_TRAJECTORIES = {
    **dict(itertools.islice(OF_ROWS.items(), 9)),
    "when rows come during an absorption": RowsThatComeDuringAnAbsorption,
}


def scenes_of(name):
    return OF_ROWS if name == "rows" else OF_TRAJECTORIES


def rehearse(scene):
    """Plays a scene without a fault of ours. Returns how often its process comes to each point."""
    names = list(_C.fault_points())
    reached = shared_counters(len(names))

    def counting(body, args, faults):
        before = _C.fault_points()
        for fault in faults:
            fault.arm()  # which counts from there
        try:
            body(*args)
        finally:
            armed = [fault.arguments[0] for fault in faults]
            for place, (name, count) in enumerate(_C.fault_points().items()):
                reached[place] = count - (0 if name in armed else before[name])

    assert scene.perform(lambda body, *args, faults=(): Forked(counting, body, args, faults)) == 0
    scene.check()
    return {name: count for name, count in zip(names, reached, strict=True) if count}


def rehearse_all(names):
    """Returns the points that the scenes come to, and those there are."""
    reached = {point for name in names for make in scenes_of(name).values() for point in rehearse(make(name))}
    return sorted(reached), sorted(_C.fault_points())


def die_at_every_point(name, everywhere, seed):
    """Plays all scenes with a death at each point that they come to. Returns how many processes died.

    Args:
        name: "rows", or one of VIEWS.
        everywhere: Also at points that a scene before came to.
        seed: Of the choice at which time a process dies there.
    """
    chance, known, deaths = random.Random(seed), set(), 0
    for title, make in scenes_of(name).items():
        reached = rehearse(make(name))
        for point, count in reached.items():
            if everywhere or point not in known:
                # What depends on time may happen less often than in the rehearsal, but it happens.
                if not dies_at(make(name), Fault(point, chance.randint(1, count)), title):
                    assert dies_at(make(name), Fault(point), title), f"{point} was not reached {title}"
                deaths += 1
        known |= set(reached)
    return deaths


def dies_at(scene, fault, title):
    try:
        status = scene.perform(lambda body, *args, faults=(): faulty(body, *args, faults=[*faults, fault]))
        assert status in (0, DIED)
        scene.check()
    except BaseException as error:
        error.add_note(f"{title}, with a process {fault}")
        raise
    return status == DIED
