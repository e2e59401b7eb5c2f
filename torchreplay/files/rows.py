"""`StoredRows`: the rows of a file, in the order of their keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.buffer.episodes import chains
from torchreplay.schema.config import Config
from torchreplay.schema.samplers import priorities_of
from torchreplay.schema.spec import Field, nest

Positions: TypeAlias = NDArray[np.int64]

CHUNK_BYTES: Final = 16 << 20
CHUNK_ROWS: Final = 1 << 17
"""What is in memory at a time: at most so many bytes of values, or one row; and at most so many rows."""


class StoredRows(ABC):
    """The rows of a checkpoint or of a buffer in a file, oldest first. Columns are read where they lie.

    Attributes:
        config: Of the buffer.
        keys: int64 `[n]`, ascending: of the rows that were there when the file was opened.
        head: The next key.
    """

    config: Config
    keys: NDArray[np.int64]
    head: int

    @abstractmethod
    def read(self, column: str, at: Positions) -> torch.Tensor:
        """Returns `[m, *shape]` of a column: a copy.

        Args:
            column: A field's name, nested ones joined by '/'; or one of `ROW_COLUMNS`.
            at: Positions in `keys`, int64 `[m]`.
        """

    @abstractmethod
    def lengths(self, column: str, at: Positions) -> NDArray[np.int64]:
        """Returns int64 `[m]`: how many elements the values of a ragged field have.

        Args:
            column: The field's name.
            at: Positions in `keys`, int64 `[m]`.
        """

    @abstractmethod
    def read_ragged(self, column: str, at: Positions) -> list[torch.Tensor]:
        """Returns m values `[length, *shape]` of a ragged field: copies.

        Args:
            column: The field's name.
            at: Positions in `keys`, int64 `[m]`.
        """

    @abstractmethod
    def gone(self, at: Positions) -> NDArray[np.bool_]:
        """Returns bool `[m]`: which of these rows were overwritten, or rewritten, since the file was opened."""

    def seen(self, at: Positions) -> NDArray[np.bool_]:
        """Returns bool `[m]`: which of these rows somebody has looked at, so that items were made of them."""
        return np.ones(len(at), bool)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def fields(self) -> list[str]:
        """The names of the fields, nested ones joined by '/'."""
        return ["/".join(path) for path in self.config.fields]

    @property
    def linked(self) -> bool:
        """Whether the view links the rows of an episode."""
        return self.config.view.roles(self.config.fields) is not None

    def priorities(self, at: Positions) -> torch.Tensor:
        """Returns the raw priorities of the items anchored at these rows, float32 `[m]`; NaN: it cannot be drawn."""
        leaves = self.read("/leaf", at).double()
        raw = priorities_of(leaves.clamp(min=torch.finfo(torch.float32).tiny), self.config.sampler).float()
        return torch.where(leaves > 0, raw, torch.nan)

    def chunks(self, row_bytes: int, ragged: Sequence[str] = ()) -> Iterator[Positions]:
        """Yields all positions, in pieces of at most `CHUNK_BYTES` and `CHUNK_ROWS`.

        Args:
            row_bytes: Of what is read of a row, beside its ragged fields.
            ragged: Those of its ragged fields that are read.
        """
        step = min(max(1, CHUNK_BYTES // max(1, row_bytes)), CHUNK_ROWS)
        columns = dict(zip(self.fields, self.config.fields.values(), strict=True))
        for first in range(0, len(self), step):
            at = np.arange(first, min(first + step, len(self)))
            nbytes = row_bytes + sum(self.lengths(name, at) * columns[name].nbytes for name in ragged)
            yield from np.split(at, _cuts(np.broadcast_to(nbytes, len(at))))

    def episodes(self, unfinished: bool = False) -> Iterator[dict[str, Any]]:
        """Yields the episodes, as `ReplayBuffer.episodes` does, without those whose rows were overwritten meanwhile.

        Raises:
            ValueError: The view links no rows.
        """
        roles = self.config.view.roles(self.config.fields)
        if roles is None:
            raise ValueError(f"the view is {self.config.view}: its rows belong to no episode")
        everything = np.arange(len(self))
        link = self.read("/link", everything).numpy()
        for keys in chains(self.keys, link, unfinished):
            at = np.searchsorted(self.keys, keys)
            ragged = self.config.ragged
            rows = [self.read_ragged(name, at) if name in ragged else self.read(name, at) for name in self.fields]
            if not self.gone(at).any():
                parts = (row if i in roles.observation else row[1:] for i, row in enumerate(rows))
                yield nest(dict(zip(self.config.fields, parts, strict=True)))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's values, but for those of ragged fields."""
        return sum(field.nbytes for field in self.config.fields.values() if isinstance(field, Field))


def _cuts(nbytes: NDArray[np.int64]) -> list[int]:
    """Returns where to cut rows of so many bytes into pieces of at most `CHUNK_BYTES`, or one row."""
    ends, cuts = np.cumsum(nbytes), list[int]()
    before = 0
    while (cut := int(np.searchsorted(ends, before + CHUNK_BYTES, side="right"))) < len(ends):
        cut = max(cut, cuts[-1] + 1 if cuts else 1)
        if cut == len(ends):
            break
        cuts.append(cut)
        before = int(ends[cut - 1])
    return cuts


def as_tensor(values: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Returns raw elements of `dtype`'s size as a tensor of `dtype`."""
    return torch.from_numpy(values).view(dtype)


def raw_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Returns the unsigned integers in which elements of `dtype` are read, so that every byte comes through."""
    return np.dtype(f"u{dtype.itemsize}")
