"""The node that a buffer or weights live on, as seen from another node: finding the actor there that serves them."""

from __future__ import annotations

from typing import Any

from torchreplay.errors import AttachError
from torchreplay.ray.runtime.actor_client import NAMESPACE, ActorClient
from torchreplay.ray.runtime.cluster import living_nodes, only_on


class NodeActor(ActorClient):
    """Finds, or starts, an actor on a certain node: one for all jobs and processes of the cluster.

    The actor is nobody's: it goes when it says so, and Ray brings it back when its process dies.
    Once the node is gone, every question raises `AttachError`.

    Args:
        node: Ray's id of the node.
        kind: The actor's class.
        name: Of this one.
        args: Of its constructor.
        calls: Calls that run at a time. Those of the group "rows" run beside them, one by one, in each caller's order.
    """

    _group = "calls"

    def __init__(self, node: str, kind: type, name: str, args: tuple[Any, ...], calls: int = 4) -> None:
        forked = "what is on another node does not survive a fork: pass it to a Ray task or actor"
        super().__init__(f"the node {node}", forked)
        self.node = node
        self._args = args
        self._kind = self._ray.remote(concurrency_groups={"rows": 1, "calls": calls})(kind).options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",  # its starter may be an explorer, and die
            max_restarts=-1,
            num_cpus=0,
            scheduling_strategy=only_on(node),
        )

    def is_there(self) -> bool:
        """Whether the node is alive, as far as this process knows."""
        return self._ray.is_initialized() and self.node in living_nodes()

    def _find(self) -> Any:
        if not self.is_there():
            raise AttachError(f"{self._what} is gone, and its memory with it")
        return self._kind.remote(*self._args)  # a new one takes seconds until it answers
