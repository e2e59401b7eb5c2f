"""What `ShardedReplay.stats()` and `histograms()` report: the sums over all shards, and each one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from torchreplay.buffer.inspection import histograms
from torchreplay.buffer.stats import Stats
from torchreplay.ray.sharded.rate_limiter import LearnerLimiter
from torchreplay.ray.sharded.shard_keys import KEY_BITS
from torchreplay.ray.sharded.shard_sampler import ShardReport
from torchreplay.ray.sharded.shard_table import ShardTable
from torchreplay.schema.samplers import Uniform

SUMS: tuple[str, ...] = ("size", "nbytes", "drawable", "updated", "stale_updates", "unready_updates", "redraws")
SUMS += ("evicted_unsampled", "priority_total", "writers", "rows_written", "dropped_rows", "insert_wait")
SUMS += ("held_items", "dropped_items", "expired_items", "ragged_bytes", "evicted_by_pages")
SUMS += ("admitted_items", "admission_limit", "open_admissions")  # 0: a shard has no admission


@dataclass(frozen=True)
class ShardStats:
    """One shard.

    Attributes:
        number: Of the shard: the high bits of its keys.
        node: Ray's id of its node.
        stats: Of its buffer. It counts all candidates as sampled, also those that no batch took, and the calls for them
            as draws. The waits of learners are those for rows of any shard.
    """

    number: int
    node: str
    stats: Stats

    @property
    def first_key(self) -> int:
        """The key of the first row that was written to it."""
        return self.number << KEY_BITS

    @property
    def last_key(self) -> int:
        """The largest key that it can give."""
        return self.first_key + (1 << KEY_BITS) - 1


@dataclass(frozen=True)
class ShardedStats(Stats):
    """The figures of `Stats`, summed over the shards that there are, and those of each.

    `inserted` counts the items of lost shards too; `sampled`, `draws` and `learners` are what learners have handed out
    and how many of them have; `priority_min` and `priority_max` are those of all shards. `sample_wait` and
    `sample_wait_share` are what learners have reported; a batch under way between nodes is no wait for
    rows. `staleness` is not measured: it is 0.

    Attributes:
        shards: Each shard that there is, by number.
        shards_missing: Shards that are lost and have not come back.
        rows_lost: Rows that went with lost shards.
        lost_updates: TD errors dropped because their shard is gone.
        round_trips: How often this object has asked shards of other nodes, all at once, for each batch that it drew. 0:
            there is none on another node. Well above 1: shards grow so unevenly that some are asked again.
        wire_bytes: Bytes that it has exchanged with them over its TCP connections, for each batch. 0 with round trips:
            they are called through Ray, which is slower, and the log says why.
    """

    shards: tuple[ShardStats, ...]
    shards_missing: int
    rows_lost: int
    lost_updates: int
    round_trips: float
    wire_bytes: float

    def as_dict(self) -> dict[str, int | float | bool]:
        """Returns the fields by name, without `shards`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "shards"}


def summed(
    figures: Mapping[int, ShardReport],
    table: ShardTable,
    capacity: int,
    count: int,
    limiter: LearnerLimiter,
    asked: tuple[int, int, int],
) -> ShardedStats:
    """Returns the statistics of the union, of `count` shards, which hold `capacity` rows together.

    `asked` says of this process its batches, in how many rounds other nodes were asked, and what crossed for them.
    """
    batches, rounds, crossed = asked
    waited, share = limiter.others.waited, limiter.others.wait_share  # all learners', for rows of any shard
    there = {n: told.stats for n, told in figures.items() if n in table.entries}
    told = {n: replace(stats, sample_wait=waited, sample_wait_share=share) for n, stats in there.items()}
    each = list(told.values())
    values: dict[str, Any] = {name: sum(getattr(stats, name) for stats in each) for name in SUMS}
    smallest = [stats.priority_min for stats in each if stats.drawable]
    ages = [stats.last_write_age for stats in each if stats.last_write_age >= 0]
    return ShardedStats(
        **values,
        capacity=capacity,
        inserted=limiter.inserted,
        sampled=limiter.drawn,
        draws=limiter.steps,
        learners=limiter.learners,
        staleness=0.0,
        ragged_fill=sum(stats.ragged_fill * stats.ragged_bytes for stats in each) / max(1, values["ragged_bytes"]),
        insert_wait_share=sum(stats.insert_wait_share * stats.writers for stats in each) / max(1, values["writers"]),
        sample_wait=waited,
        sample_wait_share=share,
        priority_change=sum(stats.priority_change * stats.updated for stats in each) / max(1, values["updated"]),
        samples_per_insert=limiter.drawn / max(1, limiter.inserted),
        priority_min=min(smallest, default=0.0),
        priority_max=max((stats.priority_max for stats in each), default=1.0),
        last_write_age=min(ages, default=-1.0),
        oldest_age=-1.0,
        policy_version=0,
        age_mean=0.0,
        age_max=0,
        stopped=table.stopped or any(stats.stopped for stats in each),
        shards=tuple(ShardStats(number, table.entries[number].node, told[number]) for number in sorted(told)),
        shards_missing=count - len(told),
        rows_lost=sum(lost.rows for lost in table.lost),
        lost_updates=table.lost_updates,
        round_trips=rounds / max(1, batches),
        wire_bytes=crossed / max(1, batches),
    )


def merged_histograms(each: Sequence[dict[str, torch.Tensor]], bins: int) -> dict[str, torch.Tensor]:
    """Returns histograms as `ReplayBuffer.histograms` does, over the range that all of `each` span together."""
    if not each:
        leaves, ages = (torch.empty(0, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.int64))
        return histograms(leaves, ages, 0, bins, Uniform())
    merged = {}
    for name, logarithmic in (("priority", True), ("age", False)):
        counts = [h[name] for h in each]
        edges = [h[f"{name}_edges"].log10() if logarithmic else h[f"{name}_edges"] for h in each]
        filled = [edge for edge, count in zip(edges, counts, strict=True) if count.sum()] or edges
        low, high = float(min(edge[0] for edge in filled)), float(max(edge[-1] for edge in filled))
        common = torch.linspace(low, high, bins + 1, dtype=torch.float64, device="cpu")
        total = torch.zeros(bins, dtype=torch.int64, device="cpu")
        for edge, count in zip(edges, counts, strict=True):
            middle = (edge[1:] + edge[:-1]) / 2
            total.index_add_(0, torch.bucketize(middle, common[1:-1]).clamp(max=bins - 1), count)
        merged[name], merged[f"{name}_edges"] = total, 10.0**common if logarithmic else common
    return merged
