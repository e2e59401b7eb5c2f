"""Which shards there are, and on which node each is. The coordinator keeps this table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torchreplay.ray.sharded.rate_limiter import Rule
from torchreplay.segment.handle import Handle


@dataclass(frozen=True, slots=True)
class Place:
    """A shard that can be called."""

    number: int  # of the shard
    node: str  # Ray's id of its node
    capacity: int  # rows that it holds
    actor: Any  # its handle
    handle: Handle  # what processes of its node attach


@dataclass(frozen=True, slots=True)
class Lost:
    """What went with a shard, as it was last heard of."""

    number: int  # of the shard
    node: str  # Ray's id of its node
    rows: int  # rows that it held
    inserted: int  # items that had ever become drawable in it


@dataclass(frozen=True, slots=True)
class Table:
    """What is where."""

    places: dict[int, Place]  # the shards that can be called, by number
    rule: Rule  # the limiter, and from where it counts
    nodes: tuple[str, ...] = ()  # where shards are, are being made, or will be tried again; always in the same order
    lost: tuple[Lost, ...] = ()  # shards that are gone
    lost_updates: int = 0  # TD errors dropped because their shard is gone
    expected: bool = False  # whether someone says that writers will come
    stopped: bool = False  # whether the buffer was stopped
    moment: int = 0  # which of the tables it is; later ones have more

    def without(self, lost: Lost) -> Table:
        """Returns the same without a shard that is gone."""
        places = {number: place for number, place in self.places.items() if number != lost.number}
        return replace(self, places=places, lost=(*self.lost, lost))

    @property
    def starting(self) -> tuple[str, ...]:
        """Nodes that have no shard yet, and are to get one."""
        there = {place.node for place in self.places.values()}
        return tuple(node for node in self.nodes if node not in there)
