"""The plain layout: each transition is a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torchreplay as tr
from torchreplay.compat.cpprb.columns import Column, equal_rows
from torchreplay.compat.cpprb.layout import Layout, Stream, Tally


class RowStream(Stream):
    """Writes rows.

    Args:
        buffer: Where to.
        columns: Of a row.

    Attributes:
        append: Writes one row whose values are just those of the fields: the quickest way that there is.
        names: The names that it takes.
    """

    def __init__(self, buffer: tr.ReplayBuffer, columns: Sequence[Column]) -> None:
        self._columns = columns
        writer = buffer.writer()
        self.append, self._extend = writer.append, writer.extend
        self.names = {column.field for column in columns}

    def add(self, values: Mapping[str, Any], priorities: NDArray[Any] | None) -> tuple[int | None, int]:
        """Writes rows."""
        rows = equal_rows(self._columns, values, priorities)
        n = len(next(iter(rows.values())))
        fields = {column.field: rows[column.name] for column in self._columns}
        try:
            keys = self._extend(priority=priorities, **fields)
        except ValueError:  # of dtypes that do not cast by themselves, or of more
            fields = {column.field: rows[column.name].astype(column.dtype, copy=False) for column in self._columns}
            keys = self._extend(priority=priorities, **fields)
        known = n and keys is not None  # from another node of a Ray cluster they are not
        return (int(keys[0]) if known else None), n

    def end_episode(self) -> None:
        """Does nothing: rows stand alone."""


class RowLayout(Layout):
    """Each transition is a row with all its columns.

    Args:
        columns: Of a row.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns

    def spec(self) -> dict[str, tr.Field]:
        """Returns a field for each column."""
        return {column.field: column.as_field() for column in self.columns}

    def view(self) -> tr.Rows:
        """Returns the plain view."""
        return tr.Rows()

    def rows(self, size: int) -> int:
        """Returns `size`."""
        return size

    def read(self, batch: tr.ReplayBatch) -> dict[str, NDArray[Any]]:
        """Returns the columns."""
        return {column.name: column.shown(batch[column.field].numpy()) for column in self.columns}

    def ordinals(self, batch: tr.ReplayBatch) -> NDArray[np.int64]:
        """Returns the keys."""
        return batch["key"].numpy()  # type: ignore[no-any-return]

    def stream(self, buffer: tr.ReplayBuffer, tally: Tally) -> RowStream:
        """Returns what writes to `buffer` from one thread."""
        return RowStream(buffer, self.columns)
