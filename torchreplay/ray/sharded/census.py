"""Who takes part in a `ShardedReplay`, in the terms of a buffer's own census."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torchreplay.ray.sharded.messages import ShardReport

if TYPE_CHECKING:
    from torchreplay._C import Census


def union_census(told: Collection[ShardReport], learners: int, expected: bool, own_writers: int) -> Census:
    """Returns who takes part.

    Args:
        told: What each shard said last.
        learners: How many have drawn.
        expected: Whether writers are going to come.
        own_writers: Those of the asking thread, who does not write while it asks.
    """
    writers = sum(figures.writers for figures in told)
    departures = [figures.since_departure for figures in told if figures.since_departure >= 0]
    writes = [figures.since_write for figures in told if figures.since_write >= 0]
    return {
        "writers": writers,
        "learners": learners,
        "owners": len(told),
        "others_writing": max(0, writers - own_writers),  # which may have come since they reported
        "others_learning": learners,
        "waiting": 0,
        "supervisors": int(expected),
        "shared": True,
        "since_departure": min(departures, default=-1.0),
        "since_write": min(writes, default=-1.0),
    }
