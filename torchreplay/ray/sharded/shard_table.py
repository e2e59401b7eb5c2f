"""Which shards there are, and on which node each is. The coordinator keeps this table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torchreplay.ray.sharded.rate_limiter import Rule
from torchreplay.segment.handle import Handle


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A shard that can be called."""

    number: int  # of the shard
    node: str  # Ray's id of its node
    capacity: int  # rows that it holds
    actor: Any  # its handle
    handle: Handle  # what processes of its node attach


@dataclass(frozen=True, slots=True)
class LostShard:
    """What went with a shard, as it was last heard of."""

    number: int  # of the shard
    node: str  # Ray's id of its node
    rows: int  # rows that it held
    inserted: int  # items that had ever become drawable in it


@dataclass(frozen=True, slots=True)
class ShardTable:
    """What is where."""

    entries: dict[int, ShardEntry]  # the shards that can be called, by number
    rule: Rule  # the limiter, and from where it counts
    nodes: tuple[str, ...] = ()  # where shards are, are being made, or will be tried again; always in the same order
    lost: tuple[LostShard, ...] = ()  # shards that are gone
    lost_updates: int = 0  # TD errors dropped because their shard is gone
    expected: bool = False  # whether someone says that writers will come
    stopped: bool = False  # whether the buffer was stopped
    moment: int = 0  # which of the tables it is; later ones have more

    @property
    def memories(self) -> dict[int, int]:
        """What names the memory of each shard, by number."""
        return {number: entry.handle.nonce for number, entry in self.entries.items()}

    def without(self, lost: LostShard) -> ShardTable:
        """Returns the same without a shard that is gone, until any other table is heard of."""
        entries = {number: entry for number, entry in self.entries.items() if number != lost.number}
        return replace(self, entries=entries, lost=(*self.lost, lost), moment=self.moment - 1)
