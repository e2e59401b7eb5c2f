"""`ActorClient`: how one process asks an actor of Ray's."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from torchreplay.errors import AttachError
from torchreplay.ray.runtime.cluster import living_nodes, only_on
from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.segment.waits import LOG_EVERY

T = TypeVar("T")

NAMESPACE: Final = "torchreplay"

ASK_AGAIN_SECONDS: Final = 60.0
"""Seconds for which an actor is asked again: Ray may not reach it for a moment, or has it restarted after its death."""

_PAUSE: Final = 0.25


class ActorClient(ABC):
    """An actor as one process asks it.

    The rules:

    - A forked child cannot ask. What it inherits of Ray belongs to its parent.
    - A process that has shut Ray down cannot ask. The call would start another Ray.
    - An exception of the actor's method is raised as if the method had run in this process.
    - After another failure the actor is found anew and asked again, for a minute at most.

    Args:
        what: What the actor gives access to, for messages.
        forked: The error's text in a forked child.
    """

    _group = ""  # of calls that name none

    def __init__(self, what: str, forked: str) -> None:
        self._ray = import_ray()
        self._what, self._forked = what, forked
        self._pid = os.getpid()
        self._actor: Any = None  # as it was found last

    @abstractmethod
    def _find(self) -> Any:
        """Returns the actor; raises what it means that there is none any more."""

    @property
    def connected(self) -> bool:
        """Whether this process has Ray, and has it of its own."""
        return os.getpid() == self._pid and bool(self._ray.is_initialized())

    def require_own_process(self) -> None:
        """Raises RuntimeError in a forked child."""
        if os.getpid() != self._pid:
            raise RuntimeError(self._forked)

    def require_ray(self) -> None:
        """Raises AttachError once Ray was shut down in this process."""
        if not self._ray.is_initialized():
            raise AttachError(f"Ray was shut down in this process: nothing reaches {self._what} from here")

    def forget(self) -> None:
        """Has the next call find the actor anew, after a failure."""
        self._actor = None

    def tell(self, method: str, *args: Any, group: str = "") -> Any:
        """Calls a method of the actor, in the usual concurrency group or another; returns what its answer is got by."""
        self.require_own_process()
        self.require_ray()
        actor = self._actor = self._actor or self._find()
        call, group = getattr(actor, method), group or self._group
        return (call.options(concurrency_group=group) if group else call).remote(*args)

    def answer(self, call: Any) -> Any:
        """Returns what a call returned. Raises one of Ray's errors where no answer comes."""
        try:
            return self._result(call)
        except self._ray.exceptions.RayError:
            self.forget()
            raise

    def ask_once(self, method: str, *args: Any, group: str = "") -> Any:
        """Returns what a method of the actor returns. Raises one of Ray's errors where no answer comes."""
        return self.answer(self.tell(method, *args, group=group))

    def ask(self, method: str, *args: Any, group: str = "") -> Any:
        """Returns what a method of the actor returns, run as `tell` says; asks again where no answer comes.

        Raises:
            AttachError: The actor does not answer for long, or Ray was shut down in this process.
            RuntimeError: This process was forked off one of Ray's.
        """
        return self.again(lambda: self.ask_once(method, *args, group=group))

    def again(self, ask: Callable[[], T]) -> T:
        """Returns what `ask` returns, which calls `ask_once`; calls it again where no answer comes. Raises as `ask`."""
        deadline = time.monotonic() + ASK_AGAIN_SECONDS
        while True:
            try:
                return ask()
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except self._ray.exceptions.RayError as error:
                if time.monotonic() >= deadline:
                    raise AttachError(f"nothing reaches {self._what}: {error}") from None
            time.sleep(_PAUSE)

    def _result(self, call: Any) -> Any:
        """Waits for the answer to a call, and says so now and then."""
        start = time.monotonic()
        future: Future[Any] = call.future()  # an exception out of a signal's handler does not come through Ray's `get`
        while not wait([future], LOG_EVERY).done:
            self.require_ray()  # nobody else would say that no answer comes any more
            logger.warning("waiting for an answer from %s since %.0f s", self._what, time.monotonic() - start)
        return future.result()


class NodeActor(ActorClient):
    """Finds, or starts, an actor on a certain node: one for all jobs and processes of the cluster.

    The actor is nobody's: it goes when it says so, and Ray brings it back when its process dies.
    Once the node is gone, every question raises `AttachError`.

    Args:
        node: Ray's id of the node.
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
