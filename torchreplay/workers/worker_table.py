"""A pool's table: shared memory with the stop flag and what each worker has recorded.

Statistics live in shared memory and not in messages. So recording an episode costs a microsecond and never waits, and a
killed explorer's records are not lost. Workers on other nodes record in copies of the table, and send their entry twice
a second.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
import zlib
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from torchreplay.segment.handle import Handle, make_handle, new_nonce, open_handle
from torchreplay.segment.ray_node import is_elsewhere, ray_node
from torchreplay.segment.reservation import reserve

WINDOW: Final = 100
"""Episodes kept per explorer for its mean return, as Gymnasium's and RLlib's running means do."""

_WHAT: Final = "table of a pool of workers"

# Every column but one is a naturally aligned 8-byte word: a store can be late for a reader, never torn.
_HEADER: Final = np.dtype([("magic", "S8"), ("layout", np.int64), ("stop", np.int64), ("wanted", np.int64)])
ENTRY: Final = np.dtype(
    [
        ("pid", np.int64),  # 0 while the worker starts
        ("rows", np.int64),
        ("episodes", np.int64),
        ("node", "S64"),  # Ray's id; does not change while there is a pid
        ("steps", np.int64),
        ("items", np.int64),  # rows with which an item was complete
        ("returns", np.float64, (WINDOW,)),
        ("lengths", np.int64, (WINDOW,)),
        ("weight_version", np.int64),
        ("weight_syncs", np.int64),
        ("heartbeat", np.float64),  # on the monotonic clock of the machine
    ]
)
_WORKER: Final = np.dtype([("run", np.int64), ("interrupt", np.int64), ("entry", ENTRY)])
_MAGIC: Final = b"Tworkers"
_LAYOUT: Final = zlib.crc32(repr((_HEADER.descr, _WORKER.descr)).encode())  # differs wherever a table is read otherwise
_COUNTS: Final = slice(0, 24)  # bytes of an entry that say what else there is to read
_REST: Final = slice(24, ENTRY.itemsize)


class WorkerTable:
    """Shared memory of a pool: a stop flag, and orders and an entry for each worker.

    Each entry has a single writer, the worker it belongs to; the pool reads it, and clears its pid between two runs.
    The flag and the orders have a single writer too, the pool.

    Every process of this machine that unpickles the table attaches to it; it is freed with its last user. On another
    node of a Ray cluster it unpickles to a copy, all zero, which a `TableReplica` keeps like the original.

    Attributes:
        entries: Structured array `[num_workers]` with the columns of `ENTRY`.
        is_copy: Whether it is such a copy.
    """

    def __init__(self, num_workers: int) -> None:
        fd = reserve(_HEADER.itemsize + num_workers * _WORKER.itemsize, _WHAT)
        self._lay_out(mmap.mmap(fd, 0), make_handle(fd, new_nonce()))
        self._header["layout"] = _LAYOUT
        self._header["magic"] = _MAGIC  # last: who sees it sees a table
        weakref.finalize(self, os.close, fd)  # others attach through the descriptor: it stays open

    def _lay_out(self, memory: mmap.mmap, handle: Handle, is_copy: bool = False) -> None:
        self._handle, self.is_copy = handle, is_copy
        self._header: npt.NDArray[np.void] = np.frombuffer(memory, _HEADER, 1)
        self._stop: npt.NDArray[np.int64] = self._header["stop"]
        self._workers: npt.NDArray[np.void] = np.frombuffer(memory, _WORKER, offset=_HEADER.itemsize)
        self.entries: npt.NDArray[np.void] = self._workers["entry"]

    @property
    def stopped(self) -> bool:
        """Whether the workers are to finish; one load from shared memory."""
        return bool(self._stop[0])

    @stopped.setter
    def stopped(self, value: bool) -> None:
        self._stop[0] = value

    @property
    def wanted(self) -> int:
        """The version of the weights whose evaluation the program waits for; 0 at first."""
        return int(self._header["wanted"][0])

    @wanted.setter
    def wanted(self, version: int) -> None:
        self._header["wanted"] = version

    def launch(self, index: int, run: int) -> None:
        """Notes that run number `run` of worker `index` is to begin; later reports of earlier runs are ignored."""
        self._workers["run"][index], self._workers["interrupt"][index] = run, 0
        self.entries[index]["pid"] = 0

    def is_of(self, index: int, run: int) -> bool:
        """Whether this is the present run of worker `index`."""
        return int(self._workers["run"][index]) == run

    def begin(self, index: int) -> None:
        """Notes that worker `index` runs in this process."""
        self.entries[index]["node"] = ray_node().encode()
        self.entries[index]["pid"] = os.getpid()

    def is_on(self, index: int, node: str) -> bool:
        """Whether worker `index` runs on that node of Ray's, or has nothing to do with Ray."""
        return self.entries[index]["node"] in (b"", node.encode())

    def interrupt(self, index: int) -> None:
        """Has worker `index` interrupted: by its signal, which without this order is somebody else's."""
        self._workers["interrupt"][index] = 1

    def is_interrupted(self, index: int) -> bool:
        """Whether worker `index` is to be interrupted."""
        return bool(self._workers["interrupt"][index])

    def recorded(self, index: int) -> int:
        """A number that grows whenever worker `index` completes items or ends an episode.

        Rows alone are no progress: one whose every run fails after the first `reset` writes one each time.
        """
        entry = self.entries[index]
        return int(entry["items"]) + int(entry["episodes"])

    def dump_status(self, index: int) -> bytes:
        """Returns the entry of worker `index`, for `load_status` of the same table on another node."""
        entry = self.entries[index : index + 1].copy()  # at once: who sees a count sees what it counts
        heartbeat = float(entry["heartbeat"][0])
        entry["heartbeat"] = time.monotonic() - heartbeat if heartbeat else -1.0  # every machine has a clock of its own
        return entry.tobytes()

    def load_status(self, index: int, status: bytes) -> None:
        """Takes over the entry of worker `index`."""
        entry = np.frombuffer(status, ENTRY).copy()
        age = float(entry["heartbeat"][0])
        entry["heartbeat"] = time.monotonic() - age if age >= 0 else 0.0
        here, there = self.entries[index : index + 1].view(np.uint8), entry.view(np.uint8)
        here[_REST] = there[_REST]
        here[_COUNTS] = there[_COUNTS]  # last: a reader of a count finds what it counts

    def __reduce__(self) -> tuple[object, tuple[Handle]]:
        handle = self._handle  # of a table that was made before Ray was started: it is of this node all the same
        return attached_table, (handle if handle.node else replace(handle, node=ray_node()),)


