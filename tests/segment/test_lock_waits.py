"""Waits for the lock while its holder is stopped: how long they take, what they say, and what ends them."""

import re
import signal
import threading

import pytest
from forked import Forked, eventually, shared_counters
from limited_buffers import SPEC, append_until_stopped, extend
from stopped_holder import StoppedHolder

import torchreplay as tr
from torchreplay import _C


@pytest.fixture
def buffer():
    buffer = tr.ReplayBuffer(SPEC, 64, sampler=tr.Prioritized(), seed=0)
    extend(buffer, 10)
    return buffer


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_a_draw_with_a_timeout_ends_with_the_process_that_holds_the_lock_and_its_state(buffer, timeout):
    with StoppedHolder(buffer) as holder:
        who = f"process {holder.pid} holds it and is stopped; continue it with `kill -CONT {holder.pid}`"
        with pytest.raises(tr.ReplayTimeout, match=re.escape(who)):
            buffer.sample(4, timeout=timeout)


def test_calls_without_a_timeout_wait_saying_so_and_go_on_when_the_holder_does(buffer, told):
    with StoppedHolder(buffer) as holder:
        results = []
        calls = (
            lambda: results.append(len(buffer.sample(4)["key"])),
            lambda: results.append(len(buffer)),
            lambda: buffer.update_priorities([0], [1.0]),
        )
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        eventually(lambda: sum(f"process {holder.pid} holds it and is stopped" in text for text in told) > 6)
        assert results == []
        holder.go_on()
        for thread in threads:
            thread.join(60)
        assert sorted(results) == [4, 10]


def test_a_holder_that_is_killed_while_others_wait_lets_them_go_on(buffer, told):
    with StoppedHolder(buffer) as holder:
        batches = []
        learner = threading.Thread(target=lambda: batches.append(buffer.sample(4)))
        learner.start()
        eventually(lambda: told)
        holder.kill()
        learner.join(60)
    assert len(batches) == 1
    assert len(buffer.sample(4)["key"]) == 4


def draw_until_interrupted(buffer, waits):
    def count(_text):
        waits[0] += 1

    signal.signal(signal.SIGINT, signal.default_int_handler)
    _C.init_waits(tr.ReplayTimeout, tr.Stopped, count, 0.0)
    with pytest.raises(KeyboardInterrupt):
        buffer.sample(4)


def test_ctrl_c_gets_through_a_wait_for_the_lock(buffer):
    waits = shared_counters(1)
    with StoppedHolder(buffer), Forked(draw_until_interrupted, buffer, waits) as learner:
        eventually(lambda: waits[0] > 0)
        learner.signal(signal.SIGINT)
        assert learner.wait() == 0


def draw_for_ever(buffer):
    while True:
        buffer.sample(4)


def test_stop_ends_learners_and_limited_explorers_although_the_lock_is_held(buffer):
    buffer.limiter = tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5)
    with (
        StoppedHolder(buffer),
        Forked(draw_for_ever, buffer) as learner,
        Forked(append_until_stopped, buffer, 1) as explorer,
    ):
        eventually(lambda: (census := buffer._segment.census(False))["waiting"] == 1 and census["learners"] == 2)
        buffer.stop()
        assert (learner.wait(), explorer.wait()) == (0, 0)


def test_writing_needs_no_lock(buffer):
    with StoppedHolder(buffer), buffer.writer() as writer:
        for _ in range(5 * buffer.capacity):
            writer.append(x=1)
        assert writer.rows == 5 * buffer.capacity
