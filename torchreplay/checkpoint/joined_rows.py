"""Rows of several checkpoints that go into one buffer: which of them fit, and under which keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.checkpoint.description import HEAD, LARGEST_AGE, MAX_RAW, ROW_COLUMNS, STREAMS, Description
from torchreplay.checkpoint.safetensors_io import read_columns
from torchreplay.schema.spec import Ragged, length_names
from torchreplay.schema.views import Rows

LINK_BITS = 16
"""Flags of a row's link; above them is the key + 1 of the row before it in its stream."""


class JoinedRows(NamedTuple):
    """Rows of another checkpoint on their way into a buffer, behind those that it has, in their order.

    What one of them follows on and is left out is gone there, as if the ring had turned past it.
    """

    description: Description  # of the checkpoint
    root: Path  # where it is
    kept: NDArray[np.int64]  # their keys in it, ascending
    first: int  # the key of the first one in the buffer; the others follow without a gap
    gone: int  # key + 1 of a row that the buffer does not have

    def places(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Returns which rows of the checkpoint are kept, and the keys that those have in the buffer."""
        at = np.searchsorted(self.kept, keys)
        stays = at < len(self.kept)
        stays[stays] = self.kept[at[stays]] == keys[stays]
        return stays, self.first + at

    def moved(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns those of a file's rows that are kept, as they are to be placed."""
        fields, count = self.description.config.fields, len(columns) - len(ROW_COLUMNS)
        arrays = [column.numpy() for column in columns[len(fields) :]]
        key, link = (arrays[list(ROW_COLUMNS).index(name) - len(ROW_COLUMNS)] for name in ("/key", "/link"))
        stays, keys = self.places(key)
        before = link >> LINK_BITS
        known, above = self.places(before - 1)
        linked = np.where(known, above + 1, np.where(before > 0, self.gone, 0)) << LINK_BITS
        replaced = {id(key): keys, id(link): linked | (link & ((1 << LINK_BITS) - 1))}
        lengths = dict(zip(length_names(fields), arrays[: count - len(fields)], strict=True))
        masks = [
            np.repeat(stays, lengths[field.like or "/".join(path)]) if isinstance(field, Ragged) else stays
            for path, field in fields.items()
        ]
        values = [column[torch.from_numpy(mask)] for column, mask in zip(columns, masks, strict=False)]
        return [*values, *(torch.from_numpy(replaced.get(id(array), array)[stays]) for array in arrays)]


def joined(own: Description, home: Path, others: Sequence[Path], capacity: int) -> list[JoinedRows]:
    """Returns which rows of other checkpoints have room beside a buffer's own, and where they go.

    Where not all fit, those that have the most rows lose their oldest.

    Args:
        own: Of the checkpoint whose keys stay.
        home: Where it is.
        others: Where the others are.
        capacity: Rows that fit.

    Raises:
        CheckpointError: A description is damaged.
        ValueError, OSError: A file is damaged, or cannot be read.
    """
    told = [Description.read(root) for root in others]
    keys = [_keys_of(description, root) for description, root in zip([own, *told], [home, *others], strict=True)]
    rooms = divided(capacity, [len(each) for each in keys])
    kept = [each[max(0, len(each) - room) :] for each, room in zip(keys[1:], rooms[1:], strict=True)]
    first, count = int(own.counts[HEAD]), sum(map(len, kept))
    cut = any(len(each) and int(each[-1]) >= len(each) for each in kept)  # a row may follow on one that is left out
    cut = cut and not isinstance(own.config.view, Rows)
    if cut and first + count <= capacity:
        first = gone = first + 1  # a key that no row has
    else:
        gone = max(0, first + count - capacity)  # its slot is a newer row's
    parts = []
    for description, root, each in zip(told, others, kept, strict=True):
        parts.append(JoinedRows(description, root, each, first, gone))
        first += len(each)
    return parts


def counts_of(own: Sequence[int | float], parts: Sequence[JoinedRows]) -> tuple[int | float, ...]:
    """Returns the counters of a buffer and of rows that it is joined by: added, but for those that are maxima."""
    counts = list(own)
    for part in parts:
        added = part.description.counts
        counts = [
            max(mine, other) if place in (MAX_RAW, STREAMS, LARGEST_AGE) else mine + other
            for place, (mine, other) in enumerate(zip(counts, added, strict=True))
        ]
        counts[HEAD] = part.first + len(part.kept)
    return tuple(counts)


def divided(capacity: int, rows: Sequence[int]) -> list[int]:
    """Returns `capacity` divided into as many parts, so that as many of their `rows` fit as can, as even as that is.

    Above a level all parts have what their rows need; or if that is too much, below it. The others are at the level.
    """
    fits = sum(rows) <= capacity
    each, left = [0] * len(rows), capacity
    # The first ones have more than the level if all fit, else less.
    for rank, place in enumerate(sorted(range(len(rows)), key=lambda k: -rows[k] if fits else rows[k])):
        whole, rest = divmod(left, len(rows) - rank)
        level = whole + (rest > 0)
        each[place] = max(rows[place], level) if fits else min(rows[place], level)
        left -= each[place]
    return each


def _keys_of(description: Description, root: Path) -> NDArray[np.int64]:
    """Returns the keys of a checkpoint's rows, ascending."""
    name = description.columns[-len(ROW_COLUMNS)]
    files = [read_columns(root / file, size, [name])[0].numpy() for file, size, _ in description.shards]
    return np.sort(np.concatenate([np.empty(0, np.int64), *files]))
