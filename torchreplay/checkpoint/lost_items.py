"""Which items of a queue do not fit into another capacity: a queue loses nothing in silence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.checkpoint.description import ROW_COLUMNS
from torchreplay.schema.config import Config
from torchreplay.schema.samplers import Fifo
from torchreplay.schema.views import View

FIRST, ENDS = 1, 6
"""Flags in the low 16 bits of a row's link; above them is the key + 1 of its stream's row before."""


class LostItems:
    """Looks at the rows that go into a queue of another capacity, where the newer of two that share a slot stays.

    Args:
        source: The queue that the rows are of.
        target: The one that they go into.
    """

    def __init__(self, source: Config, target: Config) -> None:
        self._source, self._target = source, target
        sampler = target.sampler
        waits = isinstance(source.sampler, Fifo) and isinstance(sampler, Fifo) and sampler.when_full == "wait"
        same = (source.capacity, source.ragged_bytes) == (target.capacity, target.ragged_bytes)
        self._looks = waits and not same
        self._rows: list[list[NDArray[np.generic]]] = []

    def add(self, columns: Sequence[torch.Tensor]) -> None:
        """Notes rows: their fields, and then `ROW_COLUMNS`."""
        if self._looks:
            beside = dict(zip(ROW_COLUMNS, columns[-len(ROW_COLUMNS) :], strict=True))
            self._rows.append([beside[name].numpy().copy() for name in ("/key", "/link", "/leaf")])

    def complaint(self, left_out: torch.Tensor) -> str | None:
        """Returns that items would be lost, in words; None: none would be.

        Args:
            left_out: int64 `[n]`, the keys of rows for whose values there are too few bytes.
        """
        if not self._rows:
            return None
        key, link, leaf = (np.concatenate(column) for column in zip(*self._rows, strict=True))
        fits = ~np.isin(key, left_out.numpy())
        lost = _lost(key, link, leaf > 0, fits, self._target.view, self._target.capacity) if leaf.any() else 0
        if not lost:
            return None
        measures, had = f"capacity is {self._target.capacity:,}", f"a capacity of {self._source.capacity:,}"
        if self._source.ragged_bytes is not None:
            measures += f" and ragged_bytes {self._target.ragged_bytes:,}"
            had += f" and ragged_bytes={self._source.ragged_bytes:,}"
        spread = int(key.max() - key.min()) + 1  # so many slots, and no two of these keys share one
        larger = f", or one of {spread:,} or more" if fits.all() and spread > self._target.capacity else ""
        return (
            f"{measures}: of {np.count_nonzero(leaf):,} items of the queue that are to be "
            f"drawn {lost:,} would be lost, whose rows share their slots{' or bytes' * (not fits.all())} with newer "
            f"ones. Choose {had}, which it had{larger}, or draw these items first"
        )


def _lost(
    key: NDArray[np.int64],
    link: NDArray[np.int64],
    is_drawn: NDArray[np.bool_],
    fits: NDArray[np.bool_],
    view: View,
    capacity: int,
) -> int:
    """Returns how many of the items with `is_drawn` at their anchors lose a row, where a newer one or not all fit."""
    order = np.argsort(key)
    key, link, fits, items = key[order], link[order], fits[order], np.flatnonzero(is_drawn[order])
    newest = np.full(capacity, -1, np.int64)
    np.maximum.at(newest, key % capacity, key)
    stays = (newest[key % capacity] == key) & fits
    span, _, _, history, across, _ = view.native()
    before = np.searchsorted(key, (link >> 16) - 1)
    is_linked = key[before.clip(max=len(key) - 1)] == (link >> 16) - 1
    previous, following = np.where(is_linked, before, -1), np.full(len(key), -1)
    following[before[is_linked]] = np.flatnonzero(is_linked)
    lost = ~stays[items]
    for steps, towards, last in (
        (span, following, (link & ENDS > 0) & (not across)),
        (history, previous, link & FIRST > 0),
    ):
        at = items
        for _ in range(steps):
            at = np.where((at >= 0) & ~last[at], towards[at], -1)
            if (at < 0).all():
                break
            lost |= (at >= 0) & ~stays[at]
    return int(np.count_nonzero(lost))
