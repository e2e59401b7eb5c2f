"""The nodes of the Ray cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchreplay.ray.runtime.session import import_ray


def living_nodes() -> dict[str, Mapping[str, float]]:
    """Returns what each node has in all, such as `{"CPU": 8.0}`, by Ray's ids of the nodes that are alive."""
    return {node["NodeID"]: node["Resources"] for node in import_ray().nodes() if node["Alive"]}


def only_on(node: str) -> Any:
    """Returns the scheduling strategy that puts an actor on this node, or nowhere."""
    return import_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)


@contextmanager
def errors_as_raised() -> Iterator[None]:
    """Raises what an actor's method has raised as if it had been called in this process."""
    try:
        yield
    except import_ray().exceptions.RayTaskError as error:
        raise error.cause from None
