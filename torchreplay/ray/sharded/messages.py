"""What shards answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchreplay.buffer.tree_summary import TreeSummary


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a shard says in every answer.

    Attributes:
        drawn: Its tree when the candidates were drawn, or now.
        candidates: How many came along.
        rows: Rows held.
        inserted: Items that ever became drawable.
        issued: Its own keys below this exist.
        largest: The largest raw priority seen.
        writers: Writers alive.
        since_departure: Seconds since one last left; -1 if none did.
        since_write: Seconds since one last wrote; -1 if none did.
        stopped: Whether the buffer was stopped.
        trouble: Why nothing can be drawn however long one waits; None for no such reason.
        barren: Why its ring, as long as it stays like this, completes no item; None if it may.
    """

    drawn: TreeSummary
    candidates: int
    rows: int
    inserted: int
    issued: int
    largest: float
    writers: int
    since_departure: float
    since_write: float
    stopped: bool
    trouble: str | None
    barren: str | None = None


Answer: TypeAlias = tuple[ShardReport, NDArray[np.uint8] | None]
"""What a shard said, and a block with its candidates; None: there are none, or they were drawn into their place."""
