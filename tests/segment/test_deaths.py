"""Deaths of every kind but SIGKILL: of explorers, learners and owners, in all of their calls."""

import faulthandler
import multiprocessing as mp
import os
import random
import resource
import signal

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr

SPEC = {"stamp": tr.Field((), torch.int64), "double": tr.Field((40,), torch.int64)}
CAPACITY = 64
BATCH = 32


class Died(Exception):
    pass


def raise_died(*_):
    raise Died


def exit_at_once(*_):
    os._exit(7)


# The signal that brings it about, what the process does about the signal, and the status it ends with.
WAYS = {
    "SIGSEGV": (signal.SIGSEGV, signal.SIG_DFL, -signal.SIGSEGV),
    "SIGTERM": (signal.SIGTERM, signal.SIG_DFL, -signal.SIGTERM),
    "an exception": (signal.SIGUSR1, raise_died, 1),
    "os._exit": (signal.SIGUSR1, exit_at_once, 7),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


class Mortal(Forked):
    """A process that dies in a given way on request."""

    def __init__(self, way, body, *args):
        self._number, action, self._expected = way

        def live():
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(self._number, action)
            body(*args)

        super().__init__(live)

    def die(self):
        self.signal(self._number)
        assert self.wait() == self._expected


def write_for_ever(buffer, rows):
    chunk = np.arange(5)
    with buffer.writer() as writer:
        while True:
            stamps = 10 * rows[0] + chunk
            writer.extend(stamp=stamps, double=np.repeat(2 * stamps[:, None], 40, axis=1))
            writer.append(stamp=1, double=np.full(40, 2))
            rows[0] += 1


def learn_for_ever(buffer, batches):
    while True:
        batch = draw_whole(buffer)
        buffer.update_priorities(batch, torch.rand(BATCH))
        batches[0] += 1


def draw_whole(buffer):
    batch = buffer.sample(BATCH, timeout=60)
    assert (batch["double"] == 2 * batch["stamp"][:, None]).all(), "a torn row"
    return batch


def make_buffer(**arguments):
    return tr.ReplayBuffer(SPEC, CAPACITY, sampler=tr.Prioritized(), seed=0, **arguments)


@pytest.mark.slow
@each_way
def test_explorers_and_learners_that_die_leave_whole_rows_a_free_lock_and_no_place_taken(way):
    buffer = make_buffer()
    chance = random.Random(0)
    lasting, rows, batches = (shared_counters(1) for _ in range(3))
    with Forked(write_for_ever, buffer, lasting):
        for _ in range(8):
            rows[0] = batches[0] = 0
            with (
                Mortal(way, write_for_ever, buffer, rows) as explorer,
                Mortal(way, learn_for_ever, buffer, batches) as learner,
            ):
                enough = chance.randrange(1, 30)
                eventually(lambda n=enough: min(rows[0], batches[0]) >= n, interval=0)
                for victim in chance.sample([explorer, learner], 2):
                    victim.die()
                    draw_whole(buffer)
        stats = buffer.stats()
        assert (stats.writers, stats.learners) == (1, 1)
    with buffer.writer() as writer:
        for stamp in range(2 * CAPACITY):
            writer.append(stamp=stamp, double=np.full(40, 2 * stamp))
        draw_whole(buffer)
        assert sorted(buffer.storage["stamp"].tolist()) == list(range(CAPACITY, 2 * CAPACITY)), "a slot was lost"


def own(pipe, limiter):
    buffer = make_buffer(limiter=limiter)
    pipe.send(buffer.handle())
    while True:
        buffer.sample(1, timeout=60)


def note_why_it_was_stopped(handle, rows, reason):
    try:
        write_for_ever(tr.ReplayBuffer.attach(handle), rows)
    except tr.Stopped as error:
        text = str(error).encode()
        reason[: len(text)] = text
        raise


@pytest.mark.slow
@each_way
@pytest.mark.parametrize("limiter", [tr.MinSize(), tr.SamplesPerInsert(0.5, min_size=100)], ids=["free", "limited"])
def test_explorers_whose_owner_dies_are_stopped_with_the_reason(way, limiter, monkeypatch):
    monkeypatch.setattr("torchreplay.segment.waits.RETURN_GRACE", 0.2)
    mine, theirs = mp.Pipe()
    rows, reason = shared_counters(1), shared_counters(64).cast("B")
    with Mortal(way, own, theirs, limiter) as owner:
        handle = mine.recv()
        buffer = tr.ReplayBuffer.attach(handle)  # to look on: who never draws is no learner
        with Forked(note_why_it_was_stopped, handle, rows, reason) as explorer:
            eventually(lambda: rows[0] > 20)
            owner.die()
            assert explorer.wait() == 0
    text = bytes(reason).decode()
    assert "nobody draws what this writer writes: the process that made the buffer is gone" in text
    assert buffer.stats().writers == 0


@pytest.mark.slow
@each_way
def test_other_learners_go_on_drawing_when_the_owner_dies_and_explorers_go_on_for_them(way, monkeypatch):
    monkeypatch.setattr("torchreplay.segment.waits.RETURN_GRACE", 0.2)
    mine, theirs = mp.Pipe()
    rows = shared_counters(1)
    with Mortal(way, own, theirs, tr.SamplesPerInsert(8.0, min_size=100)) as owner:
        buffer = tr.ReplayBuffer.attach(mine.recv())
        with Forked(write_for_ever, buffer, rows) as explorer:
            draw_whole(buffer)
            owner.die()
            for _ in range(3):
                before = rows[0]
                eventually(lambda seen=before: draw_whole(buffer) and rows[0] > seen + 100)
            assert explorer.is_running()
