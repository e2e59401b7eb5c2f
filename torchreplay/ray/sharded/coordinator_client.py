"""`CoordinatorClient`: how one process asks the directory of a `ShardedReplay`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from torchreplay.errors import ReplayLost, Stopped
from torchreplay.ray.runtime.actor_client import NAMESPACE, ActorClient
from torchreplay.ray.sharded.coordinator import Table

REFRESH: Final = 1.0
"""Seconds between two looks at the table: shards that came back are drawn from that much later."""


class CoordinatorClient(ActorClient):
    """The directory, as one process asks it. `news` is for one thread at a time.

    Once the directory is gone its shards are, too. Questions then raise `Stopped`, or `ReplayLost` without a stop.

    Args:
        name: Of the directory's actor.
        stopped: Returns whether this process has heard of a stop.

    Raises:
        RuntimeError: This process is not connected to a Ray cluster.
    """

    def __init__(self, name: str, stopped: Callable[[], bool]) -> None:
        super().__init__(
            "the shards of the ShardedReplay",
            "this process was forked off one of Ray's, and cannot ask the shards of a ShardedReplay: pass it to a Ray "
            "task or actor, or where a DataLoader has forked draw with num_workers=0",
        )
        if not self.connected:
            raise RuntimeError(
                "a ShardedReplay needs this process to be connected to its Ray cluster: call ray.init(address=...)"
            )
        self._name, self._stopped = name, stopped
        self._asked: Any = None  # the table, on its way
        self._asked_at = 0.0

    def answer(self, call: Any) -> Any:
        """Returns what a call returned. Raises one of Ray's errors where no answer comes."""
        actor = self._actor
        try:
            return super().answer(call)
        except self._ray.exceptions.ActorUnavailableError:
            self._actor = actor  # nothing is known of its death, and `news` must not wait for Ray to find it again
            raise

    def table(self, what: str = "table", *args: Any) -> Table:
        """Returns the table that the directory answers with."""
        table: Table = self.ask(what, *args)
        return table

    def news(self) -> Table | None:
        """Looks at the table now and then, without waiting for it; returns it when it has come."""
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
            table: Table = self.answer(asked)
        except self._ray.exceptions.RayActorError:  # the next look shows more
            return None
        return table

    def _find(self) -> Any:
        try:
            return self._ray.get_actor(self._name, NAMESPACE)
        except ValueError:
            if self._stopped():
                raise Stopped("the replay buffer was stopped, and then closed") from None
            raise ReplayLost(
                "the ShardedReplay is gone: it was closed, or kept by nobody in the process that made it, or that "
                "process or its directory's (an actor on the same node) has died; the shards, and their rows, went "
                "with it"
            ) from None

    def _result(self, call: Any) -> Any:
        return self._ray.get(call)  # while Ray unpickles a ShardedReplay, the answer comes through nothing else
