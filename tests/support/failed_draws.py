"""Draws that fail once they are counted, and what a clear leaves that is overtaken by a writer.

Everything here runs in an interpreter whose native module has fault points (`fault_build.py`).
"""

import signal

import numpy as np
import pytest
from faulty_lives import DIED, await_stop
from forked import Forked, eventually, shared_counters

import torchreplay as tr
from torchreplay import _C

SPEC = {"x": tr.Field((), "int64")}
BATCH = 16


def extend(buffer, first, n):
    buffer.extend(x=np.arange(first, first + n))


def hold_the_lock(buffer):
    _C.arm_fault("update.absorbed", 1, True)
    buffer.update_priorities([buffer.stats().rows_written - 1], [1.0])


def fail_in_a_redraw(buffer, error, told):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _C.init_waits(tr.ReplayTimeout, tr.Stopped, lambda _text: told.__setitem__(0, 1), 0.0)
    buffer.sample(BATCH)
    _C.arm_fault("draw.drawn", 1, True)
    with pytest.raises(error):
        buffer.sample(BATCH, timeout=0.2 if error is tr.ReplayTimeout else None)
    assert buffer.draws == 1  # the name of the next draw
    told[1] = 1
    eventually(lambda: told[2])
    buffer.sample(BATCH)
    assert buffer.draws == 2


def end_a_redraw(interrupt):
    """A draw finds its rows overwritten, and the lock that it needs once more held by a process that is stopped."""
    buffer = tr.ReplayBuffer(SPEC, 64, sampler=tr.Prioritized(), seed=0)
    extend(buffer, 0, 64)
    told = shared_counters(3)
    error = KeyboardInterrupt if interrupt else tr.ReplayTimeout
    with Forked(fail_in_a_redraw, buffer, error, told) as learner:
        assert await_stop(learner)
        assert (buffer.stats().draws, buffer.stats().sampled) == (2, 2 * BATCH)
        extend(buffer, 64, 64)
        with Forked(hold_the_lock, buffer) as holder:
            assert await_stop(holder)
            learner.signal(signal.SIGCONT)
            if interrupt:
                eventually(lambda: told[0])
                learner.signal(signal.SIGINT)
            eventually(lambda: told[1] or not learner.is_running())
            holder.signal(signal.SIGCONT)
            assert holder.wait() == 0
        assert (buffer.stats().draws, buffer.stats().sampled) == (1, BATCH)
        told[2] = 1
        assert learner.wait() == 0
    assert (buffer.stats().draws, buffer.stats().sampled) == (2, 2 * BATCH)


def clear(buffer):
    _C.arm_fault("lock.between", 1, True)
    buffer.clear()


def write_while_it_is_cleared(limiter):
    """Returns the rows that can be drawn, and the draws that the limiter admits of them."""
    buffer = tr.ReplayBuffer(SPEC, 20_000, seed=0)
    extend(buffer, 0, 20_000)
    buffer.stats()
    with Forked(clear, buffer) as process:
        assert await_stop(process)
        extend(buffer, 20_000, 100)
        assert buffer.stats().inserted == 20_100
        buffer.limiter = limiter
        process.signal(signal.SIGCONT)
        assert process.wait() == 0
    drawable = buffer.stats().drawable
    buffer.handle()  # somebody else could write
    for draws in range(1000):
        try:
            buffer.sample(1, timeout=0)
        except tr.ReplayTimeout:
            return drawable, draws
    return drawable, 1000


FLAG = tr.Field((), "bool")
STEPS = {"obs": tr.Field((), "int64"), "reward": tr.Field(), "terminated": FLAG, "truncated": FLAG}


def draw_an_epoch(buffer, told):
    _C.arm_fault("draw.drawn", 1, True)
    for batch in tr.ReplayDataset(buffer, 10, epochs=1, prefetch=0):
        told[0] += 1
        told[1] += len(batch["key"])


def lose_items_of_a_last_batch(max_draws):
    """Rows of the last batch of an epoch are overwritten while it is drawn. Returns its batches and their items."""
    sampler = tr.Uniform(replacement=False, max_draws=max_draws)
    buffer = tr.ReplayBuffer(STEPS, 12, view=tr.Transitions(), sampler=sampler, seed=0)
    writer = buffer.writer()
    writer.reset(obs=0)
    for k in range(1, 11):
        writer.step(obs=k, reward=0.0, terminated=False, truncated=False)
    told = shared_counters(2)
    with Forked(draw_an_epoch, buffer, told) as learner:
        assert await_stop(learner)
        for _ in range(3):  # one into the last slot, two over the oldest rows
            writer.reset(obs=0)
        learner.signal(signal.SIGCONT)
        assert learner.wait() == 0
    return list(told)


def sample_and_exit(buffer):
    buffer.sample(1)


def owe_draws(buffer, told):
    _C.arm_fault("draw.drawn", 1, True)
    with pytest.raises(tr.ReplayTimeout):
        buffer.sample(BATCH, timeout=0.2)
    told[0] = 1
    eventually(lambda: told[1])
    with Forked(sample_and_exit, buffer) as child:
        assert child.wait() == 0
    buffer.sample(1)


def owe_draws_in_a_process_that_forks():
    """Returns how often items came in all, and how often they may, where a draw went back once the lock was free."""
    buffer = tr.ReplayBuffer(SPEC, 2 * BATCH, sampler=tr.Prioritized(max_draws=3), seed=0)
    extend(buffer, 0, BATCH)
    came = 0
    told = shared_counters(2)
    for _ in range(2):
        came += len(buffer.sample(BATCH)["x"])
    with Forked(owe_draws, buffer, told) as learner:
        assert await_stop(learner)
        extend(buffer, BATCH, BATCH)
        extend(buffer, 2 * BATCH, 1)  # over a row that was drawn
        with Forked(hold_the_lock, buffer) as holder:
            assert await_stop(holder)
            learner.signal(signal.SIGCONT)
            eventually(lambda: told[0] or not learner.is_running())
            holder.signal(signal.SIGCONT)
            assert holder.wait() == 0
        told[1] = 1
        assert learner.wait() == 0
    came += 2
    while buffer.num_items:
        came += len(buffer.sample(1)["x"])
    return came, 3 * (2 * BATCH + 1) - 1


def give_draws_back(buffer):
    stream = iter(tr.ReplayDataset(buffer, 4, prefetch=1))
    next(stream)
    eventually(lambda: buffer.num_items == 0)
    _C.arm_fault("counts.uncounted", 1)
    stream.close()


def die_while_draws_go_back():
    """Returns how many items can be drawn after a learner has died when the first of four had gone back."""
    buffer = tr.ReplayBuffer(SPEC, 8, sampler=tr.Prioritized(max_draws=1), seed=0)
    extend(buffer, 0, 8)
    with Forked(give_draws_back, buffer) as learner:
        assert learner.wait() == DIED
    return buffer.num_items
