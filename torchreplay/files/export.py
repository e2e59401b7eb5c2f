"""Rows of a file in the formats of others: safetensors, NPZ, and HDF5 as Minari has it.

What is written lies under another name until it is complete.
"""

from __future__ import annotations

import math
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.buffer.episodes import LINK_BITS
from torchreplay.checkpoint.safetensors_io import header_of
from torchreplay.errors import CheckpointError
from torchreplay.files.rows import Positions, StoredRows
from torchreplay.schema.spec import Field

OWN: Final = {"row.key": torch.int64, "row.priority": torch.float32}
"""Columns beside the fields."""
OF_EPISODES: Final = {"row.previous": torch.int64, "row.step": torch.int64}
"""Those that rows of episodes have, too: the key of the row before, -1 at a start; the index in the episode."""

VALUES: Final = ".values"
OFFSETS: Final = ".offsets"
"""What the names of the two columns of a ragged field end with: all elements, one value after the other; and int64
`[n + 1]`, where each begins, and the last one ends."""

Write = Callable[[Path], int]


class Columns:
    """The columns of an export: the fields, and what each row has beside them. A ragged field has two columns.

    Args:
        rows: That are exported.

    Attributes:
        kinds: dtype and shape of each, by name.

    Raises:
        ValueError: A field has the name of another column.
    """

    def __init__(self, rows: StoredRows) -> None:
        self._rows, n = rows, len(rows)
        self.kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._ragged: dict[str, str] = {}
        self._ends: dict[str, NDArray[np.int64]] = {}
        for name, field in zip(rows.fields, rows.config.fields.values(), strict=True):
            if isinstance(field, Field):
                self._add(name, field.dtype, (n, *field.shape))
                continue
            lengths = rows.lengths(name, np.arange(n))
            self._ends[name] = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            self._ragged |= {name + VALUES: name, name + OFFSETS: name}
            self._add(name + VALUES, field.dtype, (int(self._ends[name][-1]), *field.shape))
            self._add(name + OFFSETS, torch.int64, (n + 1,))
        for name, dtype in (OWN | (OF_EPISODES if rows.linked else {})).items():
            self._add(name, dtype, (n,))

    def _add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if name in self.kinds:
            raise ValueError(f"the spec has a field named {name!r}, which an export needs for itself")
        self.kinds[name] = dtype, shape

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yields a column, piece by piece.

        Raises:
            CheckpointError: Rows were overwritten meanwhile.
        """
        ragged = self._ragged.get(name)
        if ragged and name.endswith(OFFSETS):
            yield torch.from_numpy(self._ends[ragged])
            return
        dtype, shape = self.kinds[name]
        row_bytes = 0 if ragged else dtype.itemsize * math.prod(shape[1:])
        for at in self._rows.chunks(row_bytes, [ragged] if ragged else []):
            values = self._values(name, at) if ragged is None else self._values_of(ragged, at)
            if self._rows.gone(at).any():
                raise CheckpointError(
                    "rows were overwritten while they were exported, by those who use the file: have one of them "
                    "save a checkpoint, buffer.save(directory), and export that"
                )
            yield values

    def _values_of(self, name: str, at: Positions) -> torch.Tensor:
        """Returns the values of a ragged field, one after the other."""
        dtype, (_, *shape) = self.kinds[name + VALUES]
        values = self._rows.read_ragged(name, at)
        parts = [value.reshape(-1).view(torch.uint8) for value in values if value.numel()]
        return torch.cat([torch.empty(0, dtype=torch.uint8), *parts]).view(dtype).view(-1, *shape)

    def _values(self, name: str, at: Positions) -> torch.Tensor:
        if name == "row.key":
            return torch.from_numpy(self._rows.keys[at])
        if name == "row.priority":
            return self._rows.priorities(at)
        if name == "row.previous":
            return (self._rows.read("/link", at) >> LINK_BITS) - 1
        if name == "row.step":
            return torch.from_numpy(self._rows.read("/step", at).numpy().view(np.uint32).astype(np.int64))
        return self._rows.read(name, at)


def write_safetensors(rows: StoredRows, path: Path) -> int:
    """Writes the new file `path` in the safetensors format: a tensor a column, `[n, *shape]`, oldest row first.

    A ragged field has two, `name.values` `[total, *shape]` and `name.offsets` int64 `[n + 1]`: the value of row i has
    the elements from `offsets[i]` to `offsets[i + 1]`.

    Returns:
        Rows written.
    """
    columns = Columns(rows)
    named = {f"/{name}" if name == "__metadata__" else name: name for name in columns.kinds}
    header = header_of({to: columns.kinds[name] for to, name in named.items()})
    with path.open("xb") as file:
        file.write(header)
        for name in sorted(columns.kinds, key=lambda name: -columns.kinds[name][0].itemsize):
            for values in columns.chunks(name):
                file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        _to_disk(file)
    return len(rows)


def write_npz(rows: StoredRows, path: Path) -> int:
    """Writes the new file `path` as NumPy's `savez` does: an array a column, `[n, *shape]`, oldest row first.

    A ragged field has two, as `write_safetensors` says. NumPy has no bfloat16: such fields become float32.

    Returns:
        Rows written.
    """
    columns = Columns(rows)
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, (dtype, shape) in columns.kinds.items():
                kind = np.dtype(str(as_numpy_has_it(torch.empty((), dtype=dtype)).dtype).removeprefix("torch."))
                about = {
                    "descr": np.lib.format.dtype_to_descr(kind),
                    "fortran_order": False,
                    "shape": shape,
                }
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(member, about)
                    for values in columns.chunks(name):
                        member.write(np.ascontiguousarray(as_numpy_has_it(values).numpy()).data.cast("B"))
        _to_disk(file)
    return len(rows)


def as_numpy_has_it(values: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of a dtype that NumPy has: float32 for bfloat16."""
    return values.float() if values.dtype == torch.bfloat16 else values


def safely(path: Path, write: Write, replace: bool) -> int:
    """Has a file written under another name, which it keeps until it is complete and on the disk.

    Args:
        path: Where it will be.
        write: Makes a new file; returns what this function returns.
        replace: Whether a file that is there is replaced.

    Raises:
        FileExistsError: There is a file, and `replace` is False.
        OSError: The disk is full, or the directory cannot be written.
    """
    if not replace and os.path.lexists(path):
        raise FileExistsError(f"{path} is there already: --force replaces it")
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}{path.suffix}")
    try:
        count = write(fresh)
        if replace:
            fresh.replace(path)
        else:
            _C.rename_new(os.fsencode(fresh), os.fsencode(path))
    finally:
        fresh.unlink(missing_ok=True)
    return count


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
