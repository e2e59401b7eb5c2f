"""The values of ragged fields in the file of a buffer, read where they lie in its pages, while others may write."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.schema.spec import Column, Path, Ragged, length_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchreplay._C import Regions

BUSY: Final = 1
WRITER: Final = 0xFFFE
"""Bits of the word of a row or a page: it is being written; who wrote it. The key or ticket + 1 is above them."""
TICKET_SHIFT: Final = 16
ALIGNMENT: Final = 8
"""Each value of a row begins at a multiple of so many bytes of its run."""
LARGEST_SHARE: Final = 4
"""A row takes at most this part of `ragged_bytes`: a quarter."""


class PagedValues:
    """Where the values of rows lie: each row has a run of pages, whose words name the tickets of the run.

    Args:
        memory: Of the file.
        regions: Where everything lies in it.
        fields: Of the buffer, by path, with ragged ones among them.
        capacity: Slots.
    """

    def __init__(self, memory: mmap.mmap, regions: Regions, fields: Mapping[Path, Column], capacity: int) -> None:
        self._memory, self._capacity = memory, capacity
        self._page, self._pages = regions["page_bytes"], regions["page_count"]
        self._most = -(-(regions["ragged_bytes"] // LARGEST_SHARE) // ALIGNMENT) * ALIGNMENT
        self._words = np.ndarray(self._pages, np.uint64, memory, regions["page_words"])
        self._values = regions["pages"]
        self._ragged = {"/".join(path): field for path, field in fields.items() if isinstance(field, Ragged)}
        leaders = length_names(fields)
        self._group = {name: leaders.index(field.like or name) for name, field in self._ragged.items()}
        hidden = regions["fields"][len(fields) - len(self._ragged) :]
        self._run1 = self._column(np.dtype(np.uint64), *hidden[0])
        self._lengths = [self._column(np.dtype(np.uint32), *place) for place in hidden[1:]]

    def intact(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns bool `[m]`: whether the rows in these slots have all their pages."""
        first, need, _, sound = self._runs(slots)
        page = first % self._pages
        whole = sound & ((need == 0) | (page + need <= self._pages))
        need = np.where(whole, need, 0)
        row = np.repeat(np.arange(len(slots)), need)
        place = np.arange(len(row)) - np.repeat(np.cumsum(need) - need, need)
        words = self._words[page[row] + place]
        ticket1 = (words >> np.uint64(TICKET_SHIFT)).astype(np.int64)
        bad = (ticket1 != first[row] + place + 1) | (words & WRITER == 0) | (words & BUSY != 0)
        whole[row[bad]] = False
        found: NDArray[np.bool_] = whole
        return found

    def lengths(self, name: str, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns int64 `[m]`, the lengths of a field's values in these slots; 0 for such as no writer writes."""
        _, _, lengths, _ = self._runs(slots)
        return lengths[self._group[name]]

    def read(self, name: str, slots: NDArray[np.int64]) -> list[torch.Tensor]:
        """Returns the values `[length, *shape]` of a field, copies: whole if the rows are intact before and after.

        Args:
            name: Of the field.
            slots: Of rows, int64 `[m]`.
        """
        field = self._ragged[name]
        first, _, lengths, _ = self._runs(slots)
        begin = np.zeros(len(slots), np.int64)
        for other, column in self._ragged.items():
            if other == name:
                break
            begin += _aligned(lengths[self._group[other]] * column.nbytes)
        at = self._values + first % self._pages * self._page + begin
        counts = lengths[self._group[name]]
        return [self._value(field, int(a), int(n)) for a, n in zip(at, counts, strict=True)]

    def _value(self, field: Ragged, at: int, length: int) -> torch.Tensor:
        content = self._memory[at : at + length * field.nbytes] if length else b""
        if not content:
            return torch.empty((0, *field.shape), dtype=field.dtype)
        return torch.frombuffer(bytearray(content), dtype=field.dtype).reshape(length, *field.shape)

    def _runs(
        self, slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[NDArray[np.int64]], NDArray[np.bool_]]:
        """Returns first tickets, pages, and lengths of each group; and which are such as a writer writes.

        Of those that are not, lengths are 0: nothing is read past an end, whatever the file says.
        """
        lengths = [column[slots].astype(np.int64) for column in self._lengths]
        sound = np.ones(len(slots), np.bool_)
        for name, field in self._ragged.items():
            sound &= lengths[self._group[name]] <= self._most // field.nbytes
        lengths = [np.where(sound, length, 0) for length in lengths]
        taken = sum(_aligned(lengths[self._group[name]] * field.nbytes) for name, field in self._ragged.items())
        need = -(-np.asarray(taken, np.int64) // self._page)
        run1 = self._run1[slots]
        sound &= (np.asarray(taken) <= self._most) & ((run1 == 0) == (need == 0)) & (run1 < 1 << 62)
        first = np.where(sound & (run1 > 0), run1.astype(np.int64) - 1, 0)
        sound &= first % self._pages + need <= self._pages
        lengths = [np.where(sound, length, 0) for length in lengths]
        return first, np.where(sound, need, 0), lengths, sound

    def _column(self, dtype: np.dtype[np.unsignedinteger], offset: int, stride: int) -> NDArray[np.unsignedinteger]:
        return np.ndarray((self._capacity,), dtype, self._memory, offset, (stride,))


def _aligned(nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
