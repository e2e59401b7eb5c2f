"""Limiters: which side is admitted and which must wait, by the published rules."""

import dataclasses
from contextlib import suppress

import numpy as np
import pytest
from forked import Forked, eventually, shared_counters
from hypothesis import given, settings
from hypothesis import strategies as st
from limited_buffers import append_until_stopped, buffer_with, extend, has_waited, writers_that_wait

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
                assert writer._admitted() == (allowed or inserted == 0)
                if not writer._admitted():
                    break
                writer.append(x=1)
                inserted += 1
    stats = buffer.stats()
    assert (stats.inserted, stats.sampled) == (inserted, sampled)


@pytest.mark.parametrize("chunk", [1, 50, 5000])
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
            # A writer looks at the limit once for up to 64 rows of a call, and those under way count only once they are
            # there.
            assert min_diff <= balance <= max_diff + (2 * min(chunk, 64) - 1) * ratio
        buffer.stop()
        assert explorer.wait() == 0


@pytest.mark.parametrize(("rows", "capacity"), [(1, 100), (1, 1), (7, 100), (300, 100)])
def test_bounds_beyond_the_capacity_are_kept_although_nobody_looks(rows, capacity):
    def write_alone():  # where nobody else could draw, the wait at the limit is an error
        limiter = tr.SamplesPerInsert(1.0, min_size=10, tolerance=100.0)  # 1,010 items without a draw
        buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity, limiter=limiter)
        with buffer.writer() as writer, suppress(tr.WouldBlockForever):
            for _ in range(10_000):
                writer.extend(x=np.zeros(rows, np.float32))
        stats = buffer.stats()
        assert 1010 <= stats.rows_written < 1010 + 2 * rows
        if rows < capacity // 4:
            assert stats.inserted == stats.rows_written
            assert stats.evicted_unsampled == stats.rows_written - capacity

    with Forked(write_alone) as explorer:
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
            eventually(lambda: progress[0] > 5 or writers_that_wait(buffer), interval=0)
            buffer.sample(20, timeout=60) if buffer.stats().inserted > 150 else None
    with Forked(append_until_stopped, buffer, 1) as explorer:
        for _ in range(30):
            buffer.sample(50, timeout=60)
        buffer.stop()
        assert explorer.wait() == 0


@pytest.mark.parametrize(
    ("ratio", "min_size", "tolerance"), [(1e308, 100, None), (1e308, 1, 1.0), (1.0, 1 << 62, 1e300), (1e308, 100, 1e-5)]
)
def test_bounds_that_no_float_holds_are_refused(ratio, min_size, tolerance):
    with pytest.raises(
        ValueError, match=r"SamplesPerInsert\(ratio=.* keeps the balance from .*: expected finite bounds"
    ):
        tr.SamplesPerInsert(ratio, min_size, tolerance)
    with pytest.raises(ValueError, match="expected finite bounds"):
        dataclasses.replace(tr.SamplesPerInsert(1.0), ratio=ratio, min_size=min_size, tolerance=tolerance)


@pytest.mark.parametrize(("name", "value"), [("ratio", True), ("tolerance", True), ("ratio", "1"), ("tolerance", b"1")])
def test_a_bool_or_a_text_is_no_ratio_and_no_tolerance(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}: expected a number"):
        tr.SamplesPerInsert(**{"ratio": 1.0, name: value})


# Changed at run time


LIMITERS = (tr.MinSize(7), tr.SamplesPerInsert(8, min_size=3), tr.SamplesPerInsert(0.5, min_size=100, tolerance=0.25))


@pytest.mark.parametrize("limiter", LIMITERS)
def test_a_limiter_set_in_one_process_is_seen_in_every_other(limiter):
    buffer = buffer_with(tr.MinSize(2))
    attached = tr.ReplayBuffer.attach(buffer.handle())
    assert attached.limiter == tr.MinSize(2)

    def change():
        attached.limiter = limiter

    with Forked(change) as child:
        assert child.wait() == 0
    assert buffer.limiter == attached.limiter == tr.ReplayBuffer.attach(buffer.handle()).limiter == limiter
    assert str(limiter) in repr(buffer)


def test_something_else_than_a_limiter_is_refused_and_changes_nothing():
    buffer = buffer_with(tr.MinSize(2))
    with pytest.raises(TypeError, match=r"limiter is 3: expected torchreplay.MinSize or torchreplay.SamplesPerInsert"):
        buffer.limiter = 3
    assert buffer.limiter == tr.MinSize(2)


def test_none_is_the_default_limiter_where_a_buffer_is_made_and_where_it_is_set_later():
    buffer = buffer_with(None)
    assert buffer.limiter == tr.MinSize(1)
    buffer.limiter = tr.SamplesPerInsert(8.0, min_size=100)
    buffer.limiter = None
    assert buffer.limiter == tr.MinSize(1)
    extend(buffer, 1)
    assert len(buffer.sample(2)["key"]) == 2


