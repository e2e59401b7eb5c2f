"""The episodes that a buffer holds, as `extend` takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from torchreplay import _C
from torchreplay.buffer.local_sampler import LocalSampler
from torchreplay.checkpoint.buffer_checkpoint import ROW_PLACE
from torchreplay.schema.spec import Column, Ragged, nest
from torchreplay.segment.waits import NEVER

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIRST: Final = 1
"""Flag of a row that starts an episode."""
ENDS: Final = 2 | 4
"""Flags of a row that ends one: terminated, truncated."""
DISCARDED: Final = 16
"""Flag of a row whose item was discarded."""
LINK_BITS: Final = 16
"""A link is the key + 1 of the row before, and so many bits of flags."""
LINK_SLOTS: Final = 1 << 16
"""Slots whose links are copied at a time."""


def episodes(sampler: LocalSampler, unfinished: bool) -> Iterator[dict[str, Any]]:
    """Returns what yields what `ReplayBuffer.episodes` does.

    Raises:
        ValueError: The view links no rows.
    """
    roles = sampler.config.view.roles(sampler.config.fields)
    if roles is None:
        raise ValueError(f"the view is {sampler.config.view}: its rows belong to no episode; use gather(keys())")
    return _each(sampler, frozenset(roles.observation), unfinished)


def _each(sampler: LocalSampler, observed: frozenset[int], unfinished: bool) -> Iterator[dict[str, Any]]:
    segment = sampler.segment
    sampler.flush()
    key, link = _links(segment, sampler.config.capacity)
    kept = key[link & DISCARDED == 0]
    for keys in chains(key, link, unfinished):
        if not np.isin(keys, kept).any():
            continue
        rows = _copied(segment, list(sampler.config.fields.values()), keys)
        if rows is not None:
            parts = (column if i in observed else column[1:] for i, column in enumerate(rows))
            yield nest(dict(zip(sampler.config.fields, parts, strict=True)))


def chains(key: NDArray[np.int64], link: NDArray[np.int64], unfinished: bool) -> list[NDArray[np.int64]]:
    """Returns the keys of each episode's rows, in the order of the first ones.

    Args:
        key: int64 `[n]`, of all rows.
        link: int64 `[n]`, what leads each to the row before, and its flags.
        unfinished: As for `ReplayBuffer.episodes`.
    """
    order = np.argsort(key)
    before, flags = (link[order] >> LINK_BITS) - 1, link[order] & ((1 << LINK_BITS) - 1)
    running: dict[int, list[int]] = {}  # by the key of the newest row
    ended: list[list[int]] = []
    starts = set[int]()
    for k, previous, flag in zip(key[order].tolist(), before.tolist(), flags.tolist(), strict=True):
        if flag & FIRST:
            starts.add(k)
        chain = [] if flag & FIRST else running.pop(previous, [])
        chain.append(k)
        if flag & ENDS:
            ended.append(chain)
        else:
            running[k] = chain
    found = [*ended, *running.values()] if unfinished else [chain for chain in ended if chain[0] in starts]
    return [np.array(chain, np.int64) for chain in sorted(found) if len(chain) > 1]


def episode_starts(sampler: LocalSampler, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns which episode each row belongs to: the key of its oldest row that is held. O(capacity).

    Args:
        sampler: Of the buffer, whose view links rows.
        keys: int64 `[n]`.

    Returns:
        int64 `[n]`; -1 for rows that are gone.
    """
    key, link = _links(sampler.segment, sampler.config.capacity)
    order = np.argsort(key)
    key, link = key[order], link[order]
    if not len(key):
        return np.full(len(keys), -1)
    before = (link >> LINK_BITS) - 1
    place = np.searchsorted(key, before).clip(max=len(key) - 1)
    follows = (key[place] == before) & (link & FIRST == 0)
    root = np.where(follows, place, np.arange(len(key)))
    while not np.array_equal(further := root[root], root):  # twice as far each time
        root = further
    at = np.searchsorted(key, keys).clip(max=len(key) - 1)
    return np.where(key[at] == keys, key[root[at]], -1)


def _links(segment: _C.Segment, capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the key and the link of each row, int64 `[n]`."""
    segment.refresh(NEVER, False)
    slots = min(capacity, LINK_SLOTS)
    room = np.empty(slots * -(-ROW_PLACE // 8), np.int64)
    parts = []
    for first in range(0, capacity, slots):
        _, n, _, _ = segment.pack_rows(first, min(first + slots, capacity), room.data.cast("B"), False)
        parts.append((room[:n].copy(), room[n : 2 * n].copy()))  # the widest come first: keys, links
    key, link = (np.concatenate(column) for column in zip(*parts, strict=True))
    return key, link


def _copied(
    segment: _C.Segment, fields: Sequence[Column], keys: NDArray[np.int64]
) -> list[torch.Tensor | list[torch.Tensor]] | None:
    """Returns the fields of these rows, `[n, *shape]` each, and of ragged ones n values; None if a row was overwritten.

    Args:
        segment: Of the buffer.
        fields: Of its rows.
        keys: int64 `[n]`.
    """
    slots = torch.from_numpy(keys % len(segment.column(-2)))
    values = _ragged_values(segment, fields, slots)
    if values is None:
        return None
    rows: list[torch.Tensor | list[torch.Tensor]] = [
        values[i] if i in values else segment.column(i)[slots] for i in range(len(fields))
    ]
    segment.refresh(NEVER, False)  # forgets rows that were overwritten until now
    whole = bool((segment.column(-2)[slots] == torch.from_numpy(keys + 1)).all())
    if values and whole:
        whole = all(segment.is_whole(slot, key) for slot, key in zip(slots.tolist(), keys.tolist(), strict=True))
    return rows if whole else None


def _ragged_values(
    segment: _C.Segment, fields: Sequence[Column], slots: torch.Tensor
) -> dict[int, list[torch.Tensor]] | None:
    """Returns copies of the values of each ragged field, by its place; None: a row is gone."""
    values: dict[int, list[torch.Tensor]] = {i: [] for i, field in enumerate(fields) if isinstance(field, Ragged)}
    for slot in slots.tolist() if values else ():
        row = segment.row_values(slot)
        if row is None:
            return None
        for i, of_field in values.items():
            of_field.append(row[i].clone())
    return values
