"""The explorers' board: one small shared page with the stop flag and what each explorer has recorded.

Statistics live in shared memory rather than in messages so that recording an episode costs a
microsecond, never waits for anyone, and what a killed explorer had recorded is not lost with it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Final

import numpy as np
import numpy.typing as npt

from torchreplay.segment import Handle, make_handle, new_nonce, open_handle, reserve

WINDOW: Final = 100
"""Episodes kept per explorer for its mean return, as Gymnasium's and RLlib's running means do."""

_WHAT: Final = "board of an explorer pool"

_HEADER: Final = np.dtype([("stop", np.int64)])
# Every column is a naturally aligned 8-byte word: a store can be late for a reader, never torn.
_ENTRY: Final = np.dtype(
    [
        ("pid", np.int64),
        ("rows", np.int64),
        ("episodes", np.int64),
        ("steps", np.int64),
        ("returns", np.float64, (WINDOW,)),
        ("lengths", np.int64, (WINDOW,)),
    ]
)


class Board:
    """Shared memory of an `ExplorerPool`: a stop flag and one entry for each explorer.

    Each entry has a single writer, the explorer it belongs to; the pool only reads. It pickles to
    the address of its memory, so that a process of the same machine attaches to the same board.

    Args:
        num_explorers: Number of entries.
    """

    def __init__(self, num_explorers: int) -> None:
        fd = reserve(_HEADER.itemsize + num_explorers * _ENTRY.itemsize, _WHAT)
        self._map(fd)
        self._handle = make_handle(fd, new_nonce())
        weakref.finalize(self, os.close, fd)  # others attach through the descriptor: it stays open

    def _map(self, fd: int) -> None:
        memory = mmap.mmap(fd, 0)
        self._stop: npt.NDArray[np.int64] = np.frombuffer(memory, _HEADER, count=1)["stop"]
        self.entries: npt.NDArray[np.void] = np.frombuffer(memory, _ENTRY, offset=_HEADER.itemsize)
        """Structured array `[num_explorers]`: pid, rows, episodes, steps, returns, lengths."""

    @classmethod
    def attach(cls, handle: Handle) -> Board:
        """Attaches to a board of another process of this machine.

        Raises:
            AttachError: The process that made the board is gone, or runs on another machine.
        """
        fd = open_handle(handle, _WHAT)
        board = cls.__new__(cls)
        board._handle = handle
        try:
            board._map(fd)
        finally:
            os.close(fd)
        return board

    def __reduce__(self) -> tuple[object, tuple[Handle]]:
        return Board.attach, (self._handle,)

    @property
    def stopped(self) -> bool:
        """Whether the pool told its explorers to finish; one load from shared memory."""
        return bool(self._stop[0])

    @stopped.setter
    def stopped(self, value: bool) -> None:
        self._stop[0] = value

    def recorded(self, index: int) -> int:
        """A number that grows whenever explorer `index` writes rows or ends an episode."""
        entry = self.entries[index]
        return int(entry["rows"]) + int(entry["episodes"])
