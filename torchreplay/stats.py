"""What `ReplayBuffer.stats()` reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """Scalars only, ready for JSON; counts are totals over all processes since the buffer was made.

    Attributes:
        size: Rows held.
        capacity: Rows that fit.
        nbytes: Bytes of shared memory, or of the file.
        drawable: Items that can be drawn now.
        inserted: Items that ever became drawable.
        sampled: Items drawn.
        draws: Batches drawn.
        updated: TD errors applied.
        stale_updates: TD errors dropped because their row was overwritten.
        unready_updates: TD errors dropped because their item was not, or no longer, complete.
        redraws: Items drawn again because their row was overwritten while it was copied.
        samples_per_insert: sampled / inserted; 0 before the first insert.
        priority_total: Sum of all leaves.
        priority_min: Smallest positive leaf; 0 when there is none.
        priority_max: Largest raw priority seen.
        writers: Writers alive.
        learners: Learners alive.
        rows_written: Tickets issued to writers; more than rows by those lost to deaths and skipped slots.
        dropped_rows: Rows of a buffer in a file that were being written when all its processes had died.
        last_write_age: Seconds since a writer last wrote (10 ms resolution); -1 if none did.
        insert_wait: Seconds that writers waited for the limiter, added up.
        sample_wait: Seconds that learners waited for rows, added up.
        stopped: Whether the buffer was stopped.
    """

    size: int
    capacity: int
    nbytes: int
    drawable: int
    inserted: int
    sampled: int
    draws: int
    updated: int
    stale_updates: int
    unready_updates: int
    redraws: int
    samples_per_insert: float
    priority_total: float
    priority_min: float
    priority_max: float
    writers: int
    learners: int
    rows_written: int
    dropped_rows: int
    last_write_age: float
    insert_wait: float
    sample_wait: float
    stopped: bool

    def as_dict(self) -> dict[str, int | float | bool]:
        """Returns the fields by name."""
        return asdict(self)
