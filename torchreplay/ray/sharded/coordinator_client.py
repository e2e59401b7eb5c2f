"""`CoordinatorClient`: how one process asks the directory of a `ShardedReplay`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchreplay.errors import ReplayLost, Stopped
from torchreplay.ray.runtime.actor_client import NAMESPACE, ActorClient
from torchreplay.ray.sharded.coordinator import Table


class CoordinatorClient(ActorClient):
    """The directory, as one process asks it.

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

    def answer(self, call: Any) -> Any:
        """Returns what a call returned. Raises one of Ray's errors where no answer comes."""
        actor = self._actor
        try:
            return super().answer(call)
        except self._ray.exceptions.ActorUnavailableError:
            self._actor = actor  # nothing is known of its death, and a report must not wait for Ray to find it again
            raise

    def table(self, what: str = "table", *args: Any) -> Table:
        """Returns the table that the directory answers with."""
        table: Table = self.ask(what, *args)
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
