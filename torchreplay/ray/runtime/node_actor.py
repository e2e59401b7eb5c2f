"""The node that a buffer or weights live on, as seen from another node: finding the actor there that serves them."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, wait
from typing import Any, Final

from torchreplay.errors import AttachError
from torchreplay.ray.runtime.cluster import living_nodes, only_on
from torchreplay.ray.runtime.session import import_ray
from torchreplay.segment.waits import LOG_EVERY

logger = logging.getLogger("torchreplay.ray")

NAMESPACE: Final = "torchreplay"

RESTART_SECONDS: Final = 60.0
"""Seconds for which an actor may take to come back after its death. Until it is there Ray refuses calls at once."""

_PAUSE: Final = 0.25


class NodeActor:
    """Finds, or starts, an actor on a certain node: one for all jobs and processes of the cluster.

    The actor is nobody's: it goes when it says so, and Ray brings it back when its process dies.

    Args:
        node: Ray's id of the node.
        kind: The actor's class.
        name: Of this one.
        args: Of its constructor.
        calls: Calls that may run at a time, without those that write rows.
    """

    def __init__(self, node: str, kind: type, name: str, args: tuple[Any, ...], calls: int = 4) -> None:
        self._ray = import_ray()
        self.node = node
        self._args = args
        self._pid = os.getpid()
        self._actor: Any = None  # as it was found last
        self._kind = self._ray.remote(concurrency_groups={"rows": 1, "calls": calls})(kind).options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",  # its starter may be an explorer, and die
            max_restarts=-1,
            num_cpus=0,
            scheduling_strategy=only_on(node),
        )

    def find(self) -> Any:
        """Returns the actor; a new one takes seconds until it answers.

        Raises:
            AttachError: The node is gone, or this process has shut Ray down.
        """
        self._actor = None
        self._require_ray()
        if not self.is_there():
            raise AttachError(f"the node {self.node} is gone, and its memory with it")
        self._actor = self._kind.remote(*self._args)
        return self._actor

    def is_there(self) -> bool:
        """Whether the node is alive, as far as this process knows."""
        return self._ray.is_initialized() and self.node in living_nodes()

    def ask(self, method: str, *args: Any) -> Any:
        """Returns what a method of the actor returns; starts the actor over, or waits for it, when it is not there.

        Raises:
            AttachError: The node is gone, or what the actor serves; or Ray was shut down in this process.
            RuntimeError: This process was forked off one of Ray's.
        """
        self.require_own_process()
        deadline = time.monotonic() + RESTART_SECONDS
        while True:
            self._require_ray()
            try:
                actor = self._actor or self.find()
                return self._answer(getattr(actor, method).options(concurrency_group="calls").remote(*args))
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except self._ray.exceptions.RayError as error:
                self._actor = None
                if time.monotonic() >= deadline:
                    raise AttachError(f"the actor on node {self.node} does not come up: {error}") from None
            time.sleep(_PAUSE)

    def _require_ray(self) -> None:
        if not self._ray.is_initialized():  # or the next call would start another one
            raise AttachError(f"Ray was shut down in this process: nothing reaches the node {self.node} from here")

    def require_own_process(self) -> None:
        """Raises RuntimeError in a forked child: what it inherits of Ray belongs to its parent."""
        if os.getpid() != self._pid:
            raise RuntimeError("what is on another node does not survive a fork: pass it to a Ray task or actor")

    def _answer(self, call: Any) -> Any:
        """Waits for the answer to a call, and says so now and then."""
        start = time.monotonic()
        future: Future[Any] = call.future()  # an exception out of a signal's handler does not come through Ray's `get`
        while not wait([future], LOG_EVERY).done:
            self._require_ray()  # nobody else would say that no answer comes any more
            waited = time.monotonic() - start
            logger.warning("waiting for an answer from the node %s since %.0f s", self.node, waited)
        return future.result()
