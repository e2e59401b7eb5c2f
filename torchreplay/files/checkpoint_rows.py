"""The rows of a checkpoint, in its directory or in an archive: each column is read where it lies in its file."""

from __future__ import annotations

import json
import os
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.checkpoint.description import LENGTHS, ROW_COLUMNS, Description, RowsGone, lengths_of, with_rows
from torchreplay.checkpoint.directory import NAME, unsealed
from torchreplay.checkpoint.safetensors_io import DTYPES
from torchreplay.errors import CheckpointError
from torchreplay.files.rows import Positions, StoredRows, as_tensor, raw_dtype
from torchreplay.schema.config import DAMAGED
from torchreplay.schema.limiters import Limiter
from torchreplay.schema.spec import Ragged
from torchreplay.segment.regular_file import open_regular

OPEN_SHARDS: Final = 64
"""Files of rows that are mapped at a time."""
PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where a file of rows lies.

    Attributes:
        path: The file, or the archive that holds it.
        offset: In bytes, from where it begins.
        size: In bytes.
    """

    path: Path
    offset: int
    size: int

    def mapped(self) -> NDArray[np.uint8]:
        """Returns its bytes, uint8 `[size]`, mapped.

        Raises:
            OSError, ValueError: It is no such file.
        """
        with open(open_regular(self.path, os.O_RDONLY), "rb") as file:
            return np.memmap(file, np.uint8, "r", self.offset, (self.size,))


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of rows, mapped.

    Attributes:
        content: uint8 `[size]`.
        columns: Where each tensor begins, and its dtype and shape.
    """

    content: NDArray[np.uint8]
    columns: dict[str, tuple[int, str, tuple[int, ...]]]

    @classmethod
    def at(cls, file: FileRange) -> Shard:
        """Maps a file.

        Raises:
            CheckpointError: It is missing, or damaged.
        """
        try:
            content = file.mapped()
            (length,) = struct.unpack("<Q", content[:8].tobytes())
            start = 8 + length
            header = json.loads(bytes(content[8:start]))
            columns = {
                name: (start + told["data_offsets"][0], str(told["dtype"]), tuple(told["shape"]))
                for name, told in header.items()
            }
        except FileNotFoundError:
            raise RowsGone(f"{file.path} is gone: the checkpoint was saved to meanwhile, so try again") from None
        except (*DAMAGED, OSError, struct.error) as error:
            raise CheckpointError(f"{file.path} is damaged: {error!r:.200}") from None
        return cls(content, columns)

    def column(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns a tensor's elements as `dtype`, which has their size, over the file.

        Raises:
            CheckpointError: It is not there, or does not fit.
        """
        try:
            offset, _, shape = self.columns[name]
            return np.ndarray(shape, dtype, self.content, offset)
        except (*DAMAGED, MemoryError) as error:
            raise CheckpointError(f"a file of rows is damaged, its column {name!r}: {error!r:.200}") from None


class CheckpointRows(StoredRows):
    """The rows of a checkpoint.

    Args:
        description: What it says of itself.
        files: Of rows, in the order of the description.

    Attributes:
        description: What it says of itself.
        limiter: The buffer's.

    Raises:
        CheckpointError: A file is missing or damaged.
    """

    def __init__(self, description: Description, files: list[FileRange]) -> None:
        self.description, self.config, self.files = description, description.config, files
        self.limiter: Limiter = description.config.limiter
        self.head = int(description.counts[0])
        self._ragged = {"/".join(path): c for path, c in self.config.fields.items() if isinstance(c, Ragged)}
        lengths = lengths_of(self.config)
        self._names = dict(zip([*self.fields, *lengths, *ROW_COLUMNS], description.columns, strict=True))
        self._shard: Callable[[int], Shard] = lru_cache(OPEN_SHARDS)(lambda number: Shard.at(files[number]))
        self._ends: Callable[[str, int], NDArray[np.int64]] = lru_cache(OPEN_SHARDS)(self._ends_of)
        keys = [self._stored("/key", number) for number in range(len(files))]
        self._starts = np.cumsum([0, *map(len, keys)])
        every = np.concatenate([np.empty(0, np.int64), *keys])
        self._order = np.argsort(every, kind="stable")
        self.keys = every[self._order]

    def read(self, column: str, at: Positions) -> torch.Tensor:
        """Returns `[m, *shape]` of a column: a copy."""
        dtype, shape = self._kind(column)
        values = np.empty((len(at), *shape), raw_dtype(dtype))
        for number, here, rows in self._by_shard(at):
            values[here] = self._stored(column, number)[rows]
        return as_tensor(values, dtype)

    def lengths(self, column: str, at: Positions) -> NDArray[np.int64]:
        """Returns int64 `[m]`: how many elements the values of a ragged field have."""
        lengths = np.empty(len(at), np.int64)
        for number, here, rows in self._by_shard(at):
            ends = self._ends(column, number)
            lengths[here] = ends[rows + 1] - ends[rows]
        return lengths

    def read_ragged(self, column: str, at: Positions) -> list[torch.Tensor]:
        """Returns m values `[length, *shape]` of a ragged field: copies."""
        values: list[torch.Tensor] = [torch.empty(0)] * len(at)
        for number, here, rows in self._by_shard(at):
            ends, stored = self._ends(column, number), self._stored(column, number)
            for place, row in zip(np.flatnonzero(here).tolist(), rows.tolist(), strict=True):
                values[place] = as_tensor(np.array(stored[ends[row] : ends[row + 1]]), self._ragged[column].dtype)
        return values

    def _by_shard(self, at: Positions) -> Iterator[tuple[int, NDArray[np.bool_], NDArray[np.int64]]]:
        """Yields the files that hold rows: number, which of the rows are in it, and their places there."""
        stored = self._order[at]
        shards = np.searchsorted(self._starts, stored, side="right") - 1
        for number in np.unique(shards).tolist():
            here = shards == number
            yield number, here, stored[here] - self._starts[number]

    def _ends_of(self, column: str, number: int) -> NDArray[np.int64]:
        """Returns where the values of a ragged field end in a file, int64 `[rows + 1]`; the first is 0.

        Raises:
            CheckpointError: The lengths and the values do not fit.
        """
        lengths = self._stored(LENGTHS + (self._ragged[column].like or column), number)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        rows, elements = self._starts[number + 1] - self._starts[number], len(self._stored(column, number))
        if len(lengths) != rows or ends[-1] != elements:
            raise CheckpointError(
                f"{self.description.shards[number][0]} is damaged: the lengths of {len(lengths):,} values of "
                f"{column!r} add up to {ends[-1]:,}, expected {rows:,} and {elements:,}"
            )
        return ends

    def gone(self, at: Positions) -> NDArray[np.bool_]:
        """Returns that none is: a checkpoint's rows stay."""
        return np.zeros(len(at), bool)

    def damaged(self, number: int) -> str | None:
        """Returns what is wrong with a file of rows, by its checksum; None: nothing."""
        name, size, checksum = self.description.shards[number]
        file, found = self.files[number], 0
        try:
            content = file.mapped()
        except FileNotFoundError:
            raise RowsGone(f"{file.path} is gone: the checkpoint was saved to meanwhile, so try again") from None
        except (OSError, ValueError) as error:
            return f"{name}: {error}"
        for at in range(0, size, PIECE):
            found = _C.checksum(content[at : at + PIECE].data, found)
        return None if found == checksum else f"{name}: its checksum is {found:08x}, not {checksum:08x}"

    def _kind(self, column: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if column in ROW_COLUMNS:
            return ROW_COLUMNS[column], ()
        if column.startswith(LENGTHS):
            return torch.uint32, ()
        field = list(self.config.fields.values())[self.fields.index(column)]
        return field.dtype, field.shape

    def _stored(self, column: str, number: int) -> NDArray[Any]:
        """Returns a column of one file, checked: raw elements of a field, and what `ROW_COLUMNS` are."""
        dtype, shape = self._kind(column)
        kind = np.dtype(np.int64) if column == "/key" else raw_dtype(dtype)
        values = self._shard(number).column(self._names[column], kind)
        told = self._shard(number).columns[self._names[column]][1]
        if values.shape[1:] != shape or told != DTYPES[dtype]:
            raise CheckpointError(
                f"{self.description.shards[number][0]} is damaged: {column!r} is {told} {list(values.shape)}, "
                f"expected {DTYPES[dtype]} [n, {', '.join(map(str, shape))}]"
            )
        return values


def of_directory(directory: Path) -> CheckpointRows:
    """Returns the rows of a checkpoint in its directory.

    Raises:
        CheckpointError: There is none, it is damaged, or a file of rows is missing or of another size.
    """

    def rows_of(description: Description) -> CheckpointRows:
        files = [FileRange(directory / name, 0, size) for name, size, _ in description.shards]
        for file in files:
            try:
                found = file.path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                raise RowsGone(f"{file.path} is missing") from None
            if found != file.size:
                raise CheckpointError(f"{file.path} is {found:,} bytes long: expected {file.size:,}")
        return CheckpointRows(description, files)

    return with_rows(directory, rows_of)


def of_archive(path: Path) -> CheckpointRows:
    """Returns the rows of a checkpoint in an archive, which stays packed.

    Raises:
        CheckpointError: It holds none, or is damaged or truncated.
    """
    try:
        with tarfile.open(path, "r:") as archive:
            members = {member.name: member for member in archive if member.isfile()}
            told = archive.extractfile(members[NAME])
            assert told is not None  # a regular file has content
            description = Description.from_data(unsealed(told.read()))
        files = [FileRange(path, members[name].offset_data, members[name].size) for name, _, _ in description.shards]
    except (*DAMAGED, tarfile.TarError, OSError) as error:
        raise CheckpointError(f"{path} holds no checkpoint, or only a part of one: {error!r:.300}") from None
    for file, (name, size, _) in zip(files, description.shards, strict=True):
        if file.size != size or file.offset + size > path.stat().st_size:
            raise CheckpointError(f"{path} is truncated: {name} should have {size:,} bytes")
    return CheckpointRows(description, files)
