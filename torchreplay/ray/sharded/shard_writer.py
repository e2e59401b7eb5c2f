"""The writer of a shard: an ordinary one, whose keys are the union's."""

from __future__ import annotations

from typing import Any

import torch

from torchreplay import _C
from torchreplay.buffer.writer import Autoreset, Writer
from torchreplay.errors import Stopped
from torchreplay.schema.config import Config
from torchreplay.segment.waits import Audience


class ShardLost(RuntimeError):
    """The shard that a writer wrote to is gone, with its rows: make a new writer for the one that takes its place."""


class ShardWriter(Writer):
    """A writer of the shard on this node: an ordinary one, whose keys are the union's.

    Made by `ShardedReplay.writer()`. Its calls raise `ShardLost` some seconds after the shard's actor has died.
    """

    def __init__(
        self, segment: _C.Segment, config: Config, base: int, num_envs: int | None, autoreset: Autoreset
    ) -> None:
        super().__init__(segment, config, num_envs, autoreset)
        self._audience = Audience(segment, ("owners",))  # learners on the node may have it attached for a while yet
        self._base = base

    def append(self, /, *args: Any, priority: float | None = None, **fields: Any) -> int:
        """Does what `Writer.append` does."""
        return super().append(*args, priority=priority, **fields) + self._base

    def extend(self, /, *args: Any, priority: Any = None, **fields: Any) -> torch.Tensor:
        """Does what `Writer.extend` does."""
        keys: torch.Tensor = self._of_union(super().extend(*args, priority=priority, **fields))
        return keys

    def reset(self, /, *args: Any, mask: Any = None, **observation: Any) -> Any:
        """Does what `Writer.reset` does."""
        return self._of_union(super().reset(*args, mask=mask, **observation))

    def step(self, /, *args: Any, priority: Any = None, final_obs: Any = None, **fields: Any) -> Any:
        """Does what `Writer.step` does."""
        return self._of_union(super().step(*args, priority=priority, final_obs=final_obs, **fields))

    def _of_union(self, keys: Any) -> Any:
        """Returns the union's keys for the shard's own; -1, of an environment that wrote no row, stays."""
        return keys + self._base * (keys >= 0)

    def _refuse_closed_buffer(self) -> None:
        raise ShardLost(
            "the ShardedReplay was closed, or the shard of this node is gone, and its rows with it: call writer() "
            "again for the one that takes its place, and start a new episode"
        )

    def _look_around(self) -> None:
        try:
            super()._look_around()
        except Stopped:
            raise ShardLost(
                "the shard of this node is gone, and its rows with it: call writer() again for the one that takes its "
                "place, and start a new episode"
            ) from None
