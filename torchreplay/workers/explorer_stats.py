"""What an `ExplorerPool` reports: the statistics and the failures of its explorers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchreplay.workers.worker_table import WINDOW

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
        traceback: The explorer's own traceback; for a death, what is known about it.
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
            function returned), `failed` (dropped: its restarts are used up) or `stopped`.
        pid: Process id of its present or last run; 0 before the first.
        node: Ray's id of the node of that run; "" before the first, and of plain processes.
        rows: Rows written through `ctx.writer()` and `ctx.buffer.extend`, as of its last heartbeat: while a function
            only writes, those of before.
        episodes: Episodes recorded.
        steps: Sum of the recorded episodes' lengths.
        mean_return: Mean return of the last 100 recorded episodes; NaN before the first.
        mean_length: Mean length of the same episodes; NaN before the first.
        last_return: Return of the last recorded episode; NaN before the first.
        last_length: Length of the last recorded episode; 0 before the first.
        weight_version: Version of the weights that it pulled last, the oldest of several; -1 before the first pull of
            a run.
        weight_syncs: How often `ctx.pull_weights` gave it new ones.
        heartbeat_age: Seconds since its last heartbeat: it began, looked at `ctx.stopped` (ten times a second at
            most), waited for the limiter, recorded an episode or pulled weights. NaN before the first. An explorer on
            another node reports all of this twice a second.
        restarts: How often it was restarted.
        last_error: One line about its last failure; None if it never failed.
        last_traceback: The traceback of its last failure; None if it never failed.
    """

    index: int
    state: State
    pid: int
    node: str
    rows: int
    episodes: int
    steps: int
    mean_return: float
    mean_length: float
    last_return: float
    last_length: int
    weight_version: int
    weight_syncs: int
    heartbeat_age: float
    restarts: int
    last_error: str | None
    last_traceback: str | None

    @property
    def alive(self) -> bool:
        """Whether its process is up and in its function."""
        return self.state == "running"


def explorer_stats(
    index: int, entry: np.void, state: State = "stopped", restarts: int = 0, failure: ExplorerFailure | None = None
) -> ExplorerStats:
    """Returns what an entry of the table says, and the supervisor adds; the explorer may be writing meanwhile."""
    heartbeat = float(entry["heartbeat"])
    episodes = int(entry["episodes"])
    window = min(episodes, WINDOW)
    last = (episodes - 1) % WINDOW
    return ExplorerStats(
        index=index,
        state=state,
        pid=int(entry["pid"]),
        node=bytes(entry["node"]).decode(),
        rows=int(entry["rows"]),
        episodes=episodes,
        steps=int(entry["steps"]),
        mean_return=float(entry["returns"][:window].mean()) if window else math.nan,
        mean_length=float(entry["lengths"][:window].mean()) if window else math.nan,
        last_return=float(entry["returns"][last]) if window else math.nan,
        last_length=int(entry["lengths"][last]) if window else 0,
        weight_version=int(entry["weight_version"]) if heartbeat else -1,
        weight_syncs=int(entry["weight_syncs"]),
        heartbeat_age=time.monotonic() - heartbeat if heartbeat else math.nan,
        restarts=restarts,
        last_error=None if failure is None else failure.error,
        last_traceback=None if failure is None else failure.traceback,
    )
