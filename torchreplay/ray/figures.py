"""What learners and shards tell each other, besides rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchreplay.ray.union import Drawn


@dataclass(frozen=True, slots=True)
class Order:
    """What a learner says with every call.

    All counts are totals, so that a message that is lost, or comes to a shard that has just been made, does no harm.

    Attributes:
        stream: The learner's number.
        items: Items that it has handed out.
        batches: Batches that it has handed out.
        largest: The largest raw priority that it knows of, in any shard.
        limit: Items up to which this shard's writers are admitted; None for no limit.
        candidates: How many to draw; 0: none, only the figures are wanted.
    """

    stream: int
    items: int
    batches: int
    largest: float
    limit: int | None
    candidates: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
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
        learners: Of each learner by number, the items and batches that it has handed out.
        stopped: Whether the buffer was stopped.
        trouble: Why nothing can be drawn however long one waits; None for no such reason.
    """

    drawn: Drawn
    candidates: int
    rows: int
    inserted: int
    issued: int
    largest: float
    writers: int
    since_departure: float
    since_write: float
    learners: Mapping[int, tuple[int, int]]
    stopped: bool
    trouble: str | None


Answer: TypeAlias = tuple[Figures, NDArray[np.uint8] | None]
"""What a shard said, and a block with its candidates; None: there are none, or they were drawn into their place."""
