"""TD errors that the drawing thread has taken over, while a process that was stopped holds the lock that they need.

Calls keep their deadlines, explorers write, and nothing is lost without being counted."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from delayed_draws import BATCH, extend, filled_buffer, td_of
from forked import eventually
from stopped_holder import StoppedHolder

import torchreplay as tr
from torchreplay.buffer.base import StreamSpec
from torchreplay.segment.waits import Wait

pytestmark = pytest.mark.timeout(60)


@contextmanager
def queued_updates(timeout=None):
    """A buffer whose lock is held by a process that is stopped; one batch's TD errors wait for it."""
    buffer = filled_buffer()
    with StoppedHolder(buffer) as holder:
        holder.go_on()
        dataset = tr.ReplayDataset(buffer, BATCH, timeout=timeout)
        iterator = iter(dataset)
        batch = next(iterator)
        eventually(lambda: dataset.ready == dataset.prefetch)
        holder.stop_with_the_lock_of(buffer)
        buffer.update_priorities(batch, td_of(1))  # which would hang if this thread did it
        yield SimpleNamespace(buffer=buffer, holder=holder, iterator=iterator, batch=batch)
        holder.go_on()
        iterator.close()
        buffer.close()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_a_thread(body):
    """Whether it ends in time."""
    thread = threading.Thread(target=body)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_draw_keeps_its_timeout():
    with (
        queued_updates() as at,
        pytest.raises(tr.ReplayTimeout, match=f"process {at.holder.pid} holds it and is stopped"),
    ):
        at.buffer.sample(8, timeout=0.3)


def test_an_iteration_keeps_its_timeout_and_what_it_drops_is_counted():
    with queued_updates(timeout=0.3) as at:
        given = 1

        def learn():
            nonlocal given
            for batch in at.iterator:
                at.buffer.update_priorities(batch, td_of(given))
                given += 1

        with pytest.raises(tr.ReplayTimeout, match=f"process {at.holder.pid} holds it and is stopped"):
            learn()
        at.holder.go_on()
        assert at.buffer.stats().stale_updates == given * BATCH


def test_explorers_write_on():
    with queued_updates() as at:
        extend(at.buffer, 300, 5)  # as the thread that fed back
        assert in_a_thread(lambda: extend(at.buffer, 305, 5))
        at.holder.go_on()
        assert len(at.buffer) == 266


@pytest.mark.parametrize("long", [False, True])
def test_the_end_of_the_buffer_ends_a_draw(long, told):
    with queued_updates() as at:
        ended = []

        def draw():
            try:
                at.buffer.sample(8)
            except tr.Stopped:
                ended.append(True)

        told.clear()
        thread = threading.Thread(target=draw)
        thread.start()
        if long:
            eventually(lambda: told)  # from when on it waits for the lock itself
        at.buffer.stop()
        thread.join(20)
        assert ended


@pytest.mark.slow
@pytest.mark.parametrize("feeds_back", [False, True])
def test_the_end_of_the_buffer_ends_an_iteration_that_has_waited_for_long(feeds_back, told, monkeypatch):
    monkeypatch.setattr("torchreplay.buffer.prefetch.LOG_EVERY", 0.2)
    with queued_updates() as at:

        def learn():
            for batch in at.iterator:
                if feeds_back:
                    at.buffer.update_priorities(batch, td_of(1))

        told.clear()
        threading.Timer(1.0, at.buffer.stop).start()
        assert in_a_thread(learn)
        assert told


def test_a_draw_that_may_not_wait_knows_what_was_fed_back_before():
    for _ in range(10):
        buffer = filled_buffer()
        iterator = iter(tr.ReplayDataset(buffer, BATCH))
        next(iterator)
        buffer.update_priorities(np.full(1 << 17, 3), np.full(1 << 17, 8000.0))  # of some 8,250 in all
        assert (buffer.sample(BATCH, timeout=0)["key"] == 3).sum() >= BATCH - 3
        iterator.close()
        buffer.close()


def test_an_iteration_that_two_threads_end_is_ended_once():
    buffer = tr.ReplayBuffer({"x": tr.Field(4096)}, 2048, seed=1)
    buffer.extend(x=np.zeros((2048, 4096), np.float32))
    for _ in range(10):
        stream = buffer._sampler.batches(StreamSpec(2048, None, 3, None, Wait))
        next(stream)
        with ThreadPoolExecutor(2) as threads:
            for _ended in threads.map(lambda _, stream=stream: stream.close(), range(2)):
                pass
    assert len(buffer.sample(8)["x"]) == 8
    buffer.close()


def test_memory_for_what_waits_is_given_back():
    n = 1 << 16
    with queued_updates() as at:
        at.holder.go_on()
        before = resident_bytes()
        for _ in range(200):  # 200 MB, where all were kept
            at.buffer.update_priorities(np.zeros(n, np.int64), np.ones(n))
        at.buffer.flush()
        assert resident_bytes() - before < 100 * 2**20


def test_a_signal_handler_may_ask_the_buffer_while_a_call_waits():
    with queued_updates() as at:
        asked = []

        def handler(*_):
            threading.Thread(target=lambda: (eventually(lambda: asked), at.holder.go_on())).start()
            asked.append(True)
            asked.append(at.buffer.stats())

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            assert at.buffer.stats().updated >= BATCH
            eventually(lambda: len(asked) == 2)
        finally:
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("what", [lambda b: b._segment.column(0), lambda b: b._segment.column(-1), lambda b: b.stats()])
def test_a_buffer_may_be_closed_while_another_thread_waits(what):
    with queued_updates() as at:
        seen = []

        def look():
            with suppress(RuntimeError):  # closed before it looked
                seen.append(what(at.buffer))

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        at.buffer.close()
        at.holder.go_on()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        for tensor in seen:
            if not isinstance(tensor, tr.Stats):
                assert np.isfinite(tensor.numpy()).all()


def test_another_iteration_draws_after_what_was_fed_back_before():
    for _ in range(30):
        buffer = filled_buffer()
        first = iter(tr.ReplayDataset(buffer, BATCH))
        next(first)
        buffer.update_priorities(np.array([3]), np.array([8000.0]))  # of some 8,250 in all
        second = iter(tr.ReplayDataset(buffer, BATCH))
        assert (next(second)["key"] == 3).sum() >= BATCH - 3
        second.close()
        first.close()


def test_other_threads_wait_for_what_was_fed_back_before_and_not_for_all_that_follows():
    buffer = filled_buffer(capacity=1 << 16)
    over = threading.Event()

    def learn():
        for batch in tr.ReplayDataset(buffer, 4096):
            buffer.update_priorities(batch, np.ones(4096))
            if over.is_set():
                return

    learner = threading.Thread(target=learn)
    learner.start()
    try:
        eventually(lambda: buffer.stats().draws > 10)
        before = buffer.stats().draws
        for _ in range(50):
            buffer.stats()
        assert buffer.stats().draws - before < 50 * 10
    finally:
        over.set()
        learner.join()
