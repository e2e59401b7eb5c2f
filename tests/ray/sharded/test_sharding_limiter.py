"""The limiter of a union of shards: its rules, and how much each shard may admit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import LocalCluster

import torchreplay as tr
from torchreplay.ray import ShardedReplay
from torchreplay.ray.sharded.global_distribution import Drawn
from torchreplay.ray.sharded.messages import LearnerProgress, ShardReport
from torchreplay.ray.sharded.rate_limiter import GlobalRateLimiter, Rule


def figures(inserted=0, learners=(), largest=1.0):
    return ShardReport(Drawn(1.0, 1, 1.0), 0, 0, inserted, 0, largest, 0, -1.0, -1.0, dict(learners), 0, False, None)


def drew(items, batches, rule=0, before=0):
    return LearnerProgress(rule, items, batches, before)


def hand_out(union_limiter, *batches):
    for n in batches:
        union_limiter.end(n, union_limiter.begin(n), drawn=True)


def test_min_size_counts_the_items_of_all_shards_and_limits_no_writer():
    union_limiter = GlobalRateLimiter(Rule(tr.MinSize(100)), 0)
    union_limiter.hear(0, figures(60))
    union_limiter.hear(3, figures(39))
    assert union_limiter.inserted == 99
    assert union_limiter.needed(1000) == 100
    assert union_limiter.limits([0, 3], 1000) == {0: None, 3: None}


def test_the_items_of_a_lost_shard_stay_counted():
    union_limiter = GlobalRateLimiter(Rule(tr.MinSize()), 0)
    union_limiter.hear(0, figures(60))
    union_limiter.count_inserted(0, 60)  # the directory says what was lost
    union_limiter.hear(1, figures(0))
    assert union_limiter.inserted == 60


def test_draws_of_other_learners_count_once_however_many_shards_tell_of_them():
    union_limiter = GlobalRateLimiter(Rule(tr.SamplesPerInsert(2.0, 10)), 5)
    union_limiter.hear(0, figures(10, {5: drew(640, 10), 6: drew(128, 2)}))
    union_limiter.hear(1, figures(10, {6: drew(192, 3), 7: drew(64, 1)}))
    hand_out(union_limiter, 100, 600)
    union_limiter.begin(64)
    assert union_limiter.sampled == 700 + 64 + 192 + 64
    assert union_limiter.steps == 2 + 3 + 1


@given(
    st.floats(0.1, 50),
    st.integers(1, 5000),
    st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    st.integers(0, 100_000),
    st.integers(1, 512),
)
def test_limits_add_up_to_what_reverbs_limiter_admits(ratio, min_size, inserted, sampled, n):
    limiter = tr.SamplesPerInsert(ratio, min_size)
    union_limiter = GlobalRateLimiter(Rule(limiter), 0)
    for number, items in enumerate(inserted):
        union_limiter.hear(number, figures(items))
    hand_out(union_limiter, sampled)
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
    union_limiter = GlobalRateLimiter(Rule(tr.SamplesPerInsert(1.0, 10, tolerance=0.1)), 0)
    union_limiter.hear(0, figures(10))
    assert union_limiter.needed(100) > 10
    assert sum(union_limiter.limits([0, 1], 100).values()) >= union_limiter.needed(100)


@pytest.mark.parametrize("alone", range(3))
@pytest.mark.parametrize(("ratio", "tolerance", "n"), [(8.0, None, 4096), (1.0, 0.1, 256), (0.3, None, 7)])
def test_explorers_of_one_shard_alone_serve_a_learner_for_ever(ratio, tolerance, n, alone):
    union_limiter = GlobalRateLimiter(Rule(tr.SamplesPerInsert(ratio, 100, tolerance)), 0)
    inserted = [0, 0, 0]
    for _ in range(20):
        for _look in range(60):  # one alone takes a third of what is left at each
            for number in range(3):
                union_limiter.hear(number, figures(inserted[number]))
            inserted[alone] = max(inserted[alone], union_limiter.limits(range(3), n)[alone])
        union_limiter.count_inserted(alone, inserted[alone])
        assert union_limiter.inserted >= union_limiter.needed(n)
        hand_out(union_limiter, n)


@pytest.mark.parametrize("shards", [4, 16])
@pytest.mark.parametrize(("ratio", "min_size"), [(1000.0, 5), (256.0, 100)])
def test_whoever_only_looks_sees_as_many_as_the_first_draw_needs(ratio, min_size, shards):
    union_limiter = GlobalRateLimiter(Rule(tr.SamplesPerInsert(ratio, min_size)), 0)
    inserted = [0] * shards
    for _ in range(min_size * shards):
        for number, items in enumerate(inserted):
            union_limiter.hear(number, figures(items))
        inserted[-1] = max(
            inserted[-1], union_limiter.limits(range(shards), 1)[shards - 1]
        )  # the others have no writers
    assert sum(inserted) >= min_size


def test_largest_priorities_are_kept():
    union_limiter = GlobalRateLimiter(Rule(tr.MinSize()), 0)
    for value in (1.0, 7.5, 3.0):
        union_limiter.hear(0, figures(largest=value))
    assert union_limiter.largest == pytest.approx(7.5)


def test_while_every_shard_is_lost_there_is_nobody_to_be_limited():
    union_limiter = GlobalRateLimiter(Rule(tr.SamplesPerInsert(2.0, 10)), 0)
    union_limiter.hear(0, figures(50))
    assert union_limiter.limits([], 100) == {}


LIMITERS = st.one_of(
    st.builds(tr.MinSize, st.integers(1, 60)),
    st.builds(
        tr.SamplesPerInsert, st.sampled_from([0.25, 1.0, 3.0]), st.integers(1, 30), st.sampled_from([0.05, 0.5, 2.0])
    ),
)


@given(LIMITERS, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), LIMITERS), min_size=1, max_size=30))
def test_one_that_is_set_later_admits_what_a_buffer_with_it_admits(first, steps):
    rule = Rule(first)
    union_limiter, inserted = GlobalRateLimiter(rule, 0), [0, 0]
    with tr.ReplayBuffer({"x": tr.Field((), "int64")}, 4000, limiter=first) as buffer:
        for kind, n, limiter in steps:
            if kind < 2:  # inserts into shard 0 or 1, as many as may come
                with buffer.writer() as writer:
                    for _ in range(n):
                        len(buffer)  # lets the limiter see what came
                        admitted = writer._admitted()
                        limits = union_limiter.limits([0, 1], 0)
                        whole = None if limits[0] is None else sum(limits.values())
                        # A buffer in which nothing can be drawn admits one more, under every ratio.
                        assert admitted == (whole is None or whole > sum(inserted)) or sum(inserted) == 0
                        if not admitted:
                            break
                        writer.append(x=1)
                        inserted[kind] += 1
                        union_limiter.hear(kind, figures(inserted[kind]))
            elif kind == 2:
                admits = sum(inserted) >= union_limiter.needed(n)
                try:
                    buffer.sample(n, timeout=0)
                except (tr.ReplayTimeout, tr.WouldBlockForever):
                    assert not admits
                else:
                    assert admits
                    hand_out(union_limiter, n)
            else:
                rule = rule.followed_by(limiter, sum(inserted))
                union_limiter.change(rule)
                buffer.limiter = limiter
        stats = buffer.stats()
        assert (stats.inserted, stats.sampled) == (union_limiter.inserted, union_limiter.drawn)


def test_draws_count_from_when_each_learner_hears_of_a_new_one():
    union_limiter = GlobalRateLimiter(Rule(tr.SamplesPerInsert(2.0, 10)), 0)
    union_limiter.hear(0, figures(100, {1: drew(50, 5), 2: drew(70, 7)}))
    hand_out(union_limiter, *8 * [10])
    under_way = union_limiter.begin(10)
    assert union_limiter.sampled == 80 + 10 + 50 + 70
    rule = union_limiter.rule.followed_by(tr.SamplesPerInsert(1.0, 20), 100)
    assert (rule.number, rule.inserted_before) == (1, 80)
    union_limiter.change(rule)
    assert union_limiter.sampled == 0
    union_limiter.end(10, under_way, drawn=True)
    hand_out(union_limiter, 10)
    assert union_limiter.sampled == 10
    assert union_limiter.drew == drew(100, 10, 1, 90)
    union_limiter.hear(0, figures(100, {1: drew(60, 6), 2: drew(95, 9, 1, 75)}))  # learner 1 has not heard of it
    union_limiter.hear(1, figures(0, {2: drew(75, 7)}))  # what it said before it had
    assert union_limiter.sampled == 10 + 20
    assert (union_limiter.drawn, union_limiter.steps) == (100 + 60 + 95, 10 + 6 + 9)
    union_limiter.change(Rule(tr.MinSize()))  # an older one, which comes late
    assert union_limiter.rule == rule


def test_rounds_that_are_given_up_count_for_no_limiter():
    union_limiter, other = (GlobalRateLimiter(Rule(tr.MinSize()), stream) for stream in (0, 1))

    def assert_sampled(own, told):
        """Items that it counts, and those that it reports to others: not the ones under way."""
        other.hear(0, figures(learners={0: union_limiter.drew}))
        assert union_limiter.sampled == own
        assert (other.sampled, other.drawn) == (told, union_limiter.items)

    def change(number, ratio):
        for limiter in (union_limiter, other):
            limiter.change(Rule(tr.SamplesPerInsert(ratio, 10), number))

    hand_out(union_limiter, 64)
    first = [union_limiter.begin(64) for _ in range(3)]
    change(1, 2.0)
    assert_sampled(0, 0)
    second = [union_limiter.begin(64) for _ in range(2)]
    assert_sampled(2 * 64, 0)  # those admitted before are none of its own
    union_limiter.end(64, first[0], drawn=False)
    assert_sampled(2 * 64, 0)
    union_limiter.end(64, first[1], drawn=True)
    assert_sampled(2 * 64, 0)
    change(2, 3.0)
    assert_sampled(0, 0)
    union_limiter.end(64, first[2], drawn=False)
    union_limiter.end(64, second[0], drawn=False)
    assert_sampled(0, 0)
    union_limiter.end(64, second[1], drawn=True)
    assert_sampled(0, 0)
    hand_out(union_limiter, 64)
    assert_sampled(64, 64)
    union_limiter.end(64, union_limiter.begin(64), drawn=False)
    assert_sampled(64, 64)
    assert union_limiter.under_way == 0
    assert (union_limiter.items, union_limiter.batches) == (4 * 64, 4)


def test_a_ratio_that_hardly_draws_admits_everything():
    union_limiter = GlobalRateLimiter(Rule(tr.SamplesPerInsert(5e-324)), 0)
    assert all(limit >= 1 << 60 for limit in union_limiter.limits([0, 1], 8).values())


def test_without_a_learner_all_shards_together_admit_what_a_buffer_does(monkeypatch):
    cluster = LocalCluster(monkeypatch, **{f"node {k}": 2 for k in range(8)})
    limiter = tr.SamplesPerInsert(100.0, min_size=10, tolerance=0.1)
    with ShardedReplay({"x": tr.Field()}, 800, limiter=limiter) as replay:
        attach, args = replay.__reduce__()
        for node in cluster.alive:
            cluster.here = node
            explorer = attach(*args)
            with explorer.writer() as writer:
                while writer._admitted():
                    writer.append(x=0.0)
            explorer.close()
        assert len(replay) == 11  # 11 x 100 - 0 draws = 10 x 100 x (1 + 0.1)
    cluster.close()
