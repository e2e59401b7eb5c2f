"""On which node of the Ray cluster a worker is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from torchreplay.ray.runtime.cluster import living_nodes, only_on
from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.ray.sharded.sharded_replay import ShardedReplay, shards_of
from torchreplay.ray.sharded.writing import nodes_to_write_from

LOCAL_FIRST: Final = "LOCAL_FIRST"
NAMES: Final = (LOCAL_FIRST, "SPREAD", "DEFAULT")

Placement: TypeAlias = Any
"""None, one of `NAMES`, a scheduling strategy of Ray's, or a function of a worker's index that returns one of those."""


def strategy_of(placement: Placement, index: int) -> Any:
    """Returns the scheduling strategy for worker `index`, as Ray takes it."""
    if callable(placement):
        placement = placement(index)
    ray = import_ray()
    here = ray.get_runtime_context().get_node_id()
    if placement is None:
        return only_on(here)
    if isinstance(placement, str) and placement == LOCAL_FIRST:
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        return affinity(here, soft=True, _spill_on_unavailable=True)
    return placement


@dataclass(frozen=True)
class OverShards:
    """Places explorers on the nodes that have a shard of each of these buffers, in turn.

    Where there is no such node, they go to those that have a shard of the first buffer. A node has no more turns than
    explorers for whose reservations it is large enough.
    """

    replays: Sequence[ShardedReplay]  # the buffers
    # What Ray reserves for each explorer, such as `{"CPU": 1}`
    reserves: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, index: int) -> Any:
        """Returns the strategy for explorer `index`.

        Raises:
            RuntimeError: There is no such node.
            Stopped: A buffer was closed.
        """
        first, *others = [nodes_to_write_from(shards_of(replay)) for replay in self.replays]
        nodes = [node for node in first if all(node in other for other in others)] or first
        if not nodes:
            raise RuntimeError("no node that is alive has a shard to write to")
        room = self._room(nodes, index + 1)
        turns = [node for turn in range(max(room.values())) for node in nodes if turn < room[node]]
        if not turns:
            raise RuntimeError(f"no node that has a shard has what each explorer reserves, {dict(self.reserves)}")
        if index >= len(turns):
            text = "the nodes that have shards have room for %d explorers that reserve %s: explorer %d may never start"
            logger.warning(text, len(turns), dict(self.reserves), index)
        return only_on(turns[index % len(turns)])

    def _room(self, nodes: Sequence[str], most: int) -> dict[str, int]:
        """Returns how many explorers, up to `most`, fit on each node."""
        reserves = {kind: amount for kind, amount in self.reserves.items() if amount > 0}
        alive = living_nodes() if reserves else {}
        room = dict.fromkeys(nodes, most)
        for node in nodes:
            for kind, amount in reserves.items():
                there = alive.get(node, {}).get(kind, 0.0)
                room[node] = min(room[node], int(there / amount + 1e-6))  # 0.3 / 0.1 is below 3
        return room
