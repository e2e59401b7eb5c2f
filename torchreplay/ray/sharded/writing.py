"""Which shard a process writes to, and saying that someone will write."""

from __future__ import annotations

import os
import secrets
import threading
import time
from typing import Final

from torchreplay.errors import AttachError, Stopped
from torchreplay.ray.runtime.cluster import living_nodes
from torchreplay.ray.runtime.session import import_ray
from torchreplay.ray.sharded.coordinator import REPEAT
from torchreplay.ray.sharded.coordinator_client import CoordinatorClient
from torchreplay.ray.sharded.local_shard import ShardBuffer
from torchreplay.ray.sharded.remote_shard import RemoteShard
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.segment.closeable import Closeable

REMAKE_SECONDS: Final = 60.0
"""Seconds for which a writer waits for a shard to be made anew."""

_POLL: Final = 0.1


def buffer_to_write_to(shards: ShardClient) -> ShardBuffer | RemoteShard:
    """Returns the buffer of the shard on this node, or of another node's where this one has none.

    It waits for a shard that is being made anew. A process that writes to another node's shard keeps to that one for as
    long as it is there. Raises as `ShardedReplay.writer` does, and AttachError where it cannot be attached.
    """
    local, remote = shards.local.shard, shards.remote.shard
    if local is not None and local.alive:
        return local.buffer
    if remote is not None and remote.ending is None:
        return remote
    if local is not None:
        shards.look()  # of one that was restored since it was attached, the number is another shard's now
        if shards.local.shard is local:
            shards.lose(local.number, "its process is gone")
    buffer = _attached(shards)
    if buffer is None:
        with Expectation(shards.coordinator):  # or learners would give up on the writers that wait here
            buffer = _waited_for(shards)
    return buffer


def _waited_for(shards: ShardClient) -> ShardBuffer | RemoteShard:
    deadline = time.monotonic() + REMAKE_SECONDS
    while (buffer := _attached(shards)) is None:
        if time.monotonic() >= deadline:
            raise RuntimeError(
                f"the shard of node {shards.node} was lost, and could not be made anew for {REMAKE_SECONDS:.0f} s. "
                "It is tried again: call writer() later. The log of torchreplay.ray says what it lacks, such as memory"
            )
        time.sleep(_POLL)
    return buffer


def _attached(shards: ShardClient) -> ShardBuffer | RemoteShard | None:
    """Returns the buffer to write to; None while a shard is to be made anew."""
    table = shards.look()
    if table.stopped:
        raise Stopped(f"{shards.called} was stopped")
    if not shards.node:
        raise RuntimeError(
            "this process, a Ray Client, is on no node of the cluster, and rows come from its nodes. Have a task or an "
            "actor write, or run this program on a node"
        )
    if shards.node in table.nodes:
        local = shards.local.attach()
        return None if local is None else local.buffer
    if not table.nodes:
        raise RuntimeError("no node of the ShardedReplay is alive: make another one, or load one that was saved")
    return shards.remote.attach()


def nodes_to_write_from(shards: ShardClient) -> list[str]:
    """Returns Ray's ids of the nodes on which there is a shard, or will be one, in an order that stays."""
    alive = living_nodes()
    # `look` takes a lock, which the thread that supervises explorers must not wait for: see `WorkerPool.stop`.
    return [node for node in shards.coordinator.ask("table").nodes if node in alive]


class Expectation(Closeable):
    """The announcement of `ShardedReplay.expect_writers()`: it holds until closed, or until its process is gone.

    The coordinator believes it for a while; a thread repeats it in time.
    """

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator
        self._pid = os.getpid()
        self._token = secrets.token_hex(8)
        self._closed = threading.Event()
        self._speaking = threading.RLock()  # a repetition must not come after the end
        coordinator.ask("expect", self._token, True)
        threading.Thread(target=self._repeat, name="torchreplay-expectation", daemon=True).start()

    def close(self) -> None:
        """No more writers will come. Idempotent."""
        if os.getpid() != self._pid or self._closed.is_set():  # a forked child's copy is its parent's affair
            return
        self._closed.set()
        with self._speaking:
            self._say(False)

    def _repeat(self) -> None:
        heard = True
        while heard and not self._closed.wait(REPEAT):
            with self._speaking:
                heard = not self._closed.is_set() and self._say(True)

    def _say(self, expecting: bool) -> bool:
        """Returns whether the coordinator is still there."""
        if not self._coordinator.connected:  # or the call would start another Ray
            return False
        try:
            self._coordinator.ask_once("expect", self._token, expecting)
        except import_ray().exceptions.ActorUnavailableError:  # the next report may arrive
            return True
        except (AttachError, Stopped, import_ray().exceptions.RayError):  # Ray was shut down meanwhile, or it is gone
            return False
        return True
