"""On which node of the Ray cluster a worker is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from torchreplay.ray.node_shard import nodes_to_write_from
from torchreplay.ray.session import import_ray

if TYPE_CHECKING:
    from torchreplay.ray.sharded import ShardedReplay

LOCAL_FIRST: Final = "LOCAL_FIRST"
NAMES: Final = (LOCAL_FIRST, "SPREAD", "DEFAULT")

Placement: TypeAlias = Any
"""None, one of `NAMES`, a scheduling strategy of Ray's, or a function of a worker's index that returns one of those."""


def strategy_of(placement: Placement, index: int) -> Any:
    """Returns the scheduling strategy for worker `index`, as Ray takes it."""
    if callable(placement):
        placement = placement(index)
    ray = import_ray()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    here = ray.get_runtime_context().get_node_id()
    if placement is None:
        return affinity(here, soft=False)
    if isinstance(placement, str) and placement == LOCAL_FIRST:
        return affinity(here, soft=True, _spill_on_unavailable=True)
    return placement


@dataclass(frozen=True)
class OverShards:
    """Places explorers on the nodes that have a shard of each of these buffers, in turn.

    Attributes:
        replays: The buffers.
    """

    replays: Sequence[ShardedReplay]

    def __call__(self, index: int) -> Any:
        """Returns the strategy for explorer `index`.

        Raises:
            RuntimeError: There is no such node.
            Stopped: A buffer was closed.
        """
        first, *others = [nodes_to_write_from(replay.shards) for replay in self.replays]
        nodes = [node for node in first if all(node in other for other in others)]
        if not nodes:
            raise RuntimeError("no node that is alive has a shard to write to")
        affinity = import_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy
        return affinity(nodes[index % len(nodes)], soft=False)
