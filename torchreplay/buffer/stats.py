"""What `ReplayBuffer.stats()` reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

SUBJECTS: tuple[tuple[str, Sequence[str]], ...] = (
    ("held", ("size", "capacity", "nbytes", "drawable")),
    ("written", ("rows_written", "inserted", "dropped_rows", "evicted_unsampled", "last_write_age")),
    ("drawn", ("sampled", "draws", "redraws", "samples_per_insert", "staleness")),
    ("fed back", ("updated", "stale_updates", "unready_updates", "priority_change")),
    ("priorities", ("priority_total", "priority_min", "priority_max")),
    ("queue", ("held_items", "dropped_items", "oldest_age")),
    ("waits", ("insert_wait", "sample_wait", "insert_wait_share", "sample_wait_share")),
    ("running", ("writers", "learners", "stopped")),
)
"""The figures by subject, as `print` shows them."""

VERSIONS: tuple[str, Sequence[str]] = ("versions", ("policy_version", "age_mean", "age_max", "expired_items"))
"""Those of policy versions, which are shown where there are any."""

ADMISSION: tuple[str, Sequence[str]] = ("admission", ("admitted_items", "admission_limit", "open_admissions"))
"""Those of items that have to be admitted, which are shown where they have."""

RAGGED: tuple[str, Sequence[str]] = ("ragged", ("ragged_bytes", "ragged_fill", "evicted_by_pages"))
"""Those of ragged fields, which are shown where there are any."""

NOTICEABLE = 0.05
"""Share of its time from which on a side counts as waiting."""


@dataclass(frozen=True)
class Stats:
    """Scalars only, ready for JSON; counts are totals over all processes since the buffer was made.

    Of rows, items, draws and TD errors they go on in a checkpoint that is loaded, and in a copy.

    Attributes:
        size: Rows held.
        capacity: Rows that fit.
        nbytes: Bytes of shared memory, or of the file.
        drawable: Items that can be drawn now.
        ragged_bytes: Bytes for the values of ragged fields; 0: there are none.
        ragged_fill: Share of these that rows take, from the oldest row on. Where it is 1 and `size` is less than
            `capacity`, bytes are the smaller measure: the oldest rows go before all slots are used. Of a queue whose
            writers wait: from the oldest row on that is still needed.
        evicted_by_pages: Rows that left because the bytes of their ragged values were taken again, and not their
            slots. Of a queue whose writers wait: rows that nobody needed any more.
        inserted: Items that ever became drawable: a learner, `stats` or `len` had to look while they were there, or a
            writer under `SamplesPerInsert` or `Fifo(when_full="drop_oldest")`. What the ring took back before that is
            in none of these figures; under `Rows()` it is about `rows_written` - `inserted`.
        sampled: Items drawn.
        draws: Batches drawn.
        updated: TD errors applied.
        stale_updates: TD errors dropped because their row was overwritten or cleared, or because an iteration ended
            while the buffer's lock did not come free.
        unready_updates: TD errors dropped because their item was not, or no longer, complete.
        redraws: Items drawn again because their row was overwritten while it was copied.
        staleness: TD errors applied or queued between the draw of a batch and its handing out by a `ReplayDataset`, on
            average over the batches drawn ahead.
        evicted_unsampled: Items in `inserted` that were overwritten, or cleared, before they were ever drawn; items
            loaded from a checkpoint do not count.
        held_items: Of a queue: items that somebody holds; they are in none of the other figures of what is there.
        dropped_items: Of a queue: items that were overwritten while they were still to be drawn. Of those overwritten
            while somebody held them the ones that were given back, or whose holder died. They count from then on.
        oldest_age: Of a queue: seconds since the oldest item that can be drawn was written, with its last row, to some
            milliseconds; -1 if there is none, and of others. In a file that is opened again, and after a load, it
            counts from then.
        policy_version: The learner's version, as it was told; 0: nobody has.
        age_mean: Policy versions that the items drawn so far were behind the learner's, on average; 0 where rows have
            no field `policy_version`.
        age_max: The most that one of them was.
        expired_items: Items that became too old to be drawn, by the sampler's `max_age`.
        admitted_items: Under `Admission`: items that writers have begun, that are in the queue, or that were drawn,
            since the first one was admitted. Those that were given back do not count. 0 under other limiters.
        admission_limit: Under `Admission`: how many these may be at the learner's version.
        open_admissions: Under `Admission`: items that writers have begun, and neither written nor given back.
        priority_change: By how much an applied TD error changed its item's leaf, up or down, on average.
        samples_per_insert: sampled / inserted, not by row written; 0 before the first insert.
        priority_total: Sum of all leaves, (|td| + eps)^alpha. Under samplers that ignore priorities, the number of
            items that can be drawn.
        priority_min: Smallest raw priority |td| of the items that can be drawn; 0 when there are none. Under
            `Uniform()` and `Fifo()`, which ignore priorities, it is 1.
        priority_max: Largest raw priority |td| seen.
        writers: Writers alive.
        learners: Learners alive.
        rows_written: Tickets issued to writers; more than rows by those lost to deaths and skipped slots.
        dropped_rows: Rows of a buffer in a file that were being written when all its processes had died.
        last_write_age: Seconds since a writer last wrote (10 ms resolution); -1 if none did.
        insert_wait: Seconds that writers waited for the limiter or for room in a queue, or gave way to a learner that
            fell behind, added up.
        sample_wait: Seconds that learners waited for rows, added up.
        insert_wait_share: Share of the last 10 to 20 seconds that a writer waited so, on average.
        sample_wait_share: Share of them that a learner waited for rows, on average.
        stopped: Whether the buffer was stopped.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
        >>> keys = buffer.extend(obs=torch.zeros(5, 3))
        >>> stats = buffer.stats()
        >>> stats.size, stats.inserted
        (5, 5)
        >>> print(stats)  # all of them, by subject
        held  ...
    """

    size: int
    capacity: int
    nbytes: int
    drawable: int
    ragged_bytes: int
    ragged_fill: float
    evicted_by_pages: int
    inserted: int
    sampled: int
    draws: int
    updated: int
    stale_updates: int
    unready_updates: int
    redraws: int
    staleness: float
    evicted_unsampled: int
    held_items: int
    dropped_items: int
    oldest_age: float
    policy_version: int
    age_mean: float
    age_max: int
    expired_items: int
    admitted_items: int
    admission_limit: int
    open_admissions: int
    priority_change: float
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
    insert_wait_share: float
    sample_wait_share: float
    stopped: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> Stats:
        """Returns the figures that `values` has by name, at a fifth of what the constructor of a frozen class costs."""
        stats = cls.__new__(cls)
        stats.__dict__.update(values)
        return stats

    @property
    def bottleneck(self) -> Literal["explorers", "learners"] | None:
        """Who makes the others wait, of late: the side that waits less, if the other waits 5 % of its time or more.

        `"explorers"`: learners wait for rows. `"learners"`: explorers wait for the limiter. None: nobody waits much, or
        both sides do equally.

        Example:
            >>> print(stats.bottleneck)
            None
        """
        inserting, sampling = self.insert_wait_share, self.sample_wait_share
        if inserting == sampling or max(inserting, sampling) < NOTICEABLE:
            return None
        return "explorers" if sampling > inserting else "learners"

    def __str__(self) -> str:
        """Returns the figures by subject, a line each."""
        names = [name for _, part in (*SUBJECTS, RAGGED, VERSIONS, ADMISSION) for name in part]
        rest = [name for name in self.as_dict() if name not in names]
        held, *others = SUBJECTS
        ragged = [RAGGED] if self.ragged_bytes else []
        versions = [VERSIONS] if self.policy_version or self.age_max or self.expired_items else []
        admission = [ADMISSION] if self.admission_limit else []
        subjects = [held, *ragged, *others, *versions, *admission, *([("shards", rest)] if rest else [])]
        width = max(len(subject) for subject, _ in subjects)
        return "\n".join(
            f"{subject:<{width}}  {', '.join(f'{name} {_text(getattr(self, name))}' for name in part)}"
            for subject, part in subjects
        )

    def as_dict(self) -> dict[str, int | float | bool]:
        """Returns the fields by name.

        Example:
            >>> stats.as_dict()["capacity"]
            100
        """
        return asdict(self)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value) if isinstance(value, bool) else f"{value:,}"
