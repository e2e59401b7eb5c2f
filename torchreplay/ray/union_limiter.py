"""`UnionLimiter`: the limiter of a `ShardedReplay`, counted over all shards by every learner for itself."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torchreplay.limiters import Limiter
from torchreplay.ray.figures import Figures


class UnionLimiter:
    """What was inserted and drawn in the union, as far as this process has heard, and what follows from it.

    The rules are those of `SamplesPerInsert`. What this learner draws is counted at once; what others draw, and what
    explorers insert, as of the shards' last answers.

    Args:
        limiter: Of the union.
        stream: This learner's number.

    Attributes:
        items: Items that this learner has handed out.
        batches: Batches that it has handed out.
        under_way: Items that it has ordered besides.
        largest: The largest raw priority heard of.
    """

    def __init__(self, limiter: Limiter, stream: int) -> None:
        self._min_size, self._ratio, self._low, self._high = limiter.bounds()
        self._stream = stream
        self._inserted: dict[int, int] = {}  # by shard
        self._others: dict[int, tuple[int, int]] = {}  # items and batches, by learner
        self.items = self.batches = self.under_way = 0
        self.largest = 1.0

    def hear(self, number: int, figures: Figures) -> None:
        """Takes in what a shard has answered."""
        self.count_inserted(number, figures.inserted)
        self.largest = max(self.largest, figures.largest)
        for stream, (items, batches) in figures.learners.items():
            if stream != self._stream:
                before = self._others.get(stream, (0, 0))
                self._others[stream] = max(items, before[0]), max(batches, before[1])

    def count_inserted(self, number: int, inserted: int) -> None:
        """Takes in how many items have become drawable in a shard; what a lost one had stays counted."""
        self._inserted[number] = max(inserted, self._inserted.get(number, 0))

    @property
    def inserted(self) -> int:
        """Items that ever became drawable."""
        return sum(self._inserted.values())

    @property
    def sampled(self) -> int:
        """Items drawn by all learners."""
        return self.items + self.under_way + sum(items for items, _ in self._others.values())

    @property
    def learners(self) -> int:
        """How many learners have drawn."""
        return len(self._others) + (self.batches > 0)

    @property
    def steps(self) -> int:
        """Batches handed out by all learners."""
        return self.batches + sum(batches for _, batches in self._others.values())

    def needed(self, n: int) -> int:
        """Returns how many items must have become drawable before `n` more may be drawn."""
        items = max(self._min_size, 1)
        if self._ratio:
            items = max(items, math.ceil((self._low + self.sampled + n) / self._ratio))
        return items

    def limits(self, numbers: Iterable[int], n: int) -> dict[int, int | None]:
        """Returns up to how many items each shard may admit its writers: together, what the union admits.

        Args:
            numbers: The shards that there are.
            n: Items that this learner waits for, which are always admitted.
        """
        shards = sorted(numbers)
        if not self._ratio or not shards:
            return dict.fromkeys(shards)
        inserted = self.inserted
        room = max(self._min_size, math.floor((self._high + self.sampled) / self._ratio), self.needed(n)) - inserted
        whole, rest = divmod(max(room, 0), len(shards))
        return {number: self._inserted.get(number, 0) + whole + (place < rest) for place, number in enumerate(shards)}
