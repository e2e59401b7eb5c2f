"""The card of a file with rows: what is in it, in a few lines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchreplay.checkpoint.directory import NAME
from torchreplay.files.buffer_rows import BufferRows
from torchreplay.files.checkpoint_rows import CheckpointRows
from torchreplay.files.rows import StoredRows
from torchreplay.files.source import stored_rows
from torchreplay.schema.config import Config
from torchreplay.schema.spec import Column, Ragged


@dataclass(frozen=True, slots=True)
class FieldCard:
    """A field.

    Attributes:
        name: Nested names joined by '/'.
        shape: Of a row's value; of a ragged field, of one element of it.
        dtype: Of its elements.
        nbytes: Of a row's value; of a ragged field, of one element of it.
        ragged: Whether values have any length.
        like: The field whose length they have; None: they have their own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    ragged: bool = False
    like: str | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """What a file holds.

    Attributes:
        path: The file or directory.
        kind: What it is.
        name: What people call the buffer; None: it has no name.
        state: Who uses it and how it was left, in words.
        format: Version of its format.
        nbytes: On the disk.
        capacity: Rows that fit.
        rows: Rows held.
        oldest_key: None without rows.
        newest_key: None without rows.
        next_key: That the next row gets.
        inserted: Items that ever became drawable.
        sampled: Items drawn.
        updated: TD errors applied.
        stale_updates: TD errors dropped because their row was gone.
        draws: Batches drawn.
        dropped_rows: Rows that were being written when all processes had died.
        priority_max: Largest raw priority |td| seen.
        seed: Of the draws.
        view: How rows become items.
        sampler: How items are drawn.
        limiter: Who must wait.
        ragged_bytes: For the values of ragged fields; 0: there are none.
        ragged_held: Of the values held, without what is left at the end of a page.
        fields: In the order of the spec.
    """

    path: str
    kind: Literal["checkpoint", "archive of a checkpoint", "buffer in a file"]
    name: str | None
    state: str
    format: int
    nbytes: int
    capacity: int
    rows: int
    oldest_key: int | None
    newest_key: int | None
    next_key: int
    inserted: int
    sampled: int
    updated: int
    stale_updates: int
    draws: int
    dropped_rows: int
    priority_max: float
    seed: int
    view: str
    sampler: str
    limiter: str
    ragged_bytes: int
    ragged_held: int
    fields: tuple[FieldCard, ...]


def card_of(path: str | os.PathLike[str]) -> Card:
    """Returns the card of a checkpoint, an archive of one, or a buffer in a file.

    Raises:
        As `stored_rows` does.
    """
    rows = stored_rows(path)
    own = _of_buffer(rows) if isinstance(rows, BufferRows) else _of_checkpoint(rows, Path(path))
    keys = rows.keys
    return Card(
        path=os.fspath(path),
        name=getattr(rows.config, "name", None),
        capacity=rows.config.capacity,
        rows=len(keys),
        oldest_key=int(keys[0]) if len(keys) else None,
        newest_key=int(keys[-1]) if len(keys) else None,
        next_key=rows.head,
        view=str(rows.config.view),
        sampler=str(rows.config.sampler),
        limiter=str(rows.limiter),
        ragged_bytes=rows.config.ragged_bytes or 0,
        ragged_held=_ragged_held(rows),
        fields=_fields(rows.config),
        **own,
    )


def _fields(config: Config) -> tuple[FieldCard, ...]:
    def card(name: str, field: Column) -> FieldCard:
        like = field.like if isinstance(field, Ragged) else None
        dtype = str(field.dtype).removeprefix("torch.")
        return FieldCard(name, field.shape, dtype, field.nbytes, isinstance(field, Ragged), like)

    return tuple(card("/".join(path), field) for path, field in config.fields.items())


def _ragged_held(rows: StoredRows) -> int:
    columns, everything = dict(zip(rows.fields, rows.config.fields.values(), strict=True)), np.arange(len(rows))
    return sum(int(rows.lengths(name, everything).sum()) * columns[name].nbytes for name in rows.config.ragged)


def _of_buffer(rows: BufferRows) -> dict[str, Any]:
    counts = ("inserted", "sampled", "updated", "stale_updates", "draws", "dropped_rows", "priority_max")
    return {
        "kind": "buffer in a file",
        "state": rows.state(),
        "format": rows.format,
        "nbytes": rows.nbytes,
        "seed": rows.seed,
        **{name: rows.facts[name] for name in counts},
    }


def _of_checkpoint(rows: CheckpointRows, path: Path) -> dict[str, Any]:
    told, files = rows.description, len(rows.files)
    in_files = sum(file.size for file in rows.files) if path.is_dir() else 0
    _, inserted, sampled, updated, stale_updates, _, draws, _, _, priority_max, *_ = told.counts
    return {
        "kind": "checkpoint" if path.is_dir() else "archive of a checkpoint",
        "state": f"complete: {files} file{'' if files == 1 else 's'} of rows, all of the right size",
        "format": told.format,
        "nbytes": in_files + (path / NAME if path.is_dir() else path).stat().st_size,
        "inserted": int(inserted),
        "sampled": int(sampled),
        "updated": int(updated),
        "stale_updates": int(stale_updates),
        "draws": int(draws),
        "dropped_rows": 0,
        "priority_max": float(priority_max),
        "seed": told.seed,
    }