def read_entries(fd: int) -> npt.NDArray[np.void]:
    """Returns a copy of the entries of a pool's table, for those who only look. `fd` may be open for reading only.

    Raises:
        ValueError: It is no table, none yet, or that of another version of torchreplay.
    """
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    (header,) = np.frombuffer(content, _HEADER, 1)
    if (header["magic"], header["layout"]) != (_MAGIC, _LAYOUT):
        raise ValueError("this is no table of a pool of workers of this version of torchreplay")
    workers = np.frombuffer(content, _WORKER, offset=_HEADER.itemsize)
    entries: npt.NDArray[np.void] = workers["entry"]
    return entries


def attached_table(handle: Handle) -> WorkerTable:
    """Attaches to a pool's table. Pickles name it: see `torchreplay.buffer.replay_buffer.attached`.

    Raises:
        AttachError: The pool is gone, or runs on another machine that is no node of this one's Ray cluster.
    """
    table = WorkerTable.__new__(WorkerTable)
    if is_elsewhere(handle.node):
        table._lay_out(mmap.mmap(-1, handle.size), handle, is_copy=True)
        return table
    fd = open_handle(handle, _WHAT)
    try:
        table._lay_out(mmap.mmap(fd, 0), handle)
    finally:
        os.close(fd)
    return table