def test_a_draw_that_waits_goes_on_when_the_limiter_that_is_set_admits_it():
    buffer = buffer_with(tr.MinSize(1000))
    extend(buffer, 10)
    with Forked(buffer.sample, 4) as learner:
        eventually(lambda: has_waited(buffer))
        buffer.limiter = tr.MinSize(10)
        assert learner.wait() == 0


def test_explorers_that_wait_go_on_when_the_limiter_that_is_set_admits_them():
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5))
    with Forked(append_until_stopped, buffer, 1) as first, Forked(append_until_stopped, buffer, 1) as second:
        eventually(lambda: writers_that_wait(buffer) == 2)
        assert buffer.stats().inserted == 15
        buffer.limiter = tr.SamplesPerInsert(1.0, min_size=100, tolerance=0.5)
        eventually(lambda: buffer.stats().inserted >= 150)
        eventually(lambda: writers_that_wait(buffer) == 2)
        assert buffer.stats().inserted <= 150 + 1  # both may have looked at the last place
        buffer.limiter = tr.MinSize()
        eventually(lambda: buffer.stats().inserted > 10_000)
        buffer.stop()
        assert (first.wait(), second.wait()) == (0, 0)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 60),
    draws=st.integers(0, 200),
    ratio=st.sampled_from([0.25, 1.0, 8.0]),
    min_size=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_a_new_limiter_counts_as_if_its_minimum_had_just_come_and_nothing_had_been_drawn(
    rows, draws, ratio, min_size, sizes
):
    buffer = buffer_with(tr.MinSize())
    extend(buffer, rows)
    if draws:
        buffer.sample(draws)
    limiter = tr.SamplesPerInsert(ratio, min_size=min_size, tolerance=0.5)
    buffer.limiter = limiter
    error = max(0.5 * ratio * min_size, ratio, 1.0)
    min_diff, max_diff = ratio * min_size - error, ratio * min_size + error
    inserted, sampled = min(rows, min_size), 0
    with buffer.writer() as writer:
        for n in sizes:
            if inserted >= min_size and inserted * ratio - (sampled + n) >= min_diff - 1e-9:
                buffer.sample(n, timeout=0)
                sampled += n
            else:
                with pytest.raises((tr.WouldBlockForever, tr.ReplayTimeout)):
                    buffer.sample(n, timeout=0)
            len(buffer)  # lets the limiter see what came
            admitted = inserted + 1 <= min_size or (inserted + 1) * ratio - sampled <= max_diff + 1e-9
            assert writer._admitted() == admitted
            if admitted:
                writer.append(x=1)
                inserted += 1


def test_a_checkpoint_brings_the_limiter_back_that_held_and_what_it_had_counted(tmp_path):
    buffer = buffer_with(tr.MinSize())
    extend(buffer, 500)
    buffer.sample(5000)
    buffer.limiter = tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5)
    buffer.sample(3)
    buffer.save(tmp_path)
    loaded = tr.ReplayBuffer.load(tmp_path)
    assert loaded.limiter == buffer.limiter
    for one in (buffer, loaded):
        with pytest.raises((tr.WouldBlockForever, tr.ReplayTimeout)):
            one.sample(3, timeout=0)
        one.sample(2, timeout=0)  # 10 - 3 - 2 is the least balance
    other = buffer_with(tr.SamplesPerInsert(1.0, min_size=20, tolerance=0.5))
    other.restore(tmp_path)
    assert other.limiter == tr.SamplesPerInsert(1.0, min_size=20, tolerance=0.5)
    other.sample(10, timeout=0)  # it counts from here: 20 - 10


# Who makes the others wait


def slow_learner(buffer):
    while True:
        buffer.sample(1)
        eventually(lambda: writers_that_wait(buffer))


def test_stats_name_the_side_that_makes_the_other_wait():
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=100, tolerance=0.5))
    assert buffer.stats().bottleneck is None
    buffer.handle()
    with pytest.raises(tr.ReplayTimeout):
        buffer.sample(1, timeout=0.5)
    assert buffer.stats().bottleneck == "explorers"
    with Forked(append_until_stopped, buffer, 1), Forked(slow_learner, buffer):
        eventually(lambda: buffer.stats().bottleneck == "learners")
        stats = buffer.stats()
        assert stats.insert_wait_share > stats.sample_wait_share


@pytest.mark.parametrize(
    ("inserting", "sampling", "bottleneck"),
    [(0.0, 0.04, None), (0.3, 0.3, None), (0.0, 0.05, "explorers"), (0.1, 0.9, "explorers"), (0.06, 0.0, "learners")],
)
def test_the_bottleneck_is_the_side_that_waits_less_where_the_other_waits_noticeably(inserting, sampling, bottleneck):
    stats = buffer_with(tr.MinSize()).stats()
    shares = {"insert_wait_share": inserting, "sample_wait_share": sampling}
    assert dataclasses.replace(stats, **shares).bottleneck == bottleneck
