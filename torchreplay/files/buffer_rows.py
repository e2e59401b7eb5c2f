"""The rows of a buffer in a file (`ReplayBuffer(path=...)`), read while others may use it. Nothing is written."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.checkpoint.description import ROW_COLUMNS
from torchreplay.errors import CheckpointError
from torchreplay.files.paged_values import BUSY, TICKET_SHIFT, WRITER, PagedValues
from torchreplay.files.rows import Positions, StoredRows, as_tensor, raw_dtype
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import Limiter, from_native
from torchreplay.schema.spec import Field
from torchreplay.segment.segment_file import boot_number, opened_buffer

OFFSETS: Final = {"/priority": 8, "/step": 12, "/link": 16}
"""Of what a row's header holds, in bytes; rows that are not linked have the priority alone."""


class BufferRows(StoredRows):
    """The rows of a buffer in a file. Nothing of it is locked, repaired or written, and its users do not notice.

    Args:
        path: The file.

    Attributes:
        facts: What it had counted when it was opened.
        format: Version of its format.
        seed: Of the draws.
        nbytes: Of the file.
        limiter: That held when it was opened.

    Raises:
        FileNotFoundError: There is none.
        PermissionError: It belongs to another user.
        CheckpointError: It is no replay buffer, of another version, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = opened_buffer(path, os.O_RDONLY)
        try:
            self._reader = reader = _C.Reader(fd)
            self.config = Config.from_text(reader.text)
            self._regions = reader.regions
            self._memory = mmap.mmap(fd, reader.nbytes, prot=mmap.PROT_READ)
            words = self._column(np.dtype(np.uint64), (), self._regions["records"], self._record).copy()
            self.facts = reader.facts()  # after the words: others may write meanwhile
            self.limiter: Limiter = from_native(*self.facts["limiter"])
        except (ConnectionError, ValueError) as error:
            raise CheckpointError(f"{path} holds no replay buffer: {error}") from None
        finally:
            os.close(fd)
        self.head = self.facts["head"]
        self.format, self.seed, self.nbytes = reader.format, reader.seed, reader.nbytes
        self._slots = np.flatnonzero(_is_whole(words))
        self.keys = _keys_of(words[self._slots])
        order = np.argsort(self.keys, kind="stable")
        self._slots, self.keys = self._slots[order], self.keys[order]
        self._words = words[self._slots]
        self._paged: PagedValues | None = None
        if self.config.ragged:
            self._paged = PagedValues(self._memory, self._regions, self.config.fields, self.config.capacity)
            there = self._paged.intact(self._slots)
            self._slots, self.keys, self._words = self._slots[there], self.keys[there], self._words[there]

    @property
    def _record(self) -> int:
        return self._regions["record_stride"]

    def read(self, column: str, at: Positions) -> torch.Tensor:
        """Returns `[m, *shape]` of a column: a copy, which may be torn where `gone` says so."""
        slots = self._slots[at]
        if column == "/leaf":
            return torch.from_numpy(self._leaves(slots, at))
        if column == "/key":
            return torch.from_numpy(self.keys[at])
        if column in ROW_COLUMNS:
            return torch.from_numpy(self._of_header(column)[slots])
        fixed = {"/".join(path): f for path, f in self.config.fields.items() if isinstance(f, Field)}
        number, field = list(fixed).index(column), fixed[column]
        offset, stride = self._regions["fields"][number]
        return as_tensor(self._column(raw_dtype(field.dtype), field.shape, offset, stride)[slots], field.dtype)

    def gone(self, at: Positions) -> NDArray[np.bool_]:
        """Returns which of these rows were overwritten, or rewritten, since the file was opened."""
        words = self._column(np.dtype(np.uint64), (), self._regions["records"], self._record)
        changed: NDArray[np.bool_] = words[self._slots[at]] != self._words[at]
        return changed if self._paged is None else changed | ~self._paged.intact(self._slots[at])

    def seen(self, at: Positions) -> NDArray[np.bool_]:
        """Returns which of these rows a process has looked at since they came."""
        absorbed = self._column(np.dtype(np.uint64), (), self._regions["at"], 8)[self._slots[at]]
        seen: NDArray[np.bool_] = absorbed == self.keys[at].astype(np.uint64) + 1
        return seen

    def lengths(self, column: str, at: Positions) -> NDArray[np.int64]:
        """Returns int64 `[m]`: how many elements the values of a ragged field have; 0 where `gone` says so."""
        assert self._paged is not None  # there are ragged fields
        return self._paged.lengths(column, self._slots[at])

    def read_ragged(self, column: str, at: Positions) -> list[torch.Tensor]:
        """Returns m values `[length, *shape]` of a ragged field: copies, which may be torn where `gone` says so."""
        assert self._paged is not None  # there are ragged fields
        return self._paged.read(column, self._slots[at])

    def state(self) -> str:
        """Returns who uses the file now, or else how it was left, in words."""
        holders = holders_of(self.path)
        if holders:
            return f"in use by {len(holders)} process{'es' * (len(holders) > 1)}: {', '.join(map(str, holders))}"
        if self._reader.in_use:
            return "in use, by processes that cannot be named from here"
        if self._reader.sealed:
            return "closed in order: everything is on the disk"
        if self._reader.boot == boot_number():
            return "its processes died without closing it: ReplayBuffer.open repairs it"
        return "in use when the machine went down: what is on the disk need not fit together"

    def _leaves(self, slots: NDArray[np.int64], at: Positions) -> NDArray[np.float32]:
        """A leaf is of the row that was absorbed; a newer one waits for that."""
        leaves = self._column(np.dtype(np.float32), (), self._regions["leaves"], 4)[slots]
        return np.where(self.seen(at), leaves, np.float32(0))

    def _of_header(self, column: str) -> NDArray[Any]:
        dtype = np.dtype(str(ROW_COLUMNS[column]).removeprefix("torch."))
        if not self.linked and column != "/priority":
            return np.zeros(self.config.capacity, dtype)
        return self._column(dtype, (), self._regions["records"] + OFFSETS[column], self._record)

    def _column(self, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, stride: int) -> NDArray[Any]:
        inner = np.empty(shape, dtype).strides
        return np.ndarray((self.config.capacity, *shape), dtype, self._memory, offset, (stride, *inner))


def _is_whole(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Returns which of these rows were written to their end."""
    whole: NDArray[np.bool_] = (words & WRITER != 0) & (words & BUSY == 0)
    return whole


def _keys_of(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (words >> TICKET_SHIFT).astype(np.int64) - 1


def holders_of(path: Path) -> list[int]:
    """Returns processes that hold the lock which every user of a file shares, as the kernel lists them.

    It lists none of another pid namespace, and none on filesystems that number their devices in two ways, such as btrfs
    and overlay: an empty list does not mean that nobody uses the file.
    """
    status = path.stat()
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    entries = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return sorted({int(entry[4]) for entry in entries if entry[1] == "FLOCK" and entry[5] == name})
