"""The limiter of a union of shards: its rules, and how much each shard may admit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchreplay as tr
from torchreplay.ray.figures import Figures
from torchreplay.ray.union import Drawn
from torchreplay.ray.union_limiter import UnionLimiter


def figures(inserted=0, learners=(), largest=1.0):
    return Figures(Drawn(1.0, 1, 1.0), 0, 0, inserted, 0, largest, 0, -1.0, -1.0, dict(learners), False, None)


def test_min_size_counts_the_items_of_all_shards_and_limits_no_writer():
    union_limiter = UnionLimiter(tr.MinSize(100), 0)
    union_limiter.hear(0, figures(60))
    union_limiter.hear(3, figures(39))
    assert union_limiter.inserted == 99
    assert union_limiter.needed(1000) == 100
    assert union_limiter.limits([0, 3], 1000) == {0: None, 3: None}


def test_the_items_of_a_lost_shard_stay_counted():
    union_limiter = UnionLimiter(tr.MinSize(), 0)
    union_limiter.hear(0, figures(60))
    union_limiter.count_inserted(0, 60)  # the directory says what was lost
    union_limiter.hear(1, figures(0))
    assert union_limiter.inserted == 60


def test_draws_of_other_learners_count_once_however_many_shards_tell_of_them():
    union_limiter = UnionLimiter(tr.SamplesPerInsert(2.0, 10), 5)
    union_limiter.hear(0, figures(10, {5: (640, 10), 6: (128, 2)}))
    union_limiter.hear(1, figures(10, {6: (192, 3), 7: (64, 1)}))
    union_limiter.items, union_limiter.batches, union_limiter.under_way = 700, 11, 64
    assert union_limiter.sampled == 700 + 64 + 192 + 64
    assert union_limiter.steps == 11 + 3 + 1


@given(
    st.floats(0.1, 50),
    st.integers(1, 5000),
    st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    st.integers(0, 100_000),
    st.integers(1, 512),
)
def test_limits_add_up_to_what_reverbs_limiter_admits(ratio, min_size, inserted, sampled, n):
    limiter = tr.SamplesPerInsert(ratio, min_size)
    union_limiter = UnionLimiter(limiter, 0)
    for number, items in enumerate(inserted):
        union_limiter.hear(number, figures(items))
    union_limiter.items = sampled
    whole = sum(inserted)
    _, _, low, high = limiter.bounds()
    # Reverb, rate_limiter.cc: draws need inserts * ratio - draws - n >= min_diff and min_size; inserts are admitted up
    # to min_size, and beyond while inserts * ratio - draws <= max_diff.
    admits_draw = whole >= min_size and whole * ratio - sampled - n >= low
    on_the_edge = abs(whole * ratio - sampled - n - low) < 1e-6 * whole * ratio
    assert (whole >= union_limiter.needed(n)) == admits_draw or on_the_edge
    limits = union_limiter.limits(range(len(inserted)), 0)
    assert all(limit >= items for limit, items in zip(limits.values(), inserted, strict=True))
    bound = max(min_size, (high + sampled) / ratio, union_limiter.needed(0))
    assert sum(limits.values()) <= max(bound, whole) + 1e-6 * bound
    assert sum(limits.values()) >= max(bound, whole) - 1 - 1e-6 * bound


def test_what_a_learner_waits_for_is_admitted_whatever_the_ratio_says():
    union_limiter = UnionLimiter(tr.SamplesPerInsert(1.0, 10, tolerance=0.1), 0)
    union_limiter.hear(0, figures(10))
    assert union_limiter.needed(100) > 10
    assert sum(union_limiter.limits([0, 1], 100).values()) >= union_limiter.needed(100)


def test_largest_priorities_are_kept():
    union_limiter = UnionLimiter(tr.MinSize(), 0)
    for value in (1.0, 7.5, 3.0):
        union_limiter.hear(0, figures(largest=value))
    assert union_limiter.largest == pytest.approx(7.5)


def test_while_every_shard_is_lost_there_is_nobody_to_be_limited():
    union_limiter = UnionLimiter(tr.SamplesPerInsert(2.0, 10), 0)
    union_limiter.hear(0, figures(50))
    assert union_limiter.limits([], 100) == {}
