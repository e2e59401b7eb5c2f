"""Limiters and waits: who must wait, for how long, and how every wait ends."""

import math
import os
import re
import signal
import threading

import numpy as np
import pytest
from forked import Forked, eventually, shared_counters
from hypothesis import given, settings
from hypothesis import strategies as st

import torchreplay as tr
from torchreplay import waiting

SPEC = {"x": tr.Field((), np.int64)}


def buffer_with(limiter, capacity=1000):
    return tr.ReplayBuffer(SPEC, capacity, limiter=limiter, seed=0)


def extend(buffer, n):
    return buffer.extend(x=np.arange(n))


@pytest.fixture
def alone(monkeypatch):
    """As in a program of one thread, whatever threads other tests have left."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


# Draws that wait


def test_min_size_admits_draws_of_any_size_from_the_first_full_minimum_on(alone):
    buffer = buffer_with(tr.MinSize(5), capacity=3)
    for _ in range(2):
        extend(buffer, 2)
        assert len(buffer) <= 3
    with pytest.raises(tr.WouldBlockForever, match="4 items were inserted, 5 are needed and 3 can be drawn"):
        buffer.sample(1)
    extend(buffer, 1)  # it counts what ever came, not what the ring still holds
    assert len(buffer.sample(1000)["key"]) == 1000


def test_a_draw_that_nobody_can_help_says_so_at_once_with_numbers_and_advice(alone):
    buffer = buffer_with(tr.MinSize(3))
    extend(buffer, 2)
    with pytest.raises(tr.WouldBlockForever) as error:
        buffer.sample(1)
    for part in (
        "2 items were inserted",
        "3 are needed",
        "2 can be drawn",
        "1 writers are alive",
        "s ago",
        "Write more",
    ):
        assert part in str(error.value)
    assert buffer.stats().sampled == 0


@pytest.mark.parametrize("timeout", [0, 0.01, 0.2])
def test_a_timeout_ends_a_wait_with_the_numbers(timeout):
    buffer = buffer_with(tr.MinSize(3))
    buffer.handle()  # somebody else could write
    with pytest.raises(tr.ReplayTimeout, match=re.escape(f"no batch within {timeout} s: 0 items were inserted, 3 are")):
        buffer.sample(1, timeout=timeout)
    assert isinstance(tr.ReplayTimeout("x"), TimeoutError)


def test_a_draw_waits_for_a_writer_of_another_thread():
    buffer = buffer_with(tr.MinSize(3))
    holds_a_writer, go_on = threading.Event(), threading.Event()

    def explore():
        with buffer.writer() as writer:
            writer.append(x=1)
            holds_a_writer.set()
            go_on.wait(30)
            writer.append(x=1)
            writer.append(x=1)

    explorer = threading.Thread(target=explore)
    explorer.start()
    holds_a_writer.wait(30)
    opener = threading.Thread(target=lambda: (eventually(lambda: buffer.stats().sample_wait > 0), go_on.set()))
    opener.start()
    assert buffer.sample(2, timeout=30)["x"].tolist() == [1, 1]
    explorer.join()
    opener.join()


def test_a_draw_gives_up_when_all_explorers_of_other_processes_are_gone_for_good(monkeypatch):
    monkeypatch.setattr(waiting, "RETURN_GRACE", 0.2)
    buffer = buffer_with(tr.MinSize(100))
    for end in ("leave", "die"):
        with Forked(extend, buffer, 3) as explorer:
            if end == "leave":
                assert explorer.wait() == 0
            else:
                eventually(lambda: len(buffer) > 3)
        with pytest.raises(tr.WouldBlockForever, match="left 0 s ago"):
            buffer.sample(1, timeout=30)


def test_an_announced_supervisor_is_waited_for_until_it_closes(monkeypatch):
    monkeypatch.setattr(waiting, "RETURN_GRACE", 0.05)
    buffer = buffer_with(tr.MinSize(100))
    with Forked(extend, buffer, 3) as explorer:
        assert explorer.wait() == 0
    with buffer.expect_writers(), pytest.raises(tr.ReplayTimeout):
        buffer.sample(1, timeout=0.3)
    with pytest.raises(tr.WouldBlockForever):
        buffer.sample(1, timeout=30)


# Ends of waits: stop, Ctrl-C


def sample_in_vain(buffer):
    with buffer.expect_writers():
        buffer.sample(1)


def append_in_vain(buffer):
    with buffer.writer() as writer:
        while True:
            writer.append(x=1)


def is_waiting(buffer):
    stats = buffer.stats()
    return stats.sample_wait + stats.insert_wait > 0


@pytest.mark.parametrize("wait", [sample_in_vain, append_in_vain])
def test_stop_ends_a_wait_in_another_process(wait):
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    with Forked(expect_exception, tr.Stopped, wait, buffer) as child:
        eventually(lambda: is_waiting(buffer))
        buffer.stop()
        assert child.wait() == 0


@pytest.mark.parametrize("wait", [sample_in_vain, append_in_vain])
def test_stop_ends_a_wait_in_another_thread(wait):
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    ended = []
    thread = threading.Thread(target=lambda: ended.append(expect_exception(tr.Stopped, wait, buffer)))
    thread.start()
    eventually(lambda: is_waiting(buffer))
    buffer.stop()
    thread.join(30)
    assert ended == [True]


def expect_exception(kind, wait, buffer):
    signal_from_here = threading.current_thread() is threading.main_thread()
    if signal_from_here:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        wait(buffer)
    except kind:
        return True
    raise AssertionError(f"{kind.__name__} was not raised")


@pytest.mark.parametrize("wait", [sample_in_vain, append_in_vain])
def test_ctrl_c_gets_through_a_wait(wait):
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    with Forked(expect_exception, KeyboardInterrupt, wait, buffer) as child:
        eventually(lambda: is_waiting(buffer))
        child.signal(signal.SIGINT)
        assert child.wait() == 0
    assert not buffer.stopped
    assert buffer.stats().writers == 0


def test_after_stop_every_call_that_writes_or_draws_raises_and_looking_still_works():
    buffer = buffer_with(tr.MinSize(1))
    extend(buffer, 3)
    batch = buffer.sample(2)
    writer = buffer.writer()
    buffer.stop()
    buffer.stop()
    assert buffer.stopped
    assert tr.ReplayBuffer.attach(buffer.handle()).stopped
    for call in (lambda: buffer.sample(1), lambda: writer.append(x=1), lambda: extend(buffer, 2)):
        with pytest.raises(tr.Stopped):
            call()
    buffer.update_priorities(batch, np.ones(2))
    assert (len(buffer), buffer.stats().stopped) == (3, True)
    assert "stopped" in repr(buffer)


# SamplesPerInsert


@settings(max_examples=60)
@given(
    ratio=st.sampled_from([0.25, 1.0, 3.0, 8.0]),
    min_size=st.integers(1, 30),
    tolerance=st.sampled_from([0.05, 0.5, 2.0]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=60),
)
def test_samples_per_insert_admits_what_reverbs_rate_limiter_admits(ratio, min_size, tolerance, steps):
    # Reverb: CanSample(n): size >= min_size and inserts * r - (samples + n) >= min_diff.
    #         CanInsert(n): size + n <= min_size or (inserts + n) * r - samples <= max_diff.
    # Beyond it, what a learner has waited for is always admitted.
    centre = ratio * min_size
    error = max(tolerance * centre, ratio, 1.0)
    min_diff, max_diff = centre - error, centre + error
    buffer = buffer_with(tr.SamplesPerInsert(ratio, min_size=min_size, tolerance=tolerance), capacity=50)
    inserted = sampled = demanded = 0
    with buffer.writer() as writer:
        for is_sample, n in steps:
            if is_sample:
                if inserted >= min_size and inserted * ratio - (sampled + n) >= min_diff - 1e-9:
                    assert len(buffer.sample(n, timeout=0)["key"]) == n
                    sampled += n
                else:
                    with pytest.raises((tr.WouldBlockForever, tr.ReplayTimeout)):
                        buffer.sample(n, timeout=0)
                    demanded = max(demanded, min_size, math.ceil((min_diff + sampled + n) / ratio - 1e-9))
            for _ in range(0 if is_sample else n):
                len(buffer)
                allowed = inserted + 1 <= max(min_size, demanded) or (inserted + 1) * ratio - sampled <= max_diff + 1e-9
                assert writer.admitted() == (allowed or inserted == 0)
                if not writer.admitted():
                    break
                writer.append(x=1)
                inserted += 1
    stats = buffer.stats()
    assert (stats.inserted, stats.sampled) == (inserted, sampled)


def test_an_append_that_no_learner_can_help_says_so_at_once(alone):
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    with pytest.raises(tr.WouldBlockForever, match="Draw more batches between appends"):
        append_in_vain(buffer)
    assert buffer.stats().inserted == 10 + 1024  # min_size * ratio, and a tolerance of 1024 draws


def append_until_stopped(buffer, chunk):
    with buffer.writer() as writer:
        while True:
            if chunk == 1:
                writer.append(x=1)
            else:
                writer.extend(x=np.arange(chunk))


@pytest.mark.parametrize("chunk", [1, 50])
@pytest.mark.parametrize("ratio", [0.5, 8.0])
def test_explorer_and_learner_at_full_speed_stay_within_the_bounds(ratio, chunk):
    limiter = tr.SamplesPerInsert(ratio, min_size=500, tolerance=0.5)
    _, _, min_diff, max_diff = limiter.bounds()
    assert (min_diff, max_diff) == (250 * ratio, 750 * ratio)
    batch_size = 64
    buffer = buffer_with(limiter)
    with Forked(append_until_stopped, buffer, chunk) as explorer:
        for _ in range(400):
            buffer.sample(batch_size, timeout=60)
            stats = buffer.stats()
            balance = stats.inserted * ratio - stats.sampled
            # A writer looks at the limit once for all rows of a call, of which this one has fewer than 64.
            assert min_diff <= balance <= max_diff + (chunk - 1) * ratio
        buffer.stop()
        assert explorer.wait() == 0


def test_explorers_wait_for_a_learner_that_does_not_draw_and_go_on_when_it_does():
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=100, tolerance=0.5))
    with Forked(append_until_stopped, buffer, 1) as first, Forked(append_until_stopped, buffer, 1) as second:
        eventually(lambda: buffer.stats().inserted >= 150)
        eventually(lambda: buffer.stats().insert_wait > 0.1)
        assert buffer.stats().inserted <= 150 + 2
        for _ in range(20):
            before = buffer.stats().inserted
            buffer.sample(50, timeout=60)
            eventually(lambda seen=before: buffer.stats().inserted > seen)
        buffer.stop()
        assert (first.wait(), second.wait()) == (0, 0)


def test_a_batch_larger_than_the_window_blocks_neither_side():
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.1))
    with Forked(append_until_stopped, buffer, 1) as explorer:
        for _ in range(50):
            buffer.sample(300, timeout=60)
        stats = buffer.stats()
        assert stats.samples_per_insert == pytest.approx(1.0, abs=0.1)
        buffer.stop()
        assert explorer.wait() == 0


def test_rows_lost_to_the_dead_are_not_counted_as_inserts_and_block_nobody():
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=100, tolerance=0.5), capacity=64)
    progress = shared_counters(1)

    def explore():
        with buffer.writer() as writer:
            while True:
                writer.append(x=1)
                progress[0] += 1

    for _ in range(20):
        progress[0] = 0
        with Forked(explore):
            eventually(lambda: progress[0] > 5 or is_waiting(buffer), interval=0)
            buffer.sample(20, timeout=60) if buffer.stats().inserted > 150 else None
    with Forked(append_until_stopped, buffer, 1) as explorer:
        for _ in range(30):
            buffer.sample(50, timeout=60)
        buffer.stop()
        assert explorer.wait() == 0


def test_waiting_costs_next_to_no_processor_time():
    buffer = buffer_with(tr.MinSize(10))
    buffer.handle()
    before = os.times()
    with pytest.raises(tr.ReplayTimeout):
        buffer.sample(1, timeout=1.0)
    after = os.times()
    assert (after.user + after.system) - (before.user + before.system) < 0.3
