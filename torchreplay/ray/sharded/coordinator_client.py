"""The coordinator of a `ShardedReplay` as processes see it: made, asked, and ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torchreplay.errors import ReplayLost, Stopped
from torchreplay.ray.runtime.actor_client import NAMESPACE, ActorClient
from torchreplay.ray.runtime.cluster import errors_as_raised, living_nodes, only_on, reason
from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.ray.sharded.coordinator import Coordinator
from torchreplay.ray.sharded.shard_table import ShardTable
from torchreplay.schema.config import MAX_CAPACITY, Config
from torchreplay.segment.waits import LOG_EVERY
from torchreplay.validation import checked_int


class CoordinatorClient(ActorClient):
    """The coordinator, as one process asks it.

    Once the coordinator is gone its shards are, too. Questions then raise `Stopped`, or `ReplayLost` without a stop.

    Args:
        name: Of the coordinator's actor.
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

    def table(self, what: str = "table", *args: Any) -> ShardTable:
        """Returns the table that the coordinator answers with."""
        table: ShardTable = self.ask(what, *args)
        return table

    @property
    def named(self) -> str:
        """What messages call it."""
        return f"the coordinator of the ShardedReplay (Ray's actor {self._name})"

    def _find(self) -> Any:
        try:
            return self._ray.get_actor(self._name, NAMESPACE)
        except ValueError:
            if self._stopped():
                raise Stopped("the replay buffer was stopped, and then closed") from None
            raise ReplayLost(
                "the ShardedReplay is gone: it was closed, or kept by nobody in the process that made it, or that "
                "process or its coordinator's (an actor on the same node) has died; the shards, and their rows, went "
                "with it"
            ) from None

    def _result(self, call: Any) -> Any:
        start = time.monotonic()
        while True:
            try:  # while Ray unpickles a ShardedReplay, the answer comes through nothing else
                return self._ray.get(call, timeout=LOG_EVERY)
            except self._ray.exceptions.GetTimeoutError:
                self.require_ray()  # nobody else would say that no answer comes any more
                logger.warning(
                    "waiting for an answer from %s since %.0f s: is its process stopped?",
                    self.named,
                    time.monotonic() - start,
                )


def checked_nodes(nodes: Any) -> list[str]:
    """Returns the nodes that get a shard, this process's own first where none are given; raises as `ShardedReplay`."""
    ray = import_ray()
    if not ray.is_initialized():
        raise RuntimeError("a ShardedReplay lies on the nodes of a Ray cluster: call ray.init(...) first")
    alive = list(living_nodes())
    if nodes is None:
        here = ray.get_runtime_context().get_node_id()
        return sorted(alive, key=lambda node: (node != here, node))
    given = list(nodes) if isinstance(nodes, Sequence) else []
    names = {node for node in given if isinstance(node, str)}
    if not given or len(names) < len(given) or not names <= set(alive):
        raise ValueError(f"nodes is {nodes!r}: expected different ones of the nodes that are alive, {alive}")
    return given


def coordinator_name(nonce: int) -> str:
    """Returns the name of the coordinator's actor."""
    return f"replay-{nonce:016x}"


def checked_capacity(capacity: Any, nodes: int) -> int:
    """Returns the capacity of a union of so many shards; ValueError where that is too few or too many rows."""
    return checked_int("capacity", capacity, nodes, MAX_CAPACITY * nodes)


def make_coordinator(
    nonce: int, config: Config, capacities: list[int], nodes: list[str], anywhere: bool, seed: int
) -> Any:
    """Makes the shards, and returns the actor that they end with; arguments as of `Coordinator`.

    Raises:
        MemoryError, RuntimeError: As `Coordinator.open` does, or this actor cannot be made.
    """
    ray = import_ray()
    here = ray.get_runtime_context().get_node_id()
    actor = ray.remote(Coordinator).options(
        name=coordinator_name(nonce),
        namespace=NAMESPACE,
        num_cpus=0,
        max_restarts=0,
        scheduling_strategy=only_on(here),
    )
    owned = actor.remote(config, capacities, nodes, anywhere, seed)
    try:
        with errors_as_raised():
            ray.get(owned.open.remote())
    except BaseException as error:
        end(owned)
        if isinstance(error, ray.exceptions.RayError):
            text = f"the coordinator of the ShardedReplay cannot be made on this node, {here}: {reason(error)}"
            raise RuntimeError(text) from None
        raise
    return owned


def end(owned: Any) -> None:
    """Ends the shards."""
    with suppress(Exception):  # Ray may be shut down already, and everything with it
        import_ray().kill(owned, no_restart=True)  # the shards are its own, and go with it
