"""The node that a buffer or weights live on, as seen from another node: finding the actor there that serves them."""

from __future__ import annotations

from typing import Any, Final

from torchreplay.errors import AttachError
from torchreplay.ray.session import import_ray

NAMESPACE: Final = "torchreplay"
_ATTEMPTS: Final = 20


class Home:
    """Finds, or starts, an actor on a certain node: one for all jobs and processes of the cluster.

    The actor is nobody's: it goes when it says so, and Ray brings it back when its process dies.

    Args:
        node: Ray's id of the node.
        kind: The actor's class.
        name: Of this one.
        args: Of its constructor.
        calls: Of its methods that may be under way at a time, but for those that write rows.
    """

    def __init__(self, node: str, kind: type, name: str, args: tuple[Any, ...], calls: int = 4) -> None:
        self._ray = import_ray()
        self.node = node
        self._args = args
        self._actor = self._ray.remote(concurrency_groups={"rows": 1, "calls": calls})(kind).options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",  # whoever starts it may be an explorer, and die
            max_restarts=-1,
            num_cpus=0,
            scheduling_strategy=self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False),
        )

    def find(self) -> Any:
        """Returns the actor; a new one takes seconds until it answers.

        Raises:
            AttachError: The node is gone.
        """
        if not self.is_there():
            raise AttachError(f"the node {self.node} is gone, and its memory with it")
        return self._actor.remote(*self._args)

    def is_there(self) -> bool:
        """Whether the node is alive."""
        return any(node["NodeID"] == self.node and node["Alive"] for node in self._ray.nodes())

    def ask(self, method: str, *args: Any) -> Any:
        """Returns what a method of the actor returns; starts the actor over when it is not there.

        Raises:
            AttachError: The node is gone, or what the actor serves.
        """
        for attempt in range(_ATTEMPTS):
            try:
                call = getattr(self.find(), method).options(concurrency_group="calls").remote(*args)
                return self._ray.get(call)
            except self._ray.exceptions.RayActorError as error:
                if attempt == _ATTEMPTS - 1:
                    raise AttachError(f"the actor on node {self.node} does not come up: {error}") from None
        raise AssertionError
