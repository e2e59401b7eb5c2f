"""On which node of a Ray cluster a process is. Shared memory ends at the node, also where nodes share a machine.

A process that has not imported Ray is on no node: nothing here imports it to find out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

Given = ParamSpec("Given")
Attached = TypeVar("Attached")


def ray_node() -> str:
    """Returns Ray's id of the node that this process belongs to; "" where Ray is not running."""
    ray = _running_ray()
    return "" if ray is None else str(ray.get_runtime_context().get_node_id())


def is_elsewhere(node: str) -> bool:
    """Whether `node`, as `ray_node` gave it to another process, is another node of the cluster that this one is in.

    A node of some other cluster is not: then the machines' boot ids decide whether memory can be shared.
    """
    here = ray_node()
    if not node or not here or node == here:
        return False
    ray = _running_ray()
    return ray is not None and any(known["NodeID"] == node for known in ray.nodes())


class RemoteKind(Generic[Given, Attached]):
    """How one kind of handle is attached on another node. The package says how, whose rooms above know it."""

    attach: Callable[Given, Attached]


def _running_ray() -> Any:
    ray = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)  # of a module that is just being imported there is none
    if is_initialized is None or not is_initialized():
        return None
    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        return None  # a program that reaches a cluster from outside belongs to no node
    return ray
