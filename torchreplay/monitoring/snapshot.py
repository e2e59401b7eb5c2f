"""One look at a live buffer: what it has counted, and who takes part. Nothing in its memory is changed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from torchreplay import _C
from torchreplay.buffer.jams import Need
from torchreplay.monitoring.discovery import SharedFile, program_of, shared_files
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import Limiter, SamplesPerInsert, from_native
from torchreplay.schema.samplers import Fifo
from torchreplay.segment.closeable import Closeable

Role = Literal["owner", "writer", "learner", "supervisor", "other"]


@dataclass(frozen=True, slots=True)
class Participant:
    """Who takes part, by one place in the segment's table.

    Attributes:
        id: The number of the place.
        role: What for. The owner made the buffer, or opened its file.
        alive: Whether its process lives; False: it died, and nobody has noticed yet.
        waiting: Whether it waits for the limiter, or for room in a queue; of a learner: for items.
        pid: Its process.
        rows: Rows written; of a learner: items that it got.
        since_write: Seconds since it wrote; -1: never.
        since_draw: Seconds since it got a batch; -1: never.
    """

    id: int
    role: Role
    alive: bool
    waiting: bool
    pid: int
    rows: int
    since_write: float
    since_draw: float

    @property
    def heartbeat(self) -> float:
        """Seconds since it was seen to work; -1: never."""
        return self.since_draw if self.role == "learner" else self.since_write


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds items of a queue.

    Attributes:
        pid: The process.
        items: How many it holds.
        alive: Whether it lives; False: it died, and its items go back at the next draw.
    """

    pid: int
    items: int
    alive: bool


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What a queue is at one moment.

    Attributes:
        used: Rows of items that are to be drawn, held or unfinished, and those that no learner has looked at yet.
        to_draw: Items that wait to be drawn, also those that no learner has looked at yet.
        held_items: Items that somebody holds.
        dropped_items: Items that were overwritten while they were still to be drawn, or held and not committed.
        oldest_age: Seconds since the oldest of these was written, with its last row; -1 if there is none.
        need: Why writers have no room; NONE where they have.
        needed_pid: Whose doing that is; 0 where it is nobody's, or not known.
        holders: Who holds items.
    """

    used: int
    to_draw: int
    held_items: int
    dropped_items: int
    oldest_age: float
    need: Need
    needed_pid: int
    holders: tuple[Holder, ...]

    @classmethod
    def of(cls, facts: dict[str, Any]) -> QueueFacts:
        """Returns what the native reader has found."""
        facts["need"] = Need(facts["need"])
        facts["holders"] = tuple(Holder(*parts) for parts in facts["holders"])
        return cls(**facts)

    def held_by(self, pid: int) -> int:
        """Returns how many items a process holds."""
        return sum(holder.items for holder in self.holders if holder.pid == pid)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a buffer has counted at one moment; each figure is exact, and they are microseconds apart.

    Attributes:
        time: Of the look, seconds of a clock that all processes of this machine share.
        age: Seconds since the buffer was made.
        head: Rows begun so far.
        absorbed: Of these, how many learners have looked at.
        rows: Rows held that learners have looked at.
        inserted: Items that became drawable.
        sampled: Items drawn.
        draws: Batches drawn.
        updated: TD errors applied.
        stale_updates: TD errors dropped because their row was overwritten.
        unready_updates: TD errors dropped because their item was not complete.
        evicted_unsampled: Items overwritten before they were ever drawn.
        evicted_by_pages: Rows that left because the bytes of their ragged values were taken again.
        redraws: Items drawn again because their row was overwritten while it was copied.
        dropped_rows: Rows of a file that were being written when its processes died.
        drawable: Items that can be drawn and that a learner has looked at.
        policy_version: The learner's.
        ages: Policy versions that the items drawn were behind it, added up.
        aged: Items drawn, as far as their rows say by which policy they came about.
        age_max: The most that one was behind.
        expired_items: Items that became too old to be drawn.
        admitted_items: Under `Admission`: items that count as admitted, as in `Stats`; 0 under other limiters.
        admission_limit: How many these may be at the learner's version.
        open_admissions: Of these, items that writers have begun, and neither written nor given back.
        insert_wait: Seconds that writers have waited, added up.
        sample_wait: Seconds that learners have waited for rows, added up.
        priority_max: Largest raw priority |TD error| seen.
        stopped: Whether the buffer was stopped.
        importing: Whether rows of a checkpoint are being loaded.
        holder_pid: The process that holds its lock; 0: none.
        since_departed_write: Seconds since a writer that has left wrote last; -1: none did.
        limiter: Who must wait.
        participants: Who takes part.
        queue: Of a queue, what is known beside; None of others.
        ragged_fill: Share of the bytes for values of any length that rows take; 0 where there are none.
    """

    time: float
    age: float
    head: int
    absorbed: int
    rows: int
    inserted: int
    sampled: int
    draws: int
    updated: int
    stale_updates: int
    unready_updates: int
    evicted_unsampled: int
    evicted_by_pages: int
    redraws: int
    dropped_rows: int
    drawable: int
    policy_version: int
    ages: int
    aged: int
    age_max: int
    expired_items: int
    admitted_items: int
    admission_limit: int
    open_admissions: int
    insert_wait: float
    sample_wait: float
    priority_max: float
    stopped: bool
    importing: bool
    holder_pid: int
    since_departed_write: float
    limiter: Limiter
    participants: tuple[Participant, ...]
    queue: QueueFacts | None
    ragged_fill: float = 0.0

    @classmethod
    def of(cls, facts: dict[str, Any], queue: QueueFacts | None) -> Snapshot:
        """Returns what the native reader has found."""
        facts["limiter"] = from_native(*facts["limiter"])
        facts["participants"] = tuple(Participant(*parts) for parts in facts["participants"])
        return cls(**facts, queue=queue)

    def alive(self, role: Role) -> list[Participant]:
        """Returns those of a role that live."""
        return [participant for participant in self.participants if participant.alive and participant.role == role]

    @property
    def unseen(self) -> int:
        """Rows that no learner has looked at yet."""
        return max(0, self.head - self.absorbed)

    @property
    def to_draw(self) -> int:
        """Items that wait to be drawn; of a queue also those that no learner has looked at yet."""
        return self.drawable if self.queue is None else self.queue.to_draw

    @property
    def feedback(self) -> int:
        """TD errors that were fed back, applied or not."""
        return self.updated + self.stale_updates + self.unready_updates

    @property
    def dropped_items(self) -> int:
        """Items of a queue that were overwritten while they were still to be drawn, or held and not committed."""
        return 0 if self.queue is None else self.queue.dropped_items

    @property
    def samples_per_insert(self) -> float:
        """Items drawn for each that became drawable; 0 before the first."""
        return self.sampled / max(1, self.inserted)

    @property
    def target_ratio(self) -> float | None:
        """What the limiter keeps that at; None where it keeps none."""
        return self.limiter.ratio if isinstance(self.limiter, SamplesPerInsert) else None

    @property
    def since_write(self) -> float:
        """Seconds since anybody wrote; -1: never."""
        all_times = [p.since_write for p in self.participants], [self.since_departed_write]
        return min((seconds for times in all_times for seconds in times if seconds >= 0), default=-1.0)


