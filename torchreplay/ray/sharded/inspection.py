"""Looking into all shards of a `ShardedReplay`."""

from __future__ import annotations

import torch

from torchreplay.ray.sharded.client import ShardClient
from torchreplay.ray.sharded.histograms import merged_histograms
from torchreplay.ray.sharded.priority_updates import Feedback
from torchreplay.ray.sharded.stats import ShardedStats, summed
from torchreplay.schema.config import Config
from torchreplay.validation import checked_int


class ShardedInspection:
    """What is in all shards.

    Args:
        shards: The shards.
        feedback: What this process feeds back, which is heard of first.
        config: Of the union.
        capacity: Rows that fit into all shards.
        count: How many shards there were at first.
    """

    def __init__(self, shards: ShardClient, feedback: Feedback, config: Config, capacity: int, count: int) -> None:
        self._shards, self._feedback, self._config = shards, feedback, config
        self._capacity, self._count = capacity, count

    def rows(self) -> int:
        """Returns the number of rows held by all shards."""
        self._shards.exchange()
        return sum(figures.rows for figures in self._shards.figures.values())

    def stats(self) -> ShardedStats:
        """Returns what has happened so far: over all shards, and each one's own."""
        self._feedback.apply_arrived()
        self._feedback.hear(0)
        self._shards.exchange()
        places = self._shards.table.places
        told = self._shards.calls.collect({number: place.actor.stats.remote() for number, place in places.items()})
        return summed(told, places, self._shards.look(), self._capacity, self._count, self._shards.limiter)

    def histograms(self, bins: int) -> dict[str, torch.Tensor]:
        """Returns what `ShardedReplay.histograms` does."""
        bins = checked_int("bins", bins, 1, 1 << 20)
        self._feedback.apply_arrived()
        places = self._shards.look().places
        calls = {number: place.actor.histograms.remote(bins) for number, place in places.items()}
        return merged_histograms(list(self._shards.calls.collect(calls).values()), bins)

    def summary(self, stopped: bool) -> str:
        """Returns the replay's text; `stopped` says whether it was."""
        names = ", ".join("/".join(path) for path in self._config.fields)
        table = self._shards.table
        return (
            f"ShardedReplay({self._capacity:,} rows on {len(table.places)} of {self._count} nodes, fields: "
            f"{names}, {self._config.view}, {self._config.sampler}, {table.rule.limiter}"
            f"{', stopped' if stopped else ''})"
        )
