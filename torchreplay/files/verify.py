"""Reads every row of a file, and says what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.buffer.episodes import ENDS, FIRST, LINK_BITS
from torchreplay.files.checkpoint_rows import CheckpointRows
from torchreplay.files.rows import Positions, StoredRows
from torchreplay.schema.spec import Ragged
from torchreplay.segment.progress import track

FLAGS: Final = (1 << LINK_BITS) - 1


@dataclass(slots=True)
class Verification:
    """What reading every row found.

    Attributes:
        rows: Rows read.
        changed: Rows that others overwrote meanwhile: nothing is said of them.
        problems: What is damaged, a sentence each.
        remarks: What need not be damage, but is worth a look: values that are not finite, keys without a row.
    """

    rows: int = 0
    changed: int = 0
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def verify(rows: StoredRows) -> Verification:
    """Reads every row: checksums where there are some, keys, links, priorities, flags, values that are not finite.

    The values of a buffer in a file have no checksums: a byte that a disk turned over inside a value is not noticed.

    Raises:
        CheckpointError: A file of rows cannot be read as such.
    """
    found = Verification()
    if isinstance(rows, CheckpointRows):
        _check_files(rows, found)
    _check_keys(rows, found)
    if rows.linked:
        _check_links(rows, found)
    values = _Values(rows)
    pieces = list(rows.chunks(rows.row_bytes + 4, rows.config.ragged))
    for at in track(pieces, "reading every row"):
        before = rows.gone(at)
        values.look(at[~before])
        found.rows += len(at)
        found.changed += int(rows.gone(at).sum())
    values.report(found)
    return found


def _check_files(rows: CheckpointRows, found: Verification) -> None:
    for number in track(range(len(rows.files)), "computing checksums"):
        damage = rows.damaged(number)
        if damage is not None:
            found.problems.append(damage)


def _check_keys(rows: StoredRows, found: Verification) -> None:
    keys = rows.keys
    if not len(keys):
        return
    twice = np.flatnonzero(np.diff(keys) == 0)
    if len(twice):
        found.problems.append(f"{len(twice):,} keys are there twice, the first is {keys[twice[0]]}")
    if keys[0] < 0 or keys[-1] >= rows.head:
        found.problems.append(f"keys go from {keys[0]} to {keys[-1]}: expected 0 to {rows.head - 1}")
    if len(keys) > rows.config.capacity:
        found.problems.append(f"there are {len(keys):,} rows: expected at most {rows.config.capacity:,}")
    gaps = int(keys[-1] - keys[0]) + 1 - len(np.unique(keys))
    if gaps and not rows.gone(np.arange(len(rows))).any():  # or they are those that are written just now
        found.remarks.append(
            f"{gaps:,} keys between the oldest and the newest row have no row: their writers died, or are at it"
        )


def _check_links(rows: StoredRows, found: Verification) -> None:
    """Checks that links lead to older rows, and that steps count them."""
    everything = np.arange(len(rows))
    link, step = rows.read("/link", everything).numpy(), rows.read("/step", everything).numpy().view(np.uint32)
    keys, flags, before = rows.keys, link & FLAGS, (link >> LINK_BITS) - 1
    first = (flags & FIRST) != 0
    wrong = np.where(first, step != 0, (before < 0) | (before >= keys) | (step == 0))
    place = np.searchsorted(keys, before).clip(max=max(len(keys) - 1, 0))
    known = ~first & (keys[place] == before) if len(keys) else first
    follows = (step[place] + 1 == step) | (step[place] == np.iinfo(np.uint32).max)
    wrong |= known & (~follows | ((flags[place] & ENDS) != 0))
    gone = rows.gone(everything)
    wrong &= ~gone & ~gone[place]
    if wrong.any():
        number = int(wrong.sum())
        found.problems.append(f"{number:,} rows do not follow their episode, the first has key {keys[wrong][0]}")


class _Values:
    """Looks at values, and counts what is odd by column, with the first key."""

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows
        self._odd: dict[tuple[str, str], list[int]] = {}

    def look(self, at: Positions) -> None:
        """Looks at these rows."""
        if not len(at):
            return
        for name, told in zip(self._rows.fields, self._rows.config.fields.values(), strict=True):
            if isinstance(told, Ragged):
                self._look_at_ragged(name, told, at)
            elif told.dtype == torch.bool:
                bytes_of = self._rows.read(name, at).view(torch.uint8)
                self._note("neither True nor False", name, at, (bytes_of > 1).reshape(len(at), -1).any(1).numpy())
            elif told.dtype.is_floating_point:
                values = self._rows.read(name, at).reshape(len(at), -1)
                self._note("NaN or infinite", name, at, (~values.isfinite()).any(1).numpy())
            elif not isinstance(self._rows, CheckpointRows):  # whose bytes went through its checksums
                self._rows.read(name, at)
        leaves = self._rows.read("/leaf", at)
        self._note("no priority", "/leaf", at, ~((leaves >= 0) & leaves.isfinite()).numpy())

    def _look_at_ragged(self, name: str, told: Ragged, at: Positions) -> None:
        values = self._rows.read_ragged(name, at)
        if told.dtype == torch.bool:
            odd = [bool((value.view(torch.uint8) > 1).any()) for value in values]
            self._note("neither True nor False", name, at, np.array(odd))
        elif told.dtype.is_floating_point:
            odd = [not bool(value.isfinite().all()) for value in values]
            self._note("NaN or infinite", name, at, np.array(odd))

    def _note(self, what: str, name: str, at: Positions, odd: NDArray[np.bool_]) -> None:
        odd = odd & ~self._rows.gone(at)
        if odd.any():
            self._odd.setdefault((what, name), []).extend(self._rows.keys[at[odd]].tolist())

    def report(self, found: Verification) -> None:
        """Adds what was found to a verification."""
        for (what, name), keys in self._odd.items():
            text = f"{name!r} is {what} in {len(keys):,} rows, the first has key {keys[0]}"
            (found.remarks if what == "NaN or infinite" else found.problems).append(text)
