"""What explorers do: run a user's function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchreplay.ray.board import Board
from torchreplay.ray.context import ExplorerContext
from torchreplay.ray.named import OneOrNamed
from torchreplay.ray.worker import Launch

if TYPE_CHECKING:
    from torchreplay.buffer import ReplayBuffer
    from torchreplay.weights import SharedWeights

Explore = Callable[[ExplorerContext], object]
"""A user's function: runs until `ctx.stopped`, or as long as it likes; its result is dropped."""


@dataclass(frozen=True)
class Exploring:
    """The work of explorers.

    Attributes:
        explore: The user's function.
        buffer: What they write to, or several by name.
        weights: What they may pull, or several by name.
        max_weight_sync_delay: Rows between two pulls of `ctx.pull_weights`.
    """

    explore: Explore
    buffer: OneOrNamed[ReplayBuffer]
    weights: OneOrNamed[SharedWeights] | None
    max_weight_sync_delay: int

    def run(self, launch: Launch, board: Board) -> Exploration:
        """Returns a run that is ready to begin."""
        ctx = ExplorerContext(
            self.buffer,
            self.weights,
            launch.index,
            launch.num_workers,
            launch.seed,
            launch.restarts,
            max_weight_sync_delay=self.max_weight_sync_delay,
            board=board,
        )
        return Exploration(self.explore, ctx)

    def __repr__(self) -> str:
        return repr(self.explore)


@dataclass(frozen=True)
class Exploration:
    """One run of an explorer."""

    explore: Explore
    ctx: ExplorerContext

    def __call__(self) -> None:
        """Runs the user's function."""
        self.explore(self.ctx)

    @property
    def noticed_stop(self) -> bool:
        """Whether the function was told to finish."""
        return self.ctx.noticed_stop

    def close(self) -> None:
        """Closes its writers."""
        self.ctx.close()
