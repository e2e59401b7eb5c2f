"""The limiter of a `ShardedReplay`: the coordinator counts, and leases to each learner how much it may draw."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from torchreplay import _C
from torchreplay.ray.sharded.shard_sampler import ShardReport
from torchreplay.schema.limiters import Limiter

if TYPE_CHECKING:
    from torchreplay._C import LimiterRule

WINDOW: Final = 10.0
"""Seconds: waits of late are those of the running window and the one before, as in a `ReplayBuffer`."""

LEASE_SECONDS: Final = 2.0
"""Seconds after which a lease ends: the coordinator then gives what is left of it to others."""

AHEAD: Final = 4
"""A learner asks for so many times the items that it has drawn since its last report."""

MOST: Final = 1 << 48
"""Draws that are as good as no limit."""

_PAST: Final = -1
"""The number of no learner: what was drawn before a checkpoint."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A limiter, and from where it counts. The native core says what it asks for, as it does for one buffer."""

    limiter: Limiter  # who must wait
    number: int = 0  # of the limiter: each one that is set has the next
    # Items that it does not count, of all that ever became drawable. Of the draws it counts those that each learner
    # makes after it has heard of it.
    inserted_before: int = 0
    cleared: int = 0  # items that were inserted before the last `clear`: not even `min_size` counts them

    def followed_by(self, limiter: Limiter, inserted: int) -> Rule:
        """Returns what `limiter` makes of the union when it is set now, with `inserted` items so far."""
        new = Rule(limiter, self.number + 1, 0, self.cleared)
        return replace(new, inserted_before=_C.limiter_start(new._native, inserted))

    def restarted(self, inserted: int) -> Rule:
        """Returns what the same limiter makes of the union when all `inserted` items are taken away now."""
        return replace(self, cleared=inserted).followed_by(self.limiter, inserted)

    @property
    def divides(self) -> bool:
        """Whether explorers are limited at all."""
        return bool(self.limiter.bounds()[1])

    def needed(self, sampled: int, n: int) -> int:
        """Returns how many items must have become drawable before `n` more than `sampled` may be drawn."""
        return _C.limiter_needed(self._native, sampled, n)

    def admitted(self, sampled: int, n: int) -> int:
        """Returns up to how many items may be inserted, under a ratio, while a learner waits for `n` items."""
        return _C.limiter_admitted(self._native, sampled, n)

    @property
    def _native(self) -> LimiterRule:
        return *self.limiter.bounds(), self.inserted_before, self.cleared


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """What a learner reports to the coordinator. All counts are totals, so that a report that is lost does no harm."""

    stream: int  # the learner's number
    rule: int  # the number of the limiter that it keeps to
    items: int  # items that it has handed out in all
    batches: int  # batches in all
    counted: int  # items handed out that this limiter counts
    sampled: int  # those counted, and those under way that it will count
    # Items that ever became drawable in each shard, by number, as far as it knows; in lost ones, too
    inserted: Mapping[int, int]
    waited: float = 0.0  # seconds that it has waited for rows
    n: int = 0  # items that it waits for, which are always admitted; 0 for none
    wanted: int = 0  # items that it wants to be sure of, beyond those sampled
    lease: int = 0  # items up to which it may draw, as it sees it, under this limiter
    heard: int = 0  # the moment of the last answer that it has heard
    sent: float = 0.0  # when, by its own monotonic clock


class Totals(NamedTuple):
    """What the coordinator answers: what all others have handed out."""

    moment: int = 0  # grows from answer to answer
    rule: int = -1  # the number of the newest limiter
    sampled: int = 0  # items that this limiter counts
    items: int = 0  # items in all
    batches: int = 0  # batches in all
    learners: int = 0  # how many others have drawn
    waited: float = 0.0  # seconds that all learners have waited for rows
    wait_share: float = 0.0  # share of the last seconds that each has, on average
    lease: int = 0  # items up to which the learner itself may draw under this limiter
    until: float = 0.0  # when that ends, by its own monotonic clock


