"""What an `ExplorerPool` reports: the statistics and the failures of its explorers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchreplay.ray.board import WINDOW

State = Literal["starting", "running", "restarting", "finished", "failed", "stopped"]
"""Of an explorer. Failed: it ended by an error and is not restarted any more."""


@dataclass(frozen=True)
class ExplorerFailure:
    """One failed run of an explorer.

    Attributes:
        index: The explorer.
        restarts: How often it had been restarted before this run.
        died: True if its process died (killed, out of memory), False if its function raised.
        error: One line: the exception, or how the process died.
        traceback: The explorer's own traceback; for a death, what Ray knows about it.
    """

    index: int
    restarts: int
    died: bool
    error: str
    traceback: str


@dataclass(frozen=True)
class ExplorerStats:
    """One explorer, over all its runs.

    Attributes:
        index: The explorer, `0 <= index < num_explorers`.
        state: `starting`, `running`, `restarting` (waits for its next try), `finished` (its
            function returned), `failed` (for good) or `stopped`.
        pid: Process id of its present or last run; 0 before the first.
        rows: Rows written through `ctx.writer()`, as of a moment ago: counted at the end of each
            episode, and now and then when the function looks at `ctx.stopped`.
        episodes: Episodes recorded.
        steps: Sum of the recorded episodes' lengths.
        mean_return: Mean return of the last 100 recorded episodes; NaN before the first.
        mean_length: Mean length of the same episodes; NaN before the first.
        last_return: Return of the last recorded episode; NaN before the first.
        last_length: Length of the last recorded episode; 0 before the first.
        restarts: How often it was restarted.
        last_error: One line about its last failure; None if it never failed.
    """

    index: int
    state: State
    pid: int
    rows: int
    episodes: int
    steps: int
    mean_return: float
    mean_length: float
    last_return: float
    last_length: int
    restarts: int
    last_error: str | None

    @property
    def alive(self) -> bool:
        """Whether its process is up and in its function."""
        return self.state == "running"


def explorer_stats(index: int, entry: np.void, state: State, restarts: int, last_error: str | None) -> ExplorerStats:
    """Reads one entry of the board; the explorer may be writing to it meanwhile."""
    episodes = int(entry["episodes"])
    window = min(episodes, WINDOW)
    last = (episodes - 1) % WINDOW
    return ExplorerStats(
        index=index,
        state=state,
        pid=int(entry["pid"]),
        rows=int(entry["rows"]),
        episodes=episodes,
        steps=int(entry["steps"]),
        mean_return=float(entry["returns"][:window].mean()) if window else math.nan,
        mean_length=float(entry["lengths"][:window].mean()) if window else math.nan,
        last_return=float(entry["returns"][last]) if window else math.nan,
        last_length=int(entry["lengths"][last]) if window else 0,
        restarts=restarts,
        last_error=last_error,
    )
