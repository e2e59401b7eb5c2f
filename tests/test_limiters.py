"""Limiters: who is admitted and who must wait, by the published rules."""

import time

import pytest
from forked import Forked, eventually, shared_counters
from hypothesis import given, settings
from hypothesis import strategies as st
from limited_buffers import append_until_stopped, buffer_with, extend, is_waiting

import torchreplay as tr


def test_min_size_admits_draws_of_any_size_from_the_first_full_minimum_on():
    buffer = buffer_with(tr.MinSize(5), capacity=3)
    buffer.handle()  # somebody else could write
    for _ in range(2):
        extend(buffer, 2)
        assert len(buffer) <= 3
    with pytest.raises(tr.ReplayTimeout, match="4 items were inserted, 5 are needed and 3 can be drawn"):
        buffer.sample(1, timeout=0)
    extend(buffer, 1)  # it counts what ever came, not what the ring still holds
    assert len(buffer.sample(1000)["key"]) == 1000


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
    # Here a learner that gave up leaves no trace, and while nothing can be drawn an insert is always admitted.
    centre = ratio * min_size
    error = max(tolerance * centre, ratio, 1.0)
    min_diff, max_diff = centre - error, centre + error
    buffer = buffer_with(tr.SamplesPerInsert(ratio, min_size=min_size, tolerance=tolerance), capacity=50)
    inserted = sampled = 0
    with buffer.writer() as writer:
        for is_sample, n in steps:
            if is_sample:
                if inserted >= min_size and inserted * ratio - (sampled + n) >= min_diff - 1e-9:
                    assert len(buffer.sample(n, timeout=0)["key"]) == n
                    sampled += n
                else:
                    with pytest.raises((tr.WouldBlockForever, tr.ReplayTimeout)):
                        buffer.sample(n, timeout=0)
            for _ in range(0 if is_sample else n):
                len(buffer)  # lets the limiter see what came
                allowed = inserted + 1 <= min_size or (inserted + 1) * ratio - sampled <= max_diff + 1e-9
                assert writer.admitted() == (allowed or inserted == 0)
                if not writer.admitted():
                    break
                writer.append(x=1)
                inserted += 1
    stats = buffer.stats()
    assert (stats.inserted, stats.sampled) == (inserted, sampled)


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
            # A writer looks at the limit once for all rows of a call, of which this one has fewer than 64, and the rows
            # of a call that is under way count only once they are there.
            assert min_diff <= balance <= max_diff + (2 * chunk - 1) * ratio
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


def test_a_writer_sleeps_again_when_another_one_has_used_up_what_a_draw_let_through():
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5))
    slice_ns = 50_000_000
    with Forked(append_until_stopped, buffer, 1) as other, buffer.writer() as writer:
        eventually(lambda: buffer.stats().insert_wait > 0)
        buffer.sample(5)
        eventually(lambda: buffer.stats().inserted == 20 and not writer.admitted())
        start = time.monotonic_ns()
        writer.wait_room(slice_ns)
        assert time.monotonic_ns() - start >= slice_ns, "it would turn in a loop until it is admitted"
        buffer.stop()
        assert other.wait() == 0