class LiveBuffer(Closeable):
    """A buffer of other processes, open for reading. A context, which closes it.

    It takes no place among the participants, no lock, and no page that can be written to. It may be killed at any
    moment. While it is open the memory stays, also when everybody else has left.

    Args:
        file: The buffer's.

    Attributes:
        file: The buffer's, with those who had it open when it was found.
        config: What it was made of.
        nonce: Its identity.
        nbytes: Of its memory, or its file.
        ragged_bytes: For the values of ragged fields; 0: there are none.
        page_bytes: Of the pages in which these lie.
        sees_processes: Whether the processes in its table are those that this one sees: not in another container.

    Raises:
        NoSuchBuffer: It is gone.
        ConnectionError: It is of another version of torchreplay, or damaged; the text says which.
    """

    def __init__(self, file: SharedFile) -> None:
        fd = file.open()
        try:
            self._reader = _C.Reader(fd)
        finally:
            os.close(fd)
        self.file = file
        try:
            self.config = Config.from_text(self._reader.text)
        except ValueError as error:
            self.close()
            raise ConnectionError(str(error)) from None
        self.nonce, self.nbytes = self._reader.nonce, self._reader.nbytes
        regions = self._reader.regions
        self.page_bytes, self.ragged_bytes = regions["page_bytes"], regions["ragged_bytes"]
        self.sees_processes = self._reader.same_namespace

    @property
    def name(self) -> str:
        """What people call it: its name, that of its file, or the number of its inode."""
        if self.config.name is not None:
            return self.config.name
        return f"#{self.file.inode}" if self.file.path is None else self.file.path.name

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self.config.capacity

    def snapshot(self) -> Snapshot:
        """Returns what it has counted. Takes microseconds, and one system call for each participant."""
        found = None if self.fifo is None else self._reader.queue()
        return Snapshot.of(self._reader.facts(), None if found is None else QueueFacts.of(found))

    @property
    def fifo(self) -> Fifo | None:
        """What a queue does; None for other buffers."""
        return self.config.sampler if isinstance(self.config.sampler, Fifo) else None

    def fill(self, now: Snapshot) -> int:
        """Returns the rows held, with those that no learner has looked at yet; of a queue those that are still needed.

        A queue that drops the oldest needs none, and is as any other buffer.
        """
        if now.queue is not None and self.fifo is not None and self.fifo.when_full == "wait":
            return now.queue.used
        return min(self.capacity, now.rows + now.unseen)

    def copy_slots(self, first: int, n: int) -> tuple[bytes, bytes]:
        """Returns leaves (float32) and keys + 1 (int64) of the slots from `first` on, as bytes."""
        return self._reader.copy_slots(first, n)

    def in_use(self) -> bool:
        """Returns whether any other process still has it. One system call, as long as anybody takes part."""
        if self._reader.in_use:
            return True
        return any((file.device, file.inode) == (self.file.device, self.file.inode) for file in shared_files())

    def owner(self, now: Snapshot) -> tuple[int, str]:
        """Returns the process that made it, or else one that has it open, and that one's program."""
        owners = [p.pid for p in now.alive("owner")] if self.sees_processes else []
        pid = owners[0] if owners else self.file.holders[0][0]
        return pid, program_of(pid)

    def close(self) -> None:
        """Lets go of the memory. Idempotent."""
        self._reader.close()