class Lease(NamedTuple):
    """What a learner may draw without asking."""

    items: int  # up to which it may draw under the limiter, in all
    rule: int  # the number of that limiter
    moment: int  # of the answer that says so
    until: float  # monotonic time at which it ends
    waits: bool  # whether the learner waits for more


class GlobalRateLimiter:
    """What was inserted and drawn in the union, as the coordinator has heard, and what each shard may admit.

    The rules are those of `SamplesPerInsert`.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        # Items that ever became drawable in each shard, by number; what a lost one had stays counted
        self.inserted: Mapping[int, int] = {}
        self._learners: dict[int, LearnerReport] = {}
        self._leases: dict[int, Lease] = {}
        self._waits = WaitStats()
        self._looks = 0  # how often fewer items were waited for than there are shards
        self._moment = 0

    def change(self, limiter: Limiter) -> None:
        """Sets another limiter, which counts from here."""
        self.rule = self.rule.followed_by(limiter, sum(self.inserted.values()))

    def restart(self, inserted: Mapping[int, int]) -> None:
        """Begins as that of a new union: all shards were emptied, at so many items each."""
        self.rule = self.rule.restarted(sum({**self.inserted, **inserted}.values()))

    def count_inserted(self, inserted: Mapping[int, int]) -> None:
        """Takes in what someone knows of shards."""
        self.inserted = _largest(self.inserted, inserted)

    def remember(self, items: int, batches: int, counted: int) -> None:
        """Takes in what had been drawn before the union was restored from a checkpoint."""
        self._learners[_PAST] = LearnerReport(_PAST, self.rule.number, items, batches, counted, counted, {})

    def hear(self, report: LearnerReport) -> Totals:
        """Takes in a learner's report, and returns what it needs to know of the others."""
        self.count_inserted(report.inserted)
        known = self._learners.get(report.stream)
        if report.batches and (known is None or (report.rule, report.items) > (known.rule, known.items)):
            self._learners[report.stream] = report  # those who only look around would add up
        if report.batches or report.waited:
            self._waits.hear(report.stream, report.waited)
        others = self._others(report.stream)
        self._moment += 1
        return Totals(
            self._moment,
            self.rule.number,
            self._counted(others),
            sum(other.items for other in others),
            sum(other.batches for other in others),
            sum(other.stream != _PAST for other in others),
            self._waits.total,
            self._waits.share,
            self._lease(report),
            report.sent + LEASE_SECONDS,
        )

    def limits(self, numbers: Iterable[int], report: LearnerReport | None = None) -> dict[int, int | None]:
        """Returns up to how many items each shard may admit its writers: together, what the union admits.

        What is left is divided anew with every report, so that a shard without writers keeps nothing from the others
        for long. Where less than an item a shard is waited for, the next report gives these items to other shards, to
        find one with writers. Of the learner whose `report` it is draws under way count, too, and what it waits for.
        """
        shards = sorted(numbers)
        if not self.rule.divides or not shards:
            return dict.fromkeys(shards)
        stream, sampled, n = (_PAST - 1, 0, 0) if report is None else (report.stream, report.sampled, report.n)
        sampled += self._counted(self._others(stream))
        inserted = sum(self.inserted.values())
        whole, rest = divmod(max(self.rule.admitted(sampled, n) - inserted, 0), len(shards))
        first = 0
        if n and not whole and inserted < self.rule.needed(sampled, n):
            first, self._looks = self._looks, self._looks + 1
        return {
            number: self.inserted.get(number, 0) + whole + ((place - first) % len(shards) < rest)
            for place, number in enumerate(shards)
        }

    def _lease(self, report: LearnerReport) -> int:
        """Returns up to how many items a learner may draw.

        All leases together, and what was drawn by those who have none, are never more than what the limiter admits.
        Of what is free a learner gets a part at most, as one more would, but always what it waits for if that is there.
        """
        now = time.monotonic()
        if report.rule != self.rule.number or not self.rule.divides:
            return 0
        rule, leases = self.rule.number, self._leases
        self._leases = leases = {n: one for n, one in leases.items() if now < one.until and one.rule == rule}
        mine, lease = leases.pop(report.stream, None), report.sampled
        if mine is not None:  # what it gives back counts when it has heard of all that it was given
            lease = max(lease, report.lease if report.heard == mine.moment else mine.items)
        taken = {one.stream: one.counted for one in self._others(report.stream) if one.rule == rule}
        taken |= {stream: max(one.items, taken.get(stream, 0)) for stream, one in leases.items()}
        needed = partial(self.rule.needed, sum(taken.values()))
        free = bisect_right(range(MOST), sum(self.inserted.values()), key=needed) - 1 - report.sampled
        part = min(report.wanted, max(report.n, free // (len(leases) + 2)))
        granted = report.n <= part <= free and (report.n > 0 or not any(one.waits for one in leases.values()))
        if granted:
            lease = max(lease, report.sampled + part)
        if report.wanted or lease > report.sampled:
            waits = report.wanted > 0 and report.n > 0 and not granted
            leases[report.stream] = Lease(lease, rule, self._moment, now + LEASE_SECONDS, waits)
        return lease

    def _others(self, stream: int) -> list[LearnerReport]:
        return [learner for learner in self._learners.values() if learner.stream != stream]

    def _counted(self, learners: Iterable[LearnerReport]) -> int:
        return sum(learner.counted for learner in learners if learner.rule == self.rule.number)


class LearnerLimiter:
    """The limiter as one learner knows it: whether it may draw.

    Under a ratio it draws as long as its lease lasts, and asks for more in time. What others draw is known as of the
    coordinator's last answer; what explorers insert, as of the shards' last answers. `stream` is this learner's number.
    Threads may share it.
    """

    def __init__(self, rule: Rule, stream: int) -> None:
        self._lock = threading.RLock()  # a signal handler may draw, too
        self.rule, self.divides = rule, rule.divides
        self.others = Totals()  # what others have drawn
        self.tally = _C.DrawTally()  # of this learner's items and batches, under this rule and in all
        self.tally.restart(rule.number)
        self.largest = 1.0  # the largest raw priority heard of
        self.waited = 0.0  # seconds that this learner has waited for rows
        self.stream = stream  # which no other process has
        self._inserted: Mapping[int, int] = {}  # by shard

    def change(self, rule: Rule) -> None:
        """Keeps to another limiter from now on, if it is newer."""
        with self._lock:
            if rule.number > self.rule.number:
                if rule.cleared > self.rule.cleared:
                    self.largest = 1.0  # as in a new buffer
                self.tally.restart(rule.number)  # first: after an exception of a handler it is done again
                self.rule, self.divides = rule, rule.divides

    def covers(self, n: int) -> bool:
        """Returns whether `n` more items may be drawn, and nobody has to be asked."""
        return self.tally.covers(n, time.monotonic())

    def admits(self, n: int) -> bool:
        """Returns whether `n` more items may be drawn, as far as is known."""
        with self._lock:
            if not self.divides and self.inserted >= self.needed(n):  # for as long as this limiter is kept to
                self.tally.grant(MOST, math.inf)
            return self.covers(n)

    @property
    def silent(self) -> bool:
        """Whether nobody needs to hear soon of what is drawn here, and all know that something is."""
        return not self.divides and self.tally.told > 0 and not self.tally.is_short

    def count_wait(self, since: float) -> float:
        """Counts the time since then as waited for rows; returns until when."""
        now = time.monotonic()
        with self._lock:
            self.waited += now - since
        return now

    @property
    def unsaid(self) -> bool:
        """Whether the coordinator lacks some of what was ordered here."""
        return self.tally.sampled != self.tally.told

    def count(self, told: Mapping[int, ShardReport]) -> None:
        """Takes in what shards have answered."""
        self.count_inserted({number: figures.stats.inserted for number, figures in told.items()})
        with self._lock:
            self.largest = max(self.largest, *(figures.stats.priority_max for figures in told.values()), 0.0)

    def count_inserted(self, inserted: Mapping[int, int]) -> None:
        """Takes in how many items have become drawable in shards; what a lost one had stays counted."""
        with self._lock:
            self._inserted = _largest(self._inserted, inserted)

    def hear(self, others: Totals) -> None:
        """Takes in what the coordinator has answered, unless a later answer came first."""
        with self._lock:
            if others.moment > self.others.moment:
                self.others = others
                if others.rule == self.rule.number and self.divides:
                    self.tally.grant(others.lease, others.until)

    def report(self, n: int = 0, looks: bool = False) -> LearnerReport:
        """Returns the report to the coordinator, and gives back what the learner does not need beside `n` items.

        For these it waits. The lease of someone who only `looks` around stays as it is.
        """
        with self._lock:
            items, batches, counted, sampled, told = self.tally.tell(looks)
            wanted = 0
            if not looks and self.divides:
                wanted = n + AHEAD * max(0, sampled - told)
                # A part that is too small for a batch would be in others' way.
                self.tally.keep(sampled + wanted if self.tally.lease - sampled >= n else sampled)
            return LearnerReport(
                self.stream,
                self.rule.number,
                items,
                batches,
                counted,
                sampled,
                self._inserted,
                self.waited,
                n,
                wanted,
                self.tally.lease,
                self.others.moment,
                time.monotonic(),
            )

    @property
    def inserted(self) -> int:
        """Items that ever became drawable."""
        return sum(self._inserted.values())

    @property
    def drawn(self) -> int:
        """Items that all learners have handed out."""
        return self.tally.items + self.others.items

    @property
    def counted(self) -> int:
        """Items that all learners have handed out under the present limiter."""
        with self._lock:
            return self.tally.counted + self._counted_by_others

    @property
    def sampled(self) -> int:
        """The same, and those that this learner has ordered."""
        with self._lock:
            return self.tally.sampled + self._counted_by_others

    @property
    def _counted_by_others(self) -> int:
        return self.others.sampled * (self.others.rule == self.rule.number)

    @property
    def learners(self) -> int:
        """How many learners have drawn."""
        return self.others.learners + (self.tally.batches > 0)

    @property
    def steps(self) -> int:
        """Batches handed out by all learners."""
        return self.tally.batches + self.others.batches

    def needed(self, n: int) -> int:
        """Returns how many items must have become drawable before `n` more may be drawn."""
        with self._lock:
            return self.rule.needed(self.sampled, n)


class WaitStats:
    """For how long learners have waited, as they report it. A report may be lost, or be overtaken."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._seconds: dict[int, float] = {}  # for which each learner has waited, in all
        self._heard_at: dict[int, float] = {}
        # When the window before the running one began, and the running one, and what the total was then.
        self._marks = deque([(now, 0.0), (now, 0.0)], maxlen=2)

    def hear(self, stream: int, seconds: float) -> None:
        """Takes in for how many seconds, in all, learner number `stream` has waited."""
        self._heard_at[stream] = self._turn()
        self._seconds[stream] = max(seconds, self._seconds.get(stream, 0.0))

    @property
    def total(self) -> float:
        """Seconds, of all learners."""
        return sum(self._seconds.values())

    @property
    def share(self) -> float:
        """Share of the last 10 to 20 seconds that a learner which has said something in them has waited, on average."""
        now = self._turn()
        since, total = self._marks[0]
        learners = sum(at >= since for at in self._heard_at.values())
        return min(1.0, (self.total - total) / max(now - since, 1e-9) / max(1, learners))

    def _turn(self) -> float:
        """Marks the windows that have begun; returns the time."""
        now = time.monotonic()
        while now // WINDOW > (began := self._marks[-1][0] // WINDOW):
            self._marks.append(((began + 1) * WINDOW, self.total))
        return now


def _largest(known: Mapping[int, int], said: Mapping[int, int]) -> Mapping[int, int]:
    """Returns the larger number for each shard. It changes neither mapping: threads may be looking at them."""
    return {**known, **{number: max(count, known.get(number, 0)) for number, count in said.items()}}
