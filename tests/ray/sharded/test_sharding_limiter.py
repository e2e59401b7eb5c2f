"""The limiter of a union of shards: its rules, and how much each shard may admit."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import LocalCluster

import torchreplay as tr
from torchreplay import _C
from torchreplay.buffer.stats import Stats
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.ray import ShardedReplay
from torchreplay.ray.sharded.rate_limiter import GlobalRateLimiter, LearnerLimiter, LearnerReport, Rule, Totals
from torchreplay.ray.sharded.shard_sampler import ShardReport


def figures(inserted=0, largest=1.0):
    return ShardReport(Stats.of({"inserted": inserted, "priority_max": largest}), TreeSummary(1.0, 1, 1.0))


def begin(learner, n):
    return learner.tally.begin(n, None)


def end(ahead, drawn):
    (ahead.hand_out if drawn else ahead.give_up)()
    for later in (ahead.give_up, ahead.hand_out):  # it ends once
        later()


def drew(items, batches, rule=0, before=0):
    return rule, items, batches, items - before


class Union:
    """A coordinator and a learner who reports to it, as often as a test looks.

    Attributes:
        counted: What the coordinator has counted.
        learner: What the learner knows.
    """

    def __init__(self, limiter, stream=0):
        self.counted, self.learner = GlobalRateLimiter(Rule(limiter)), LearnerLimiter(Rule(limiter), stream)
        self.report()

    def report(self, n=0):
        report = self.learner.report(n)
        self.learner.hear(self.counted.hear(report))
        return report

    def hear(self, *inserted):
        """The learner hears how many items came into each shard."""
        self.learner.count({number: figures(items) for number, items in enumerate(inserted)})

    def other(self, stream, progress):
        """Another learner reports."""
        self.counted.hear(LearnerReport(stream, *progress, progress[-1], {}))

    def hand_out(self, *batches):
        for n in batches:
            end(begin(self.learner, n), drawn=True)
        self.report()

    def change(self, rule):
        self.counted.rule = rule
        self.learner.change(rule)
        self.report()

    def limits(self, numbers, n=0):
        return self.counted.limits(numbers, self.report(n))

    def needed(self, n):
        self.report()
        return self.learner.needed(n)


def test_min_size_counts_the_items_of_all_shards_and_limits_no_writer():
    union = Union(tr.MinSize(100))
    union.learner.count({0: figures(60)})
    union.learner.count({3: figures(39)})
    assert union.learner.inserted == 99
    assert union.needed(1000) == 100
    assert union.limits([0, 3], 1000) == {0: None, 3: None}


def test_the_items_of_a_lost_shard_stay_counted():
    union = Union(tr.MinSize())
    union.hear(60)
    union.learner.count_inserted({0: 60})  # the coordinator says what was lost
    union.learner.count({1: figures(0)})
    union.report()
    assert union.learner.inserted == 60
    assert union.counted.inserted == {0: 60, 1: 0}


def test_of_a_lost_shard_the_latest_that_anyone_knew_counts():
    union = Union(tr.MinSize())
    union.hear(60)
    union.learner.count_inserted({0: 50})
    union.report()
    union.counted.count_inserted({0: 55})
    assert union.counted.inserted == {0: 60}


def test_draws_of_other_learners_count_once_however_often_they_tell_of_them():
    union = Union(tr.SamplesPerInsert(2.0, 10), 5)
    told = [(6, drew(128, 2)), (6, drew(192, 3)), (7, drew(64, 1)), (6, drew(128, 2)), (8, drew(0, 0))]
    for stream, progress in told:
        union.other(stream, progress)
    union.hand_out(100, 600)
    ahead = begin(union.learner, 64)
    assert union.learner.sampled == 700 + 64 + 192 + 64
    assert union.learner.steps == 2 + 3 + 1
    ahead.give_up()
    assert union.learner.sampled == 700 + 192 + 64
    assert union.learner.learners == 3


@given(
    st.floats(0.1, 50),
    st.integers(1, 5000),
    st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    st.integers(0, 100_000),
    st.integers(1, 512),
)
def test_limits_add_up_to_what_reverbs_limiter_admits(ratio, min_size, inserted, sampled, n):
    limiter = tr.SamplesPerInsert(ratio, min_size)
    union = Union(limiter)
    union.hear(*inserted)
    union.hand_out(sampled)
    whole = sum(inserted)
    _, _, low, high = limiter.bounds()
    # Reverb, rate_limiter.cc: draws need inserts * ratio - draws - n >= min_diff and min_size; inserts are admitted up
    # to min_size, and beyond while inserts * ratio - draws <= max_diff.
    admits_draw = whole >= min_size and whole * ratio - sampled - n >= low
    on_the_edge = abs(whole * ratio - sampled - n - low) < 1e-6 * whole * ratio
    assert (whole >= union.needed(n)) == admits_draw or on_the_edge
    limits = union.limits(range(len(inserted)))
    assert all(limit >= items for limit, items in zip(limits.values(), inserted, strict=True))
    bound = max(min_size, (high + sampled) / ratio, union.needed(0))
    assert sum(limits.values()) <= max(bound, whole) + 1e-6 * bound
    assert sum(limits.values()) >= max(bound, whole) - 1 - 1e-6 * bound


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 64)), max_size=20), st.integers(0, 256))
def test_limits_count_the_draws_of_all_learners_and_those_under_way_of_the_one_who_reports(others, under_way):
    union, sampled = Union(tr.SamplesPerInsert(2.0, 10, tolerance=0.5)), {}
    for stream, n in others:
        items, batches = sampled.get(stream, (0, 0))
        sampled[stream] = items + n, batches + 1
        union.other(stream, drew(*sampled[stream]))
    ahead = begin(union.learner, under_way)
    handed_out = sum(items for items, _ in sampled.values())
    assert sum(union.limits(range(3)).values()) == max(10, (30 + handed_out + under_way) // 2)
    assert sum(union.counted.limits(range(3)).values()) == max(10, (30 + handed_out) // 2)
    ahead.give_up()
    assert sum(union.limits(range(3)).values()) == max(10, (30 + handed_out) // 2)


def test_what_a_learner_waits_for_is_admitted_whatever_the_ratio_says():
    union = Union(tr.SamplesPerInsert(1.0, 10, tolerance=0.1))
    union.hear(10)
    assert union.needed(100) > 10
    assert sum(union.limits([0, 1], 100).values()) >= union.needed(100)


@pytest.mark.parametrize("alone", range(3))
@pytest.mark.parametrize(("ratio", "tolerance", "n"), [(8.0, None, 4096), (1.0, 0.1, 256), (0.3, None, 7)])
def test_explorers_of_one_shard_alone_serve_a_learner_for_ever(ratio, tolerance, n, alone):
    union = Union(tr.SamplesPerInsert(ratio, 100, tolerance))
    inserted = [0, 0, 0]
    for _ in range(20):
        for _look in range(60):  # one alone takes a third of what is left at each
            union.hear(*inserted)
            inserted[alone] = max(inserted[alone], union.limits(range(3), n)[alone])
        union.hear(*inserted)
        assert union.learner.inserted >= union.needed(n)
        union.hand_out(n)


@pytest.mark.parametrize("shards", [4, 16])
@pytest.mark.parametrize(("ratio", "min_size"), [(1000.0, 5), (256.0, 100)])
def test_whoever_only_looks_sees_as_many_as_the_first_draw_needs(ratio, min_size, shards):
    union = Union(tr.SamplesPerInsert(ratio, min_size))
    inserted = [0] * shards
    for _ in range(min_size * shards):
        union.hear(*inserted)
        inserted[-1] = max(inserted[-1], union.limits(range(shards), 1)[shards - 1])  # the others have no writers
    assert sum(inserted) >= min_size


def test_largest_priorities_are_kept():
    learner = LearnerLimiter(Rule(tr.MinSize()), 0)
    for value in (1.0, 7.5, 3.0):
        learner.count({0: figures(largest=value)})
    assert learner.largest == pytest.approx(7.5)


def test_while_every_shard_is_lost_there_is_nobody_to_be_limited():
    union = Union(tr.SamplesPerInsert(2.0, 10))
    union.hear(50)
    assert union.limits([], 100) == {}


LIMITERS = st.one_of(
    st.builds(tr.MinSize, st.integers(1, 60)),
    st.builds(
        tr.SamplesPerInsert, st.sampled_from([0.25, 1.0, 3.0]), st.integers(1, 30), st.sampled_from([0.05, 0.5, 2.0])
    ),
)


@given(LIMITERS, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), LIMITERS), min_size=1, max_size=30))
def test_one_that_is_set_later_admits_what_a_buffer_with_it_admits(first, steps):
    rule = Rule(first)
    union, inserted = Union(first), [0, 0]
    with tr.ReplayBuffer({"x": tr.Field((), "int64")}, 4000, limiter=first) as buffer:
        for kind, n, limiter in steps:
            if kind < 2:  # inserts into shard 0 or 1, as many as may come
                with buffer.writer() as writer:
                    for _ in range(n):
                        len(buffer)  # lets the limiter see what came
                        admitted = writer._admitted()
                        limits = union.limits([0, 1])
                        whole = None if limits[0] is None else sum(limits.values())
                        # A buffer in which nothing can be drawn admits one more, under every ratio.
                        assert admitted == (whole is None or whole > sum(inserted)) or sum(inserted) == 0
                        if not admitted:
                            break
                        writer.append(x=1)
                        inserted[kind] += 1
                        union.hear(*inserted)
            elif kind == 2:
                admits = sum(inserted) >= union.needed(n)
                try:
                    buffer.sample(n, timeout=0)
                except (tr.ReplayTimeout, tr.WouldBlockForever):
                    assert not admits
                else:
                    assert admits
                    union.hand_out(n)
            else:
                rule = rule.followed_by(limiter, sum(inserted))
                union.change(rule)
                buffer.limiter = limiter
        stats = buffer.stats()
        assert (stats.inserted, stats.sampled) == (union.learner.inserted, union.learner.drawn)


@pytest.mark.parametrize("limiter", [tr.MinSize(10), tr.SamplesPerInsert(2.0, 10, tolerance=0.5)])
def test_after_a_clear_it_counts_as_that_of_a_new_union(limiter):
    fresh, union = Union(limiter), Union(limiter)
    union.hear(70, 50)
    union.hand_out(8, 8)
    union.counted.restart({0: 70, 1: 50})
    union.learner.change(union.counted.rule)
    union.report()
    for n in (1, 4, 30):
        assert union.needed(n) == 120 + fresh.needed(n)
    held = [
        sum(admitted for admitted in limits.values() if admitted)
        for limits in (union.limits([0, 1]), fresh.limits([0, 1]))
    ]
    assert held[0] == held[1] + (120 if held[1] else 0)
    union.hear(75, 52)
    union.change(union.learner.rule.followed_by(limiter, 127))
    assert union.learner.rule.inserted_before == 120  # the 7 new items count, and none before
    assert union.needed(1) == 130


def test_after_a_clear_a_learner_knows_no_larger_priority_than_a_new_one():
    union = Union(tr.MinSize(1))
    union.learner.count({0: figures(5, largest=9.0)})
    union.learner.change(union.learner.rule.followed_by(tr.MinSize(2), 5))
    assert union.learner.largest == 9.0
    union.learner.change(union.learner.rule.restarted(5))
    assert union.learner.largest == 1.0


def test_draws_count_from_when_each_learner_hears_of_a_new_one():
    union = Union(tr.SamplesPerInsert(2.0, 10))
    learner = union.learner
    union.hear(100)
    union.other(1, drew(50, 5))
    union.other(2, drew(70, 7))
    union.hand_out(*8 * [10])
    under_way = begin(learner, 10)
    assert learner.sampled == 80 + 10 + 50 + 70
    rule = learner.rule.followed_by(tr.SamplesPerInsert(1.0, 20), 100)
    assert (rule.number, rule.inserted_before) == (1, 80)
    union.change(rule)
    assert learner.sampled == 0
    end(under_way, drawn=True)
    union.hand_out(10)
    assert learner.sampled == 10
    report = learner.report()
    assert (report.rule, report.items, report.batches, report.counted) == drew(100, 10, 1, 90)
    union.other(1, drew(60, 6))  # learner 1 has not heard of it
    union.other(2, drew(95, 9, 1, 75))
    union.other(2, drew(75, 7))  # what it said before it had, and comes late
    union.report()
    assert learner.sampled == 10 + 20
    assert (learner.drawn, learner.steps) == (100 + 60 + 95, 10 + 6 + 9)
    learner.change(Rule(tr.MinSize()))  # an older one, which comes late
    assert learner.rule == rule


def test_of_two_answers_of_the_coordinator_the_later_one_counts():
    union = Union(tr.SamplesPerInsert(2.0, 10))
    early = union.counted.hear(union.learner.report())
    union.other(1, drew(50, 5))
    union.report()
    union.learner.hear(early)
    assert union.learner.drawn == 50


def test_what_others_have_drawn_does_not_shrink_when_two_threads_hear_it():
    learner, threads = LearnerLimiter(Rule(tr.MinSize()), 0), []

    class Overtaken(int):
        """The number of an answer that another thread takes in a later one beside."""

        def __gt__(self, other):
            later = int(self) > other
            threads.append(threading.Thread(target=learner.hear, args=[Totals(6, items=60)]))
            threads[0].start()
            threads[0].join(0.1)  # it may have to wait
            return later

    learner.hear(Totals(Overtaken(5), items=50))
    threads[0].join()
    assert learner.drawn == 60


def test_rounds_that_are_given_up_count_for_no_limiter():
    union, other = Union(tr.MinSize()), LearnerLimiter(Rule(tr.MinSize()), 1)
    learner = union.learner

    def assert_sampled(own, told):
        """Items that it counts, and those that others hear of: not the ones under way."""
        union.report()
        other.hear(union.counted.hear(other.report()))
        assert learner.sampled == own
        assert (other.sampled, other.drawn) == (told, learner.tally.items)

    def change(number, ratio):
        rule = Rule(tr.SamplesPerInsert(ratio, 10), number)
        other.change(rule)
        union.change(rule)

    union.hand_out(64)
    first = [begin(learner, 64) for _ in range(3)]
    change(1, 2.0)
    assert_sampled(0, 0)
    second = [begin(learner, 64) for _ in range(2)]
    assert_sampled(2 * 64, 0)  # those admitted before are none of its own
    end(first[0], drawn=False)
    assert_sampled(2 * 64, 0)
    end(first[1], drawn=True)
    assert_sampled(2 * 64, 0)
    change(2, 3.0)
    assert_sampled(0, 0)
    end(first[2], drawn=False)
    end(second[0], drawn=False)
    assert_sampled(0, 0)
    end(second[1], drawn=True)
    assert_sampled(0, 0)
    union.hand_out(64)
    assert_sampled(64, 64)
    end(begin(learner, 64), drawn=False)
    assert_sampled(64, 64)
    assert (learner.tally.items, learner.tally.batches) == (4 * 64, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda tally: tally.begin(-1, None),
        lambda tally: tally.begin(1 << 40, None),
        lambda tally: tally.begin(1, 5),
        lambda tally: tally.begin(1, tally),
        lambda tally: tally.count(1, tally.begin(1, None)),
        lambda tally: tally.begin(1, None).shorten(2),
        lambda tally: tally.grant(1 << 62, 0.0),
        lambda tally: tally.grant(-1, 0.0),
        lambda tally: tally.keep(-1),
        lambda tally: _C.DrawSteps().go_on_from(-1),
        lambda tally: _C.Round().hand_out(),
    ],
)
def test_what_no_learner_can_have_drawn_is_refused_and_changes_nothing(call):
    tally = _C.DrawTally()
    tally.grant(100, 1.0)
    before = tally.tell(True), tally.lease
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        call(tally)
    assert (tally.tell(True), tally.lease) == before


def test_a_ratio_that_hardly_draws_admits_everything():
    union = Union(tr.SamplesPerInsert(5e-324))
    assert all(limit >= 1 << 60 for limit in union.limits([0, 1], 8).values())


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
