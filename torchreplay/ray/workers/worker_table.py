"""A pool's board: one small shared page with the stop flag and what each worker has recorded.

Statistics live in shared memory and not in messages. So recording an episode costs a microsecond and never waits, and a
killed explorer's records are not lost. Workers on other nodes record in copies of the page, which are told to the page
twice a second.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from torchreplay.ray.workers.shared_state import SharedState
from torchreplay.segment.ray_node import ray_node

WINDOW: Final = 100
"""Episodes kept per explorer for its mean return, as Gymnasium's and RLlib's running means do."""

_HEADER: Final = np.dtype([("stop", np.int64)])
# Every column but one is a naturally aligned 8-byte word: a store can be late for a reader, never torn.
_ORDERS: Final = np.dtype([("run", np.int64), ("interrupt", np.int64)])
ENTRY: Final = np.dtype(
    [
        ("pid", np.int64),  # 0 while the worker starts
        ("rows", np.int64),
        ("episodes", np.int64),
        ("node", "S64"),  # Ray's id; does not change while there is a pid
        ("steps", np.int64),
        ("returns", np.float64, (WINDOW,)),
        ("lengths", np.int64, (WINDOW,)),
        ("weight_version", np.int64),
        ("weight_syncs", np.int64),
        ("heartbeat", np.float64),  # on the monotonic clock of the machine
    ]
)
_COUNTS: Final = slice(0, 24)  # bytes of an entry that say what else there is to read
_REST: Final = slice(24, ENTRY.itemsize)


class WorkerTable(SharedState):
    """Shared memory of a pool: a stop flag, and orders and an entry for each worker.

    Each entry has a single writer, the worker it belongs to; the pool reads it, and clears its pid between two runs.
    The flag and the orders have a single writer too, the pool.

    Args:
        num_workers: Number of entries.
    """

    what = "board of a pool of workers"

    def __init__(self, num_workers: int) -> None:
        super().__init__(_HEADER.itemsize + num_workers * (_ORDERS.itemsize + ENTRY.itemsize))

    def lay_out(self, memory: mmap.mmap) -> None:
        """Names the parts of the memory."""
        num_workers = (len(memory) - _HEADER.itemsize) // (_ORDERS.itemsize + ENTRY.itemsize)
        self._stop: npt.NDArray[np.int64] = np.frombuffer(memory, _HEADER, count=1)["stop"]
        self._orders: npt.NDArray[np.void] = np.frombuffer(memory, _ORDERS, num_workers, _HEADER.itemsize)
        entries_at = _HEADER.itemsize + num_workers * _ORDERS.itemsize
        self.entries: npt.NDArray[np.void] = np.frombuffer(memory, ENTRY, num_workers, entries_at)
        """Structured array `[num_workers]` with the columns of `ENTRY`."""

    @property
    def stopped(self) -> bool:
        """Whether the workers are to finish; one load from shared memory."""
        return bool(self._stop[0])

    @stopped.setter
    def stopped(self, value: bool) -> None:
        self._stop[0] = value

    def launch(self, index: int, run: int) -> None:
        """Notes that run number `run` of worker `index` is to begin; later reports of earlier runs are ignored."""
        self._orders[index] = (run, 0)
        self.entries[index]["pid"] = 0

    def is_of(self, index: int, run: int) -> bool:
        """Whether this is the present run of worker `index`."""
        return int(self._orders[index]["run"]) == run

    def begin(self, index: int) -> None:
        """Notes that worker `index` runs in this process."""
        self.entries[index]["node"] = ray_node().encode()
        self.entries[index]["pid"] = os.getpid()

    def is_on(self, index: int, node: str) -> bool:
        """Whether worker `index` runs on that node of Ray's, or has nothing to do with Ray."""
        return self.entries[index]["node"] in (b"", node.encode())

    def interrupt(self, index: int) -> None:
        """Has worker `index` interrupted, which is on another node."""
        self._orders[index]["interrupt"] = 1

    def is_interrupted(self, index: int) -> bool:
        """Whether worker `index` is to be interrupted."""
        return bool(self._orders[index]["interrupt"])

    def told(self, index: int) -> bytes:
        """Returns the entry of worker `index`."""
        entry = self.entries[index : index + 1].copy()  # at once: who sees a count sees what it counts
        heartbeat = float(entry["heartbeat"][0])
        entry["heartbeat"] = time.monotonic() - heartbeat if heartbeat else -1.0  # every machine has a clock of its own
        return entry.tobytes()

    def hear(self, index: int, told: bytes) -> None:
        """Takes over the entry of worker `index`."""
        entry = np.frombuffer(told, ENTRY).copy()
        age = float(entry["heartbeat"][0])
        entry["heartbeat"] = time.monotonic() - age if age >= 0 else 0.0
        here, there = self.entries[index : index + 1].view(np.uint8), entry.view(np.uint8)
        here[_REST] = there[_REST]
        here[_COUNTS] = there[_COUNTS]  # last: a reader of a count finds what it counts

    def orders(self, index: int) -> bytes:
        """Returns the stop flag and the orders for worker `index`."""
        return self._stop.tobytes() + self._orders[index : index + 1].tobytes()

    def obey(self, index: int, orders: bytes) -> None:
        """Takes over the stop flag and the orders for worker `index`."""
        self._stop[0] = np.frombuffer(orders, _HEADER, count=1)["stop"][0]
        self._orders[index] = np.frombuffer(orders, _ORDERS, offset=_HEADER.itemsize)[0]

    def recorded(self, index: int) -> int:
        """A number that grows whenever worker `index` writes rows or ends an episode."""
        entry = self.entries[index]
        return int(entry["rows"]) + int(entry["episodes"])
