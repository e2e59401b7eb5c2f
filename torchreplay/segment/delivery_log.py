"""The log of rows of remote writers: one small piece of shared memory that outlives the ingest actor.

Rows of writers on other nodes come in numbered chunks, and are written by a process of the buffer's node. If that is
killed, its successor finds here which chunks are written, which rows of the one under way, and where each stream goes
on. Of a chunk that comes again it writes exactly the missing rows.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from torchreplay import _C
from torchreplay.errors import AttachError
from torchreplay.segment.handle import Handle, make_handle, new_nonce, open_handle
from torchreplay.segment.reservation import new_memory

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchreplay._C import Census

WHAT: Final = "delivery log of remote writers"

MAX_WRITERS: Final = 1024
"""Remote writers of one buffer that can be told apart at a time."""

FORGOTTEN_AFTER: Final = 60.0
"""Seconds without a word after which a writer's entry may go to another one, when there is no free one."""

REMEMBERED: Final = 30.0
"""Seconds for which a writer counts after the last word of it: the process that writes its rows may have to be started
again meanwhile."""

_SIZE: Final = 1 << 30  # of addresses: memory is taken for the entries in use

# Naturally aligned 8-byte words: a death leaves each as it was or as it was to be.
_ENTRY: Final = np.dtype(
    [
        ("writer", np.int64),  # 0: free
        ("written", np.int64),  # the last chunk that is written
        ("begun", np.int64),  # the last chunk whose rows' keys are in `keys`
        ("used", np.float64),  # when, as `_now` tells
        ("offset", np.int64),  # of its memory; 0: none yet
        ("num_envs", np.int64),  # environments that its memory has room for
        ("rows", np.int64),  # of a chunk that its memory has room for
        ("ends", np.int64, (2,)),  # streams in either half of `ends`
        ("runs", np.int64, (2,)),  # the first page + 1 of the last two rows announced; 0: it has no pages
    ]
)
END: Final = np.dtype([("there", np.int64), ("here", np.int64)])
"""The last row of a stream: its key + 1 where the writer collected it, and in the buffer."""


class DeliveryLog:
    """The entries of a buffer's remote writers. Pickles to a handle; one process at a time may `acquire` it."""

    def __init__(self) -> None:
        fd = new_memory(_SIZE, WHAT)
        try:
            os.posix_fallocate(fd, 0, _round_up(MAX_WRITERS * _ENTRY.itemsize))
        except BaseException:
            os.close(fd)
            raise
        self._nonce = new_nonce()
        self._adopt(fd)

    def _adopt(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, _SIZE)
        self.entries: npt.NDArray[np.void] = np.frombuffer(self._memory, _ENTRY, MAX_WRITERS)
        weakref.finalize(self, os.close, fd)  # others attach through the descriptor, and the lock goes with it

    def handle(self) -> Handle:
        """Returns what another process of this machine needs to attach."""
        return make_handle(self._fd, self._nonce)

    @classmethod
    def attach(cls, handle: Handle) -> DeliveryLog:
        """Attaches to the log of another process of this machine.

        Raises:
            AttachError: The process that made it is gone.
        """
        self = cls.__new__(cls)
        self._nonce = handle.nonce
        self._adopt(open_handle(handle, WHAT))
        return self

    def acquire(self) -> bool:
        """Makes this process the one that writes here, until its end; False while another one is.

        A process that was replaced, but is not dead yet, keeps its successor from writing the same rows.
        """
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def entry(self, writer: int, num_envs: int, rows: int, fresh: bool) -> WriterEntry | None:
        """Returns the entry of a writer.

        Args:
            writer: Its number.
            num_envs: Environments that it writes at most.
            rows: Rows of a chunk at most.
            fresh: It has sent nothing yet, and gets an entry if it has none.

        Returns:
            None: it has none any more.

        Raises:
            MemoryError: All entries are taken by writers that are alive, or their memory is used up.
        """
        found = np.flatnonzero(self.entries["writer"] == writer)
        if not len(found) and not fresh:
            return None
        index = int(found[0]) if len(found) else self._take(writer, num_envs, rows)
        entry = WriterEntry(self._memory, self.entries[index])
        entry.touch()
        return entry

    def forget(self, writer: int) -> None:
        """Gives the entry of a writer free, if it has one."""
        self.entries["writer"][self.entries["writer"] == writer] = 0

    def heard_of(self, seconds: float) -> int:
        """Returns how many writers that have not left were heard of in the last so many seconds."""
        return int(((self.entries["writer"] != 0) & (self.entries["used"] > _now() - seconds)).sum())

    def _take(self, writer: int, num_envs: int, rows: int) -> int:
        entries = self.entries
        fits = (entries["offset"] > 0) & (entries["num_envs"] >= num_envs) & (entries["rows"] >= rows)
        free = entries["writer"] == 0
        silent = entries["used"] < _now() - FORGOTTEN_AFTER
        for candidates in (free & fits, free & (entries["offset"] == 0), free, silent & fits, silent):
            if candidates.any():
                index = int(np.flatnonzero(candidates)[np.argmin(entries["used"][candidates])])
                break
        else:
            raise MemoryError(f"{MAX_WRITERS} remote writers write to one buffer at this time: close some of them")
        entry = entries[index]
        entry["writer"] = 0
        if not fits[index]:
            self._make_room(entry, num_envs, rows)
        entry["written"] = entry["begun"] = 0
        entry["ends"] = entry["runs"] = 0
        entry["writer"] = writer  # last: a reader then finds a complete entry
        return index

    def _make_room(self, entry: Any, num_envs: int, rows: int) -> None:
        entry["offset"] = 0  # what it has is too little; a death from here on leaves it with none
        taken = [int(e["offset"]) + _bytes_of(int(e["num_envs"]), int(e["rows"])) for e in self.entries if e["offset"]]
        offset = max(taken, default=_round_up(MAX_WRITERS * _ENTRY.itemsize))
        size = _bytes_of(num_envs, rows)
        if offset + size > _SIZE:
            raise MemoryError(f"a remote writer of {num_envs:,} environments finds no room in the {WHAT}: write fewer")
        os.posix_fallocate(self._fd, offset, size)
        entry["num_envs"], entry["rows"] = num_envs, rows
        entry["offset"] = offset


