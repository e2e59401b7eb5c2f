"""Looking into all shards of a `ShardedReplay`."""

from __future__ import annotations

from contextlib import suppress

import torch

from torchreplay.ray.sharded.client import ShardClient
from torchreplay.ray.sharded.histograms import merged_histograms
from torchreplay.ray.sharded.priority_updates import Feedback
from torchreplay.ray.sharded.sampler import ShardedSampler
from torchreplay.ray.sharded.stats import ShardedStats, summed
from torchreplay.schema.config import Configured
from torchreplay.schema.limiters import Limiter, MinSize, SamplesPerInsert
from torchreplay.validation import checked_int, checked_kind


class ShardedInspection(Configured):
    """The part of a `ShardedReplay` that shows what is in it."""

    shards: ShardClient
    _draws: ShardedSampler
    _feedback: Feedback
    _capacity: int
    _count: int
    _nonce: int
    _seed: int
    _closed: bool

    def __len__(self) -> int:
        """Returns the number of rows held by all shards."""
        self.require_open()
        self.shards.exchange()
        return sum(figures.rows for figures in self.shards.figures.values())

    @property
    def capacity(self) -> int:
        """Rows that fit into all shards."""
        return self._capacity

    @property
    def limiter(self) -> Limiter:
        """Who must wait. Set it to change it for every process. Processes that can go on under the new one do.

        A new limiter counts from the moment at which it is set, as that of a `ReplayBuffer` does. Of the items inserted
        before, `min_size` count (or all, if there are fewer). Of the draws before, none count. Learners that wait, or
        that draw from other nodes, hear of it with the next answer of a shard, the others within a second. Each keeps
        to the old one until then, and its draws under the old one do not count for the new one.
        """
        self.require_open()
        return self.shards.look().rule.limiter

    @limiter.setter
    def limiter(self, limiter: Limiter | None) -> None:
        self.require_open()
        default: Limiter = MinSize()
        self.shards.set_limiter(checked_kind("limiter", limiter, default, (MinSize, SamplesPerInsert)))

    @property
    def draws(self) -> int:
        """Batches that this object has drawn: the position in its own stream of random numbers."""
        return self._draws.made

    @draws.setter
    def draws(self, step: int) -> None:
        self._draws.made = checked_int("draws", step, 0, (1 << 48) - 1)

    @property
    def stream(self) -> int:
        """The number of this process's stream of random numbers."""
        return self._draws.stream

    @stream.setter
    def stream(self, number: int) -> None:
        self._draws.stream = checked_int("stream", number, 0, (1 << 48) - 1)

    def stats(self) -> ShardedStats:
        """Returns what has happened so far: over all shards, and each one's own."""
        self.require_open()
        self._feedback.apply_arrived()
        self._feedback.hear(0)
        self.shards.exchange()
        places = self.shards.table.places
        told = self.shards.calls.collect({number: place.actor.stats.remote() for number, place in places.items()})
        return summed(told, places, self.shards.look(), self._capacity, self._count, self.shards.union_limiter)

    def _marks(self) -> tuple[int, int]:
        return self._nonce, self._seed

    def histograms(self, bins: int = 64) -> dict[str, torch.Tensor]:
        """Returns histograms of leaf priorities and of rows' ages, as `ReplayBuffer.histograms` does. O(capacity).

        Each shard counts into bins of its own, whose counts are put where the middle of the bin lies. While there is
        no shard they are those of an empty buffer.
        """
        self.require_open()
        bins = checked_int("bins", bins, 1, 1 << 20)
        self._feedback.apply_arrived()
        places = self.shards.look().places
        calls = {number: place.actor.histograms.remote(bins) for number, place in places.items()}
        return merged_histograms(list(self.shards.calls.collect(calls).values()), bins)

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called, in any process, as far as this one has heard: explorers hear it at once."""
        nearby = self.shards.nearby
        with suppress(RuntimeError):  # another thread has let go of it meanwhile
            if nearby is not None and nearby.buffer.stopped:
                return True
        return self.shards.stopped

    def __repr__(self) -> str:
        if self._closed:
            return "ShardedReplay(closed)"
        names = ", ".join("/".join(path) for path in self._config.fields)
        return (
            f"ShardedReplay({self._capacity:,} rows on {len(self.shards.table.places)} of {self._count} nodes, fields: "
            f"{names}, {self.view}, {self.sampler}, {self.shards.table.rule.limiter}"
            f"{', stopped' if self.stopped else ''})"
        )

    def require_open(self) -> None:
        """Raises RuntimeError if this object is closed."""
        if self._closed:
            raise RuntimeError("the ShardedReplay is closed")
