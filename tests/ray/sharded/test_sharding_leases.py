"""Leases: what learners of a union may draw without asking is never more than the limiter admits, and comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchreplay as tr

pytest.importorskip("ray")
from torchreplay.ray.sharded import rate_limiter
from torchreplay.ray.sharded.rate_limiter import LEASE_SECONDS, GlobalRateLimiter, LearnerLimiter, Rule


class Clock:
    """The time of all processes."""

    now = 100.0

    def monotonic(self):
        return self.now


class Learner:
    """One learner, whose reports and answers are under way for as long as a test likes.

    Attributes:
        drawn: Items that it has drawn.
        told: Items that it had drawn at its last report that came.
        reports, answers: Under way, in their order.
    """

    def __init__(self, rule, stream):
        self.limiter, self.drawn, self.told, self.alive = LearnerLimiter(rule, stream), 0, 0, True
        self.reports, self.answers = [], []

    def draw(self, n):
        if self.limiter.admits(n):
            self.limiter.tally.count(n, None)
            self.drawn += n
            return True
        return False

    def report(self, inserted, n=0):
        self.limiter.count_inserted(inserted)
        self.reports.append((self.limiter.report(n), self.drawn))

    def deliver(self, coordinator, which=0):
        report, self.told = self.reports.pop(which)
        self.answers.append(coordinator.hear(report))

    def hear(self, which=0):
        self.limiter.hear(self.answers.pop(which))

    def ask(self, coordinator, inserted, n=0):
        self.report(inserted, n)
        self.deliver(coordinator)
        self.hear()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(rate_limiter, "time", made)
    return made


class Union:
    """Learners and a coordinator, to whom anything may happen; no draw may break the rule."""

    def __init__(self, clock, limiter, first):
        self.clock, self.limiter, self.inserted = clock, limiter, {0: first, 1: 0}
        self.coordinator = GlobalRateLimiter(Rule(limiter))
        self.learners = [Learner(Rule(limiter), stream) for stream in range(2)]

    def step(self, what, who, n):
        learner = self.learners[who % len(self.learners)]
        if learner.alive or what in ("insert", "join", "pause"):
            getattr(self, what)(learner, n)

    def insert(self, _, n):
        self.inserted[n % 2] += n

    def join(self, _, n):
        if len(self.learners) < 5:
            self.learners.append(Learner(Rule(self.limiter), len(self.learners)))

    def pause(self, _, n):
        self.clock.now += n / 20

    def die(self, learner, n):
        learner.alive, learner.died = False, self.clock.now

    def report(self, learner, n):
        learner.report(dict(self.inserted), n % 3 * 10)

    def deliver(self, learner, n):
        if learner.reports:
            learner.deliver(self.coordinator, n % len(learner.reports))

    def hear(self, learner, n):
        if learner.answers:
            learner.hear(n % len(learner.answers))

    def lose(self, learner, n):
        if learner.reports or learner.answers:
            (learner.reports or learner.answers).pop()

    def ask(self, learner, n):
        learner.report(dict(self.inserted), n)
        learner.deliver(self.coordinator, -1)
        learner.hear(-1)
        self.draw(learner, n)

    def draw(self, learner, n):
        if not learner.draw(n):
            return
        _, ratio, low, _ = self.limiter.bounds()
        whole = sum(self.inserted.values())
        # What a dead learner drew after its last report is forgotten, at the earliest when its lease has ended.
        known = [
            one.drawn if one.alive or self.clock.now < one.died else min(one.told, one.drawn) for one in self.learners
        ]
        assert whole >= self.limiter.min_size
        assert whole * ratio - sum(known) >= low


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "draw", "draw", "ask", "report", "deliver", "hear", "lose", "die", "join", "pause"]),
        st.integers(0, 7),
        st.integers(1, 40),
    ),
    max_size=150,
)
LIMITERS = st.builds(
    tr.SamplesPerInsert, st.sampled_from([0.25, 1.0, 3.0]), st.integers(1, 30), st.sampled_from([0.5, 2.0])
)


@settings(max_examples=150)
@given(LIMITERS, st.integers(20, 200), STEPS)
def test_whatever_messages_are_late_or_lost_learners_draw_no_more_than_the_formula_admits(limiter, first, steps):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rate_limiter, "time", clock := Clock())
        union = Union(clock, limiter, first)
        for what, who, n in steps:
            union.step(what, who, n)


@pytest.mark.parametrize("learners", [1, 2, 5])
def test_learners_draw_all_that_the_formula_admits_and_no_more(clock, learners):
    limiter = tr.SamplesPerInsert(2.0, 100, tolerance=0.5)
    coordinator, inserted = GlobalRateLimiter(Rule(limiter)), {0: 300}
    each = [Learner(Rule(limiter), stream) for stream in range(learners)]
    for _ in range(40):
        for learner in each:
            for _ in range(2):
                learner.ask(coordinator, inserted, 0 if learner.limiter.covers(10) else 10)
                while learner.draw(10):
                    pass
        clock.now += 0.1
    assert sum(learner.drawn for learner in each) == 500  # 2 x 300 - 500 = 2 x 100 x (1 - 0.5)


def test_a_lease_grows_with_what_is_drawn_so_that_few_reports_are_needed(clock):
    limiter = tr.SamplesPerInsert(1.0, 100, tolerance=0.5)
    coordinator, inserted = GlobalRateLimiter(Rule(limiter)), {0: 1_000_000}
    learner, reports = Learner(Rule(limiter), 0), 0
    for _ in range(5000):
        if not learner.limiter.covers(64) or learner.limiter.tally.is_short:
            learner.ask(coordinator, inserted, 0 if learner.limiter.covers(64) else 64)
            reports += 1
        assert learner.draw(64)
    assert reports < 30


def test_what_a_dead_learner_held_comes_back_when_its_lease_has_ended(clock):
    limiter = tr.SamplesPerInsert(1.0, 100, tolerance=0.5)
    coordinator, inserted = GlobalRateLimiter(Rule(limiter)), {0: 150}  # 100 may be drawn
    dead, learner = (Learner(Rule(limiter), stream) for stream in range(2))
    for _ in range(2):
        dead.ask(coordinator, inserted, 20)
        assert dead.draw(20)
    held = next(n for n in range(100, -1, -1) if dead.limiter.covers(n))
    learner.ask(coordinator, inserted, 60)
    assert held > 0
    assert not learner.draw(60)
    clock.now += LEASE_SECONDS
    assert not dead.limiter.covers(1)
    learner.ask(coordinator, inserted, 60)
    assert learner.draw(60)


def test_two_who_wait_for_more_than_is_there_keep_nothing_from_each_other(clock):
    limiter = tr.SamplesPerInsert(1.0, 100, tolerance=0.5)
    coordinator, inserted = GlobalRateLimiter(Rule(limiter)), {0: 150}  # 100 may be drawn
    first, second = (Learner(Rule(limiter), stream) for stream in range(2))
    for learner in (first, second):
        learner.ask(coordinator, inserted, 30)
        assert learner.draw(30)
    for learner in (first, second):
        learner.ask(coordinator, inserted)  # each gets some of the 40 that are left
        assert learner.limiter.covers(1)
    for _ in range(2):
        for learner in (first, second):
            learner.ask(coordinator, inserted, 40)
    assert first.draw(40) + second.draw(40) == 1


def test_another_limiter_ends_all_leases(clock):
    limiter = tr.SamplesPerInsert(1.0, 100, tolerance=0.5)
    coordinator, inserted = GlobalRateLimiter(Rule(limiter)), {0: 150}
    learner, other = (Learner(Rule(limiter), stream) for stream in range(2))
    other.ask(coordinator, inserted, 90)
    coordinator.change(tr.SamplesPerInsert(1.0, 150, tolerance=0.5))  # 75 may be drawn
    learner.limiter.change(coordinator.rule)
    assert not learner.limiter.covers(1)
    learner.ask(coordinator, inserted, 75)
    assert learner.draw(75)
    other.ask(coordinator, inserted, 10)  # under the old one
    other.limiter.change(coordinator.rule)
    assert not other.draw(1)