class WriterEntry:
    """What is known of one remote writer.

    Attributes:
        record: `written` and `begun`, the numbers of its last chunk in the buffer and of the one under way.
        keys: int64 `[rows]`: keys that the rows of the chunk under way have got or were about to get; -1 before.
        runs: int64 `[2]`: where the last two of them have their values of any length, by their index's last bit.
    """

    def __init__(self, memory: mmap.mmap, record: Any) -> None:
        self.record = record
        self.runs: npt.NDArray[np.int64] = record["runs"]
        num_envs, offset = int(record["num_envs"]), int(record["offset"])
        self._ends = np.frombuffer(memory, END, 2 * num_envs, offset).reshape(2, num_envs)
        self.keys = np.frombuffer(memory, np.int64, int(record["rows"]), offset + 2 * num_envs * END.itemsize)

    @property
    def written(self) -> int:
        """The last chunk that is in the buffer."""
        return int(self.record["written"])

    def begin(self, number: int, rows: int) -> bool:
        """Makes a chunk the one under way; False if it was already, so that some of its rows may be written."""
        if int(self.record["begun"]) == number:
            return False
        self.keys[:rows] = -1
        self.record["begun"] = number
        return True

    def ends(self) -> npt.NDArray[np.void]:
        """Returns the last row of each stream, in the writer's order: its key + 1 `there` and `here`."""
        half = self.written % 2
        return self._ends[half, : int(self.record["ends"][half])]

    def finish(self, number: int, ends: npt.NDArray[np.void]) -> None:
        """Notes that a chunk is in the buffer, and where the streams go on."""
        half = number % 2
        self._ends[half, : len(ends)] = ends
        self.record["ends"][half] = len(ends)
        self.record["written"] = number  # last: it makes this half the one that counts

    def touch(self) -> None:
        """Notes that its writer was heard of."""
        self.record["used"] = _now()

    def leave(self) -> None:
        """Gives the entry free."""
        self.record["writer"] = 0


class RemotelyWritten:
    """A segment as waits for rows look at it: its remote writers count, also while nobody is there to write their rows.

    Args:
        segment: The segment.
        log: Of its remote writers, or the handle of that.
    """

    def __init__(self, segment: _C.Segment, log: DeliveryLog | Handle) -> None:
        self._segment = segment
        self._log = log

    @property
    def stopped(self) -> bool:
        """Whether it was stopped."""
        return self._segment.stopped

    @property
    def called(self) -> str:
        """What messages call it."""
        return self._segment.called

    def census(self, unused_count_as_others: bool, /) -> Census:
        """Returns who takes part."""
        census = self._segment.census(unused_count_as_others)
        if not census["others_writing"]:
            remote = self._remote_writers()
            census["writers"] += remote
            census["others_writing"] += remote
        return census

    def _remote_writers(self) -> int:
        if isinstance(self._log, Handle):
            try:
                self._log = DeliveryLog.attach(self._log)
            except AttachError:  # the process that made it is gone, and with it those who would write
                return 0
        return self._log.heard_of(REMEMBERED)


def _now() -> float:
    """Returns a time in seconds that all processes of this machine agree on."""
    return _C.machine_ns() * 1e-9


def _bytes_of(num_envs: int, rows: int) -> int:
    return _round_up(2 * num_envs * END.itemsize + rows * 8)


def _round_up(n: int) -> int:
    return -(-n // mmap.PAGESIZE) * mmap.PAGESIZE
