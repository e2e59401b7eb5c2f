"""Writing to the shard of the node one is on, and saying that someone will."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from torchreplay.errors import Stopped
from torchreplay.ray.members import Shards
from torchreplay.ray.nearby import ShardBuffer

if TYPE_CHECKING:
    from types import TracebackType

PATIENCE: Final = 60.0
"""Seconds for which a writer waits for its node's shard to be made anew."""

_POLL: Final = 0.1


def buffer_to_write_to(shards: Shards) -> ShardBuffer:
    """Returns the buffer of the shard on this node; waits for one that is being made anew.

    Raises:
        AttachError: It cannot be attached.
        RuntimeError: This node has no shard.
        Stopped: The buffer was stopped.
    """
    nearby = shards.nearby
    if nearby is not None and not nearby.alive:
        shards.lose(nearby.number, "its process is gone")
    elif nearby is not None:
        return nearby.buffer
    deadline = time.monotonic() + PATIENCE
    while True:
        table = shards.look()
        if table.stopped:
            raise Stopped("the replay buffer was stopped")
        if shards.place_here() is not None:
            nearby = shards.attach()
            if nearby is not None:
                return nearby.buffer
        elif shards.node not in table.starting or time.monotonic() >= deadline:
            raise RuntimeError(
                f"node {shards.node} has no shard: the shards are on {[p.node for p in table.places.values()]}. Run "
                f"explorers there (NodeAffinitySchedulingStrategy), or make the ShardedReplay when all nodes are up"
            )
        else:
            time.sleep(_POLL)


class Expectation:
    """The announcement of `ShardedReplay.expect_writers()`: it holds until closed."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._token = secrets.token_hex(8)
        shards.ask("expect", self._token, True)

    def close(self) -> None:
        """No more writers will come. Idempotent."""
        with suppress(Stopped):
            self._shards.ask("expect", self._token, False)

    def __enter__(self) -> Expectation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
