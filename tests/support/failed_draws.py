"""Draws that fail once they are counted, and what a clear leaves that is overtaken by a writer.

Everything here runs in an interpreter whose native module has fault points (`fault_build.py`).
"""

import signal

import numpy as np
import pytest
from faulty_lives import await_stop
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
    _C.init_waits(tr.ReplayTimeout, lambda _text: told.__setitem__(0, 1), 0.0)
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
