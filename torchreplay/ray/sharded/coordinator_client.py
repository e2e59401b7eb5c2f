"""`CoordinatorClient`: how one process asks the directory of a `ShardedReplay`."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from torchreplay.errors import ReplayLost, Stopped
from torchreplay.ray.runtime.session import import_ray
from torchreplay.ray.sharded.coordinator import NAMESPACE, Table, was_stopped

REFRESH: Final = 1.0
"""Seconds between two looks at the table: shards that came back are drawn from that much later."""

COORDINATOR_SECONDS: Final = 60.0
"""Seconds for which the directory is asked again while Ray cannot reach it and does not know that it is gone."""

_PAUSE: Final = 0.25


class CoordinatorClient:
    """The directory, as one process asks it. `news` is for one thread at a time.

    Args:
        name: Of the directory's actor.

    Raises:
        RuntimeError: This process is not connected to a Ray cluster.
        Stopped: There is no such actor any more.
    """

    def __init__(self, name: str) -> None:
        self._ray, self._name = import_ray(), name
        if not self._ray.is_initialized():
            raise RuntimeError(
                "a ShardedReplay needs this process to be connected to its Ray cluster: call ray.init(address=...)"
            )
        try:
            self._directory = self._ray.get_actor(name, NAMESPACE)
        except ValueError:
            raise Stopped(
                "the ShardedReplay is closed, or the object or process that made it is gone, and its shards too"
            ) from None
        self._pid = os.getpid()
        self._asked: Any = None  # the table, on its way
        self._asked_at = 0.0

    @property
    def connected(self) -> bool:
        """Whether this process is still connected to the cluster."""
        return os.getpid() == self._pid and bool(self._ray.is_initialized())

    def require_own_process(self) -> None:
        """Raises RuntimeError in a forked child: what it inherits of Ray belongs to its parent."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this process was forked off one of Ray's, and cannot ask the shards of a ShardedReplay: pass it to a "
                "Ray task or actor, or where a DataLoader has forked draw with num_workers=0"
            )

    def ask(self, what: str, *args: Any) -> Any:
        """Returns the directory's answer; asks again where Ray cannot reach it for a moment.

        Raises:
            RayActorError: Ray cannot reach it for long.
            Stopped: It is gone after a stop, and so are the shards; `ReplayLost`: without one.
        """
        deadline = time.monotonic() + COORDINATOR_SECONDS
        while True:
            try:
                return self.ask_once(what, *args)
            except self._ray.exceptions.ActorUnavailableError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_PAUSE)

    def ask_once(self, what: str, *args: Any) -> Any:
        """Returns the directory's answer.

        Raises:
            ActorUnavailableError: Ray cannot reach it now.
            Stopped: It is gone after a stop, and so are the shards; `ReplayLost`: without one.
        """
        return self._heard(self.tell(what, *args))

    def tell(self, what: str, *args: Any) -> Any:
        """Calls the directory, and returns what its answer will be got by."""
        self.require_own_process()
        return getattr(self._directory, what).remote(*args)

    def table(self, what: str = "table", *args: Any) -> Table:
        """Returns the table that the directory answers with.

        Raises:
            Stopped: The directory is gone after a stop, and so are the shards; `ReplayLost`: without one.
        """
        table: Table = self.ask(what, *args)
        return table

    def news(self) -> Table | None:
        """Looks at the table now and then, without waiting for it; returns it when it has come.

        Raises:
            Stopped: The directory is gone after a stop, and so are the shards; `ReplayLost`: without one.
        """
        now = time.monotonic()
        if self._asked is None:
            if now - self._asked_at >= REFRESH:
                self._asked, self._asked_at = self.tell("table"), now
            return None
        asked = self._asked
        if not self._ray.wait([asked], timeout=0)[0]:
            return None
        if self._asked is not asked:  # a signal handler has taken it meanwhile
            return None
        self._asked = None
        try:
            table: Table = self._heard(asked)
        except self._ray.exceptions.ActorUnavailableError:  # the next look may show more
            return None
        return table

    def _heard(self, call: Any) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.ActorUnavailableError:
            raise
        except self._ray.exceptions.RayActorError:
            if was_stopped(self._name):
                raise Stopped("the replay buffer was stopped, and then closed") from None
            raise ReplayLost(
                "the ShardedReplay is gone: it was closed, or kept by nobody in the process that made it, or that "
                "process or its directory's (an actor on the same node) has died; the shards, and their rows, went "
                "with it"
            ) from None
