"""Making the shards of a `ShardedReplay`, and ending them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torchreplay.ray.runtime.cluster import errors_as_raised, living_nodes, only_on
from torchreplay.ray.runtime.session import import_ray
from torchreplay.ray.sharded.coordinator import NAMESPACE, Coordinator
from torchreplay.schema.config import Config


def connected() -> Any:
    """Returns Ray.

    Raises:
        RuntimeError: This process is not connected to a cluster.
    """
    ray = import_ray()
    if not ray.is_initialized():
        raise RuntimeError("a ShardedReplay lies on the nodes of a Ray cluster: call ray.init(...) first")
    return ray


def checked_nodes(nodes: Any) -> list[str]:
    """Returns the nodes that get a shard, this process's own first where none are given.

    Raises:
        ValueError: They are not different nodes that are alive.
    """
    ray = connected()
    alive = list(living_nodes())
    if nodes is None:
        here = ray.get_runtime_context().get_node_id()
        return sorted(alive, key=lambda node: (node != here, node))
    given = list(nodes) if isinstance(nodes, Sequence) else []
    names = {node for node in given if isinstance(node, str)}
    if not given or len(names) < len(given) or not names <= set(alive):
        raise ValueError(f"nodes is {nodes!r}: expected different ones of the nodes that are alive, {alive}")
    return given


def directory_name(nonce: int) -> str:
    """Returns the name of the directory's actor."""
    return f"replay-{nonce:016x}"


def found(nonce: int, config: Config, capacity: int, nodes: list[str], anywhere: bool, seed: int) -> Any:
    """Makes the shards, and returns the actor that they end with.

    Args:
        nonce: Names the union.
        config: Its arguments, but for the capacity.
        capacity: Rows in all.
        nodes: Ray's ids of the nodes, one for each shard.
        anywhere: Whether a node that comes later may take the place of one that is gone.
        seed: Of all draws.

    Raises:
        MemoryError: A node has too little memory left for its shard.
    """
    ray = connected()
    whole, rest = divmod(capacity, len(nodes))
    here = ray.get_runtime_context().get_node_id()
    directory = ray.remote(Coordinator).options(
        name=directory_name(nonce),
        namespace=NAMESPACE,
        num_cpus=0,
        max_restarts=0,
        scheduling_strategy=only_on(here),
    )
    capacities = [whole + (place < rest) for place in range(len(nodes))]
    owned = directory.remote(config, capacities, nodes, anywhere, seed)
    try:
        with errors_as_raised():
            ray.get(owned.open.remote())
    except BaseException:
        end(owned)
        raise
    return owned


def end(owned: Any) -> None:
    """Ends the shards."""
    with suppress(Exception):  # Ray may be shut down already, and everything with it
        import_ray().kill(owned, no_restart=True)  # the shards are its own, and go with it
