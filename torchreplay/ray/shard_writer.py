"""Writing to the shard of the node one is on, and saying that someone will."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch

from torchreplay.buffer import ReplayBuffer
from torchreplay.config import Config
from torchreplay.errors import AttachError, Stopped
from torchreplay.ray.members import Shards
from torchreplay.ray.union import pack
from torchreplay.writer import Autoreset, Writer

if TYPE_CHECKING:
    from types import TracebackType

PATIENCE: Final = 60.0
"""Seconds for which a writer waits for its node's shard to be made anew."""

_POLL: Final = 0.1


class ShardLost(RuntimeError):
    """The shard that a writer wrote to is gone, with its rows: make a new writer for the one that takes its place."""


class ShardWriter(Writer):
    """A writer of the shard on this node: an ordinary one, whose keys are the union's.

    Made by `ShardedReplay.writer()`. Its calls raise `ShardLost` some seconds after the shard's actor has died.
    """

    def __init__(
        self, buffer: ReplayBuffer, config: Config, base: int, lanes: int | None, autoreset: Autoreset
    ) -> None:
        super().__init__(buffer._segment, config, lanes, autoreset)
        self._base = base

    def append(self, *, priority: float | None = None, **fields: Any) -> int:
        """Does what `Writer.append` does."""
        return super().append(priority=priority, **fields) + self._base

    def extend(self, *, priority: Any = None, **fields: Any) -> torch.Tensor:
        """Does what `Writer.extend` does."""
        return super().extend(priority=priority, **fields) + self._base

    def reset(self, *, mask: Any = None, **observation: Any) -> Any:
        """Does what `Writer.reset` does."""
        return super().reset(mask=mask, **observation) + self._base

    def step(self, *, priority: Any = None, final_obs: Any = None, **fields: Any) -> Any:
        """Does what `Writer.step` does."""
        return super().step(priority=priority, final_obs=final_obs, **fields) + self._base

    def _look_around(self) -> None:
        try:
            super()._look_around()
        except Stopped:
            raise ShardLost(
                "the shard of this node is gone, and its rows with it: call writer() again for the one that takes its "
                "place, and start a new episode"
            ) from None


class NodeShard:
    """The shard of this process's node, attached.

    Args:
        shards: All of them.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._buffer: ReplayBuffer | None = None
        self._number = -1

    @property
    def stopped(self) -> bool:
        """Whether the shard that is attached, if one is, was stopped. One atomic read."""
        return self._buffer is not None and self._buffer.stopped

    def buffer(self) -> tuple[ReplayBuffer, int]:
        """Returns the shard's buffer, and what makes its keys the union's; waits for one that is being made anew.

        Raises:
            RuntimeError: This node has no shard.
            Stopped: The buffer was stopped.
        """
        if self._buffer is not None and self._is_alive(self._buffer):
            return self._buffer, pack(self._number)
        node = self._shards.ray.get_runtime_context().get_node_id()
        deadline = time.monotonic() + PATIENCE
        self.close()
        while self._buffer is None:
            table = self._shards.look()
            if table.stopped:
                raise Stopped("the replay buffer was stopped")
            place = self._shards.place_on(node)
            if place is not None:
                self._attach(place.number, place.actor)
            elif node not in table.starting or time.monotonic() >= deadline:
                raise RuntimeError(
                    f"node {node} has no shard: the shards are on {[p.node for p in table.places.values()]}. Run "
                    f"explorers there (NodeAffinitySchedulingStrategy), or make the ShardedReplay when all nodes are up"
                )
            else:
                time.sleep(_POLL)
        return self._buffer, pack(self._number)

    def close(self) -> None:
        """Detaches from the shard. Writers that are held keep its memory."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _attach(self, number: int, actor: Any) -> None:
        try:
            self._buffer = ReplayBuffer.attach(self._shards.result(actor.handle.remote()))
            self._number = number
        except (LookupError, AttachError) as error:
            self._shards.lose(number, str(error))

    def _is_alive(self, buffer: ReplayBuffer) -> bool:
        if buffer._segment.census(False)["owners"]:
            return True
        self._shards.lose(self._number, "its process is gone")
        return False


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
