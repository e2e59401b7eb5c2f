"""The messages of learners and shards, besides rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchreplay.ray.sharded.global_distribution import Drawn
from torchreplay.schema.batch import ReplayBatch


class LearnerProgress(NamedTuple):
    """What a learner has handed out.

    Attributes:
        rule: The number of the limiter that it keeps to.
        items: Items in all.
        batches: Batches in all.
        before: Items that this limiter does not count: handed out, or under way, when the learner heard of it.
    """

    rule: int
    items: int
    batches: int
    before: int

    @property
    def moment(self) -> tuple[int, ...]:
        """Of two of the same learner, the later one's is larger: what was under way may be given up."""
        return self.rule, self.items, self.batches, -self.before


def is_newer(drew: LearnerProgress, known: LearnerProgress | None) -> bool:
    """Returns whether `drew` is the later report of a learner; True where nothing is known."""
    return known is None or drew.moment > known.moment


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """What a learner says with every call.

    All counts are totals, so that a message that is lost, or comes to a shard that has just been made, does no harm.

    Attributes:
        stream: The learner's number.
        drew: What it has handed out.
        largest: The largest raw priority that it knows of, in any shard.
        limit: Items up to which this shard's writers are admitted, under the limiter that it keeps to; None for no
            limit.
        candidates: How many to draw; 0: none, only the figures are wanted.
        says: Whether `limit` is meant: not by those who only look around, who may know too little.
        others: What other learners have handed out, where the shard has reported nothing, or less. A new shard would
            not hear of learners that are gone.
        waited: Seconds that it has waited for rows.
    """

    stream: int
    drew: LearnerProgress
    largest: float
    limit: int | None
    candidates: int = 0
    says: bool = True
    others: Mapping[int, LearnerProgress] = field(default_factory=dict)
    waited: float = 0.0


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
        learners: What each learner has handed out, by number.
        rule: The number of the newest limiter that its actor has heard of; -1: nobody asked the actor.
        stopped: Whether the buffer was stopped.
        trouble: Why nothing can be drawn however long one waits; None for no such reason.
        barren: Why its ring, as long as it stays like this, completes no item; None if it may.
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
    learners: Mapping[int, LearnerProgress]
    rule: int
    stopped: bool
    trouble: str | None
    barren: str | None = None


Gathered: TypeAlias = tuple[ShardReport, ReplayBatch | NDArray[np.uint8] | None]
"""What a shard said, and the `candidates` items found, as a batch or a block; None: none were."""

Answer: TypeAlias = tuple[ShardReport, NDArray[np.uint8] | None]
"""What a shard said, and a block with its candidates; None: there are none, or they were drawn into their place."""
