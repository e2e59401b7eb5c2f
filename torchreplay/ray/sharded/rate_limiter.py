"""`GlobalRateLimiter`: the limiter of a `ShardedReplay`, counted over all shards by every learner for itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from torchreplay.ray.sharded.messages import LearnerProgress, ShardReport, is_newer
from torchreplay.schema.limiters import Limiter

_PAST: Final = -1
"""The number of no learner: what was drawn before a checkpoint."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A limiter, and from where it counts.

    Attributes:
        limiter: Who must wait.
        number: Of the limiter: each one that is set has the next.
        inserted_before: Items that it does not count, of all that ever became drawable. Of the draws it counts those
            that each learner makes after it has heard of it.
    """

    limiter: Limiter
    number: int = 0
    inserted_before: int = 0

    def followed_by(self, limiter: Limiter, inserted: int) -> Rule:
        """Returns what `limiter` makes of the union when it is set now.

        Args:
            limiter: The new one.
            inserted: Items that have become drawable so far: of them `min_size` count.
        """
        return Rule(limiter, self.number + 1, max(0, inserted - limiter.min_size))


class GlobalRateLimiter:
    """What was inserted and drawn in the union, as far as this process has heard, and what follows from it.

    The rules are those of `SamplesPerInsert`. What this learner draws is counted at once; what others draw, and what
    explorers insert, as of the shards' last answers.

    Args:
        rule: The limiter.
        stream: This learner's number.

    Attributes:
        rule: The limiter, and from where it counts.
        items: Items that this learner has handed out.
        batches: Batches that it has handed out.
        largest: The largest raw priority heard of.
        waited: Seconds that this learner has waited for rows.
    """

    def __init__(self, rule: Rule, stream: int) -> None:
        self._stream = stream
        self._inserted: dict[int, int] = {}  # by shard
        self._looks = 0  # of one who waits for less than an item of each shard
        self._others: dict[int, LearnerProgress] = {}  # by learner
        self._untold: dict[int, dict[int, LearnerProgress]] = {}  # by shard
        self.items = self.batches = self._ordered = 0  # what was ordered, less what was given up
        self.largest = 1.0
        self.waited = 0.0
        self._take(rule)

    def change(self, rule: Rule) -> None:
        """Keeps to another limiter from now on, if it is newer."""
        if rule.number > self.rule.number:
            self._take(rule)

    def begin(self, n: int) -> int:
        """Counts `n` items as ordered; returns the number of the limiter that has admitted them."""
        number = self.rule.number
        self._ordered += n
        return number

    def end(self, n: int, rule: int, drawn: bool) -> None:
        """Counts `n` items, ordered under limiter number `rule`, as handed out, or as given up."""
        if drawn:
            self.items += n
            self.batches += 1
        else:
            self._ordered -= n
            if rule != self.rule.number:
                self._before -= n

    def hear(self, number: int, figures: ShardReport) -> None:
        """Takes in what a shard has answered."""
        self.count_inserted(number, figures.inserted)
        self.largest = max(self.largest, figures.largest)
        for stream, drew in figures.learners.items():
            if stream != self._stream and is_newer(drew, self._others.get(stream)):
                self._others = self._others | {stream: drew}  # another one: threads may be looking at this
        if figures.rule >= 0:  # its actor's own answer, and not what a process of its node says of the shard
            self._untold[number] = {
                stream: drew
                for stream, drew in self._others.items()
                if stream != _PAST and is_newer(drew, figures.learners.get(stream))
            }

    def untold(self, number: int) -> Mapping[int, LearnerProgress]:
        """Returns what others have handed out, where a shard has reported nothing of it, or less."""
        return self._untold.get(number, {})

    def count_inserted(self, number: int, inserted: int) -> None:
        """Takes in how many items have become drawable in a shard; what a lost one had stays counted."""
        self._inserted[number] = max(inserted, self._inserted.get(number, 0))

    def remember(self, past: LearnerProgress) -> None:
        """Takes in what had been drawn before the union was restored from a checkpoint."""
        self._others = self._others | {_PAST: past}

    @property
    def divides(self) -> bool:
        """Whether explorers are limited at all."""
        return bool(self._ratio)

    @property
    def inserted(self) -> int:
        """Items that ever became drawable."""
        return sum(self._inserted.values())

    @property
    def drew(self) -> LearnerProgress:
        """What this learner has handed out."""
        return LearnerProgress(self.rule.number, self.items, self.batches, min(self._before, self.items))

    @property
    def under_way(self) -> int:
        """Items that this learner has ordered and not handed out yet."""
        return self._ordered - self.items

    @property
    def drawn(self) -> int:
        """Items that all learners have handed out."""
        return self.items + sum(drew.items for drew in self._others.values())

    @property
    def sampled(self) -> int:
        """Items drawn under the present limiter by all learners, those that this one has ordered too."""
        others = sum(drew.items - drew.before for drew in self._others.values() if drew.rule == self.rule.number)
        return self._ordered - self._before + others

    @property
    def learners(self) -> int:
        """How many learners have drawn."""
        return len(self._others.keys() - {_PAST}) + (self.batches > 0)

    @property
    def steps(self) -> int:
        """Batches handed out by all learners."""
        return self.batches + sum(drew.batches for drew in self._others.values())

    def needed(self, n: int) -> int:
        """Returns how many items must have become drawable before `n` more may be drawn."""
        items = max(self._min_size, 1)
        draws = self._low + self.sampled + n
        if self._ratio and draws > 0:
            items = max(items, self.rule.inserted_before + _whole(math.ceil, draws / self._ratio))
        return items

    def limits(self, numbers: Iterable[int], n: int) -> dict[int, int | None]:
        """Returns up to how many items each shard may admit its writers: together, what the union admits.

        What is left is divided anew with every call, so that a shard without writers keeps nothing from the others for
        long. With every call, the last items of those that are waited for go to other shards, to find one with writers.

        Args:
            numbers: The shards that there are.
            n: Items that are waited for, which are always admitted; 0 for none.
        """
        shards = sorted(numbers)
        if not self._ratio or not shards:
            return dict.fromkeys(shards)
        allowed = self.rule.inserted_before + _whole(math.floor, (self._high + self.sampled) / self._ratio)
        inserted, needed = self.inserted, self.needed(n)
        whole, rest = divmod(max(max(self._min_size, allowed, needed) - inserted, 0), len(shards))
        first = 0
        if n and not whole and inserted < needed:
            first, self._looks = self._looks, self._looks + 1
        return {
            number: self._inserted.get(number, 0) + whole + ((place - first) % len(shards) < rest)
            for place, number in enumerate(shards)
        }

    def _take(self, rule: Rule) -> None:
        self.rule = rule
        self._min_size, self._ratio, self._low, self._high = rule.limiter.bounds()
        self._before = self._ordered  # what is under way was admitted by the one before


def _whole(rounded: Callable[[float], int], items: float) -> int:
    """Returns a number of items, which may be beyond all bounds where the ratio is tiny."""
    return rounded(min(max(items, 0.0), 2.0**62))
