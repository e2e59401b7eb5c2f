"""The rows of a buffer in a file (`ReplayBuffer(path=...)`), read while others may use it. Nothing is written."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.checkpoint.description import ROW_COLUMNS
from torchreplay.errors import CheckpointError
from torchreplay.files.rows import Positions, StoredRows, as_tensor, column_dtype, raw_dtype
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import Limiter, from_native
from torchreplay.segment.segment_file import boot_number

BUSY: Final = 1
WRITER: Final = 0xFFFE
"""Bits of a row's word: it is being written; who wrote it. The key + 1 is above them."""
KEY_SHIFT: Final = 16
OFFSETS: Final = {"/priority": 8, "/step": 12, "/link": 16}
"""Of what a row's header holds, in bytes; rows that are not linked have the priority alone."""


class Phase(IntEnum):
    """In what state a file is; in the order of the native core's `Phase`."""

    MEMORY = 0
    IN_USE = 1
    REPAIRING = 2
    SEALED = 3


class BufferRows(StoredRows):
    """The rows of a buffer in a file. Nothing of it is locked, repaired or written, and its users do not notice.

    Args:
        path: The file.

    Attributes:
        facts: What the header says.
        limiter: That holds now.

    Raises:
        FileNotFoundError: There is none.
        PermissionError: It belongs to another user.
        CheckpointError: It is no replay buffer, of another version, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = _opened(path)
        try:
            self.facts = _C.read_segment(fd)
            self.config = Config.from_text(self.facts["text"])
            self.limiter: Limiter = from_native(*self.facts["limiter"])
            self._memory = mmap.mmap(fd, self.facts["regions"]["bytes"], prot=mmap.PROT_READ)
            words = self._column(np.dtype(np.uint64), (), self.facts["regions"]["records"], self._record).copy()
            self.head = _C.read_segment(fd)["head"]  # after the words: others may write meanwhile
        except (ConnectionError, ValueError) as error:
            raise CheckpointError(f"{path} holds no replay buffer: {error}") from None
        finally:
            os.close(fd)
        there = np.flatnonzero((words & WRITER != 0) & (words & BUSY == 0))
        order = there[np.argsort(words[there] >> KEY_SHIFT, kind="stable")]
        self._slots, self._words = order, words[order]
        self.keys = (self._words >> KEY_SHIFT).astype(np.int64) - 1

    @property
    def _record(self) -> int:
        return self.facts["regions"]["record_stride"]

    def read(self, column: str, at: Positions) -> torch.Tensor:
        """Returns `[m, *shape]` of a column: a copy, which may be torn where `gone` says so."""
        slots = self._slots[at]
        if column == "/leaf":
            return torch.from_numpy(self._leaves(slots, at))
        if column == "/key":
            return torch.from_numpy(self.keys[at])
        if column in ROW_COLUMNS:
            return torch.from_numpy(self._of_header(column)[slots])
        number = self.fields.index(column)
        field = list(self.config.fields.values())[number]
        offset, stride = self.facts["regions"]["fields"][number]
        return as_tensor(self._column(raw_dtype(field.dtype), field.shape, offset, stride)[slots], field.dtype)

    def gone(self, at: Positions) -> NDArray[np.bool_]:
        """Returns which of these rows were overwritten since the file was opened."""
        words = self._column(np.dtype(np.uint64), (), self.facts["regions"]["records"], self._record)
        changed: NDArray[np.bool_] = words[self._slots[at]] != self._words[at]
        return changed

    def _leaves(self, slots: NDArray[np.int64], at: Positions) -> NDArray[np.float32]:
        """A leaf is of the row that was absorbed; a newer one waits for that."""
        regions = self.facts["regions"]
        leaves = self._column(np.dtype(np.float32), (), regions["leaves"], 4)[slots]
        absorbed = self._column(np.dtype(np.uint64), (), regions["at"], 8)[slots]
        return np.where(absorbed == self.keys[at].astype(np.uint64) + 1, leaves, np.float32(0))

    def _of_header(self, column: str) -> NDArray[Any]:
        dtype = column_dtype(column)
        if not self.linked and column != "/priority":
            return np.zeros(self.config.capacity, dtype)
        return self._column(dtype, (), self.facts["regions"]["records"] + OFFSETS[column], self._record)

    def _column(self, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, stride: int) -> NDArray[Any]:
        inner = np.empty(shape, dtype).strides
        return np.ndarray((self.config.capacity, *shape), dtype, self._memory, offset, (stride, *inner))


def state_of(rows: BufferRows) -> str:
    """Returns in what state a file is, in words."""
    phase, here = rows.facts["phase"], rows.facts["boot"] == boot_number()
    if phase == Phase.SEALED:
        return "closed in order: everything is on the disk"
    if phase in (Phase.IN_USE, Phase.REPAIRING) and here:
        users = users_of(rows.path)
        if users:
            return f"in use by {len(users)} process{'es' if len(users) > 1 else ''}: {', '.join(map(str, users))}"
        return "its processes died without closing it: ReplayBuffer.open repairs it"
    return "in use when the machine went down: what is on the disk need not fit together"


def users_of(path: Path) -> list[int]:
    """Returns the processes that hold the lock which every user of a file shares, as the kernel lists them."""
    status = path.stat()
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    entries = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return sorted({int(entry[4]) for entry in entries if entry[1] == "FLOCK" and entry[5] == name})


def _opened(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    if stat.S_ISREG(status.st_mode):
        raise PermissionError(errno.EPERM, "only the user who owns the file of a replay buffer can open it", str(path))
    raise CheckpointError(f"{path} holds no replay buffer: it is no regular file")
