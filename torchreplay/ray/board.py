"""A pool's board: one small shared page with the stop flag and what each worker has recorded.

Statistics live in shared memory rather than in messages so that recording an episode costs a
microsecond, never waits for anyone, and what a killed explorer had recorded is not lost with it.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

from torchreplay.ray.page import SharedPage

WINDOW: Final = 100
"""Episodes kept per explorer for its mean return, as Gymnasium's and RLlib's running means do."""

_HEADER: Final = np.dtype([("stop", np.int64)])
# Every column is a naturally aligned 8-byte word: a store can be late for a reader, never torn.
ENTRY: Final = np.dtype(
    [
        ("pid", np.int64),
        ("rows", np.int64),
        ("episodes", np.int64),
        ("steps", np.int64),
        ("returns", np.float64, (WINDOW,)),
        ("lengths", np.int64, (WINDOW,)),
        ("weight_version", np.int64),
        ("weight_syncs", np.int64),
        ("heartbeat", np.float64),  # on the monotonic clock of the machine
    ]
)


class Board(SharedPage):
    """Shared memory of a pool: a stop flag and one entry for each worker.

    Each entry has a single writer, the worker it belongs to; the pool only reads.

    Args:
        num_workers: Number of entries.
    """

    what = "board of a pool of workers"

    def __init__(self, num_workers: int) -> None:
        super().__init__(_HEADER.itemsize + num_workers * ENTRY.itemsize)

    def lay_out(self, memory: mmap.mmap) -> None:
        """Names the parts of the memory."""
        self._stop: npt.NDArray[np.int64] = np.frombuffer(memory, _HEADER, count=1)["stop"]
        self.entries: npt.NDArray[np.void] = np.frombuffer(memory, ENTRY, offset=_HEADER.itemsize)
        """Structured array `[num_workers]` with the columns of `ENTRY`."""

    @property
    def stopped(self) -> bool:
        """Whether the pool told its workers to finish; one load from shared memory."""
        return bool(self._stop[0])

    @stopped.setter
    def stopped(self, value: bool) -> None:
        self._stop[0] = value

    def recorded(self, index: int) -> int:
        """A number that grows whenever worker `index` writes rows or ends an episode."""
        entry = self.entries[index]
        return int(entry["rows"]) + int(entry["episodes"])
