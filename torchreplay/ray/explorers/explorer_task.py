"""What explorers do: run a user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchreplay.ray.explorers.explorer_context import ExplorerContext
from torchreplay.ray.remote.remote_buffer import RemoteBuffer
from torchreplay.ray.workers.named import Fillable, OneOrNamed, named_buffers
from torchreplay.ray.workers.worker_process import Launch, Run
from torchreplay.ray.workers.worker_table import WorkerTable

if TYPE_CHECKING:
    from torchreplay.weights.shared_weights import SharedWeights

Explore = Callable[[ExplorerContext], object]
"""A user's function: runs until `ctx.stopped`, or as long as it likes; its result is dropped."""


@dataclass(frozen=True)
class ExplorerTask:
    """The work of explorers.

    Attributes:
        explore: The user's function.
        buffer: What they write to, or several by name.
        weights: What they may pull, or several by name.
        max_weight_sync_delay: Rows between two pulls of `ctx.pull_weights`.
    """

    explore: Explore
    buffer: OneOrNamed[Fillable]
    weights: OneOrNamed[SharedWeights] | None
    max_weight_sync_delay: int

    helper = None

    def run(self, launch: Launch, board: WorkerTable, helper: None = None) -> ExplorerRun:
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
        return ExplorerRun(self.explore, ctx)

    def __repr__(self) -> str:
        return repr(self.explore)


@dataclass(frozen=True)
class ExplorerRun(Run):
    """One run of an explorer."""

    explore: Explore
    ctx: ExplorerContext

    def __call__(self) -> None:
        """Runs the user's function."""
        self.explore(self.ctx)

    @property
    def noticed_stop(self) -> bool:
        """Whether the function is to finish."""
        return self.ctx.noticed_stop

    def give_up(self) -> None:
        """Has its writers to other nodes wait no longer for the limiter."""
        for buffer in self._elsewhere():
            buffer.give_up()

    def close(self) -> None:
        """Closes its writers, and has those to other nodes say farewell: this process may not live much longer."""
        with ExitStack() as closing:
            for buffer in self._elsewhere():
                closing.callback(buffer.drain)
            closing.callback(self.ctx.close)

    def _elsewhere(self) -> list[RemoteBuffer]:
        buffers: Iterable[Any] = named_buffers(self.ctx.buffer).values()
        return [buffer for buffer in buffers if isinstance(buffer, RemoteBuffer)]
