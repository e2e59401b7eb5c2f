"""Draws every item and compares it with what it must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.checking.casting import as_numpy
from torchreplay.checking.reference_items import Array, HindsightItems, Items, Stream
from torchreplay.schema.batch import Bounds, ReplayBatch, ragged_bounds

CHUNK = 64  # items at a time: stacked images are large
OWN_ENTRIES = ("key", "weight", "probability", "age")

Anchor: TypeAlias = tuple[Stream, int]


def compare(buffer: ReplayBuffer, items: Items, streams: list[Stream]) -> tuple[int, tuple[str, ...]]:
    """Returns the number of items, and the entries of their batches, all as expected.

    Raises:
        ValueError: Another set of items can be drawn, or an item is another.
    """
    rows = {row.key: row for stream in streams for row in stream if row.key >= 0}
    anchors = {stream[i].key: (stream, i) for stream in streams for i in items.anchors(stream) if stream[i].key >= 0}
    keys = sorted(rows)
    entries: tuple[str, ...] = ()
    for start in range(0, len(keys), CHUNK):
        chunk = keys[start : start + CHUNK]
        batch = buffer.gather(chunk)
        expected = [key for key in chunk if key in anchors]
        for key in sorted(set(expected) ^ set(batch["key"].tolist())):
            found, wanted = ("not drawable", "an item") if key in anchors else ("drawable", "no complete item")
            raise ValueError(f"key {key} ({rows[key]}) is {found}: expected {wanted} of {buffer.view}")
        if expected:
            entries = _compare_items(batch, items, [anchors[key] for key in expected])
    return len(anchors), entries


def _compare_items(batch: ReplayBatch, items: Items, anchors: list[Anchor]) -> tuple[str, ...]:
    bounds = ragged_bounds(batch)
    beside = ("offsets", "lengths") if bounds else ()
    entries = {name: value for name, value in batch.items() if name not in (*OWN_ENTRIES, *beside)}
    found = dict(_flat(entries, ""))
    wanted = [items.item(stream, i) for stream, i in anchors]
    free: dict[str, Array] = {}
    if isinstance(items, HindsightItems):
        relabelled = found.pop("relabelled").numpy()
        free = dict.fromkeys(items.relabelled, relabelled)
        _compare_goals(found, items, anchors, relabelled)
    if found.keys() != wanted[0].keys():
        raise ValueError(f"the batch has entries {sorted(found)}: expected {sorted(wanted[0])}")
    for path, tensor in found.items():
        if path in bounds:
            _compare_ragged(path, tensor, bounds[path], [item[path] for item in wanted], anchors)
            continue
        want = np.stack([item[path] for item in wanted])
        rounding = torch.finfo(tensor.dtype).eps if path in items.computed else 0.0
        _compare_entry(path, as_numpy(tensor), want, rounding, free.get(path, np.zeros(len(anchors), bool)), anchors)
    return tuple(found)


def _compare_ragged(path: str, values: torch.Tensor, bounds: Bounds, wanted: list[Any], anchors: list[Anchor]) -> None:
    """Compares the values of any length of one entry: their lengths, and each of their elements."""
    lengths, ends = bounds.lengths, bounds.offsets.tolist()
    if bounds.offsets.diff().tolist() != lengths.reshape(-1).tolist() or ends[0] or ends[-1] != len(values):
        raise ValueError(
            f"the offsets and the lengths of entry {path!r} do not agree, or not with its {len(values)} values"
        )
    array, steps = as_numpy(values), lengths[0].numel()
    for b, want in enumerate(wanted):
        stream, i = anchors[b]
        for step, value in enumerate(want if lengths.dim() == 2 else [want]):
            begin, end = ends[b * steps + step : b * steps + step + 2]
            got = array[begin:end]
            where = f"entry {path!r}" + (f" at step {step}" if lengths.dim() == 2 else "")
            where += f" of the item at key {stream[i].key} ({stream[i]})"
            if got.dtype != value.dtype or got.shape[1:] != value.shape[1:]:
                raise ValueError(f"{where} is {got.dtype}{got.shape}: expected {value.dtype}{value.shape}")
            if len(got) != len(value):
                raise ValueError(f"{where} has {len(got)} elements: expected {len(value)}")
            wrong = np.argwhere((got != value) & ~((got != got) & (value != value)))
            if len(wrong):
                place = tuple(map(int, wrong[0]))
                raise ValueError(f"{where} is {got[place]!r} at {list(place)}: expected {value[place]!r}")


def _compare_entry(path: str, got: Array, want: Array, rounding: float, free: Array, anchors: list[Anchor]) -> None:
    """Compares one entry, but where it is `free`: exactly, or up to `rounding`."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        raise ValueError(f"entry {path!r} is {got.dtype}{got.shape}: expected {want.dtype}{want.shape}")
    same = np.isclose(got, want, rtol=4 * rounding, atol=1e-12) if rounding else got == want
    same |= (got != got) & (want != want)  # NaN is NaN
    same |= free.reshape(-1, *[1] * (same.ndim - 1))
    wrong = np.argwhere(~same)
    if len(wrong):
        b, *place = map(int, wrong[0])
        stream, i = anchors[b]
        where = f"{path!r} at {place}" if place else f"{path!r}"
        raise ValueError(
            f"entry {where} of the item at key {stream[i].key} ({stream[i]}) is {got[b][*place]!r}: "
            f"expected {want[b][*place]!r}"
        )


def _compare_goals(
    found: Mapping[str, torch.Tensor], items: HindsightItems, anchors: list[Anchor], relabelled: Array
) -> None:
    """Compares the goals of relabelled items with those that their strategy may choose from."""
    for b in np.flatnonzero(relabelled):
        stream, i = anchors[b]
        goals = items.allowed_goals(stream, i)
        for name in (items.desired, f"next_{items.desired}"):
            goal = as_numpy(found[name][b])
            if not any(np.array_equal(goal, allowed, equal_nan=True) for allowed in goals):
                raise ValueError(
                    f"entry {name!r} of the relabelled item at key {stream[i].key} ({stream[i]}) is {goal!r}: expected "
                    f"a goal achieved where {items.strategy!r} may take it from"
                )


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value
