"""Tianshou's batches as rows, and rows as Tianshou's batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tianshou.data import Batch

from torchreplay.schema.spec import Field, Spec, mapped, spec_like

REQUIRED = ("obs", "act", "rew", "terminated", "truncated")
"""What Tianshou's `add` asks for, beside `done`, which it computes."""


class RowForm:
    """What of a batch is stored.

    Args:
        obs_next: Whether observations that follow are.
        last_frame: Whether only the newest frame of stacked observations is.
        keep: Entries of `info` and `policy` that are, such as `"info/lives"`.
    """

    def __init__(self, obs_next: bool, last_frame: bool, keep: Sequence[str]) -> None:
        self._obs_next, self._last_frame = obs_next, last_frame
        self._keep = tuple(tuple(name.split("/")) for name in keep)

    def rows(self, batch: Any) -> dict[str, Any]:
        """Returns the fields of a step, nested, with flags as bools.

        Raises:
            ValueError: An entry is missing.
        """
        there = batch.get_keys()
        missing = [name for name in REQUIRED if name not in there]
        if missing:
            raise ValueError(f"the batch has no {missing[0]!r}: expected {', '.join(REQUIRED)}")
        observations = ("obs", "obs_next") if self._obs_next and "obs_next" in there else ("obs",)
        rows = {name: _plain(batch[name]) for name in observations}
        if self._last_frame:
            newest = (slice(None), -1) if np.ndim(batch.terminated) else -1
            rows = mapped(lambda value: value[newest], rows)
        rows |= {"act": _plain(batch.act), "rew": np.asarray(batch.rew)}
        for flag in ("terminated", "truncated"):
            rows[flag] = np.asarray(batch[flag], bool)
        rows["done"] = rows["terminated"] | rows["truncated"]
        for path in self._keep:
            _put(rows, path, _entry(batch, path))
        return rows


def spec_of(rows: dict[str, Any], leading: int) -> Spec:
    """Returns the spec of rows with so many leading dimensions; rewards are float64, as in Tianshou.

    Raises:
        ValueError: A row cannot hold values of a field's dtype.
    """
    spec = spec_like(rows, leading)
    return spec | {"rew": Field(spec["rew"].shape, torch.float64)}


def as_batch(fields: dict[str, Any]) -> Any:
    """Returns tensors as a batch of arrays over the same memory, nested as they are."""
    made = Batch()
    vars(made).update(  # as Tianshou does: its constructor looks at each value for microseconds
        {name: as_batch(value) if isinstance(value, dict) else value.numpy() for name, value in fields.items()}
    )
    return made


def _plain(value: Any) -> Any:
    """Returns nested dicts for nested batches, and arrays or tensors as they are."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value
    if isinstance(value, (Batch, dict)):
        return {name: _plain(part) for name, part in value.items()}
    return np.asarray(value)


def _entry(batch: Any, path: tuple[str, ...]) -> Any:
    """Returns an entry of nested batches; raises ValueError where there is none."""
    value = batch
    for name in path:
        if not isinstance(value, (Batch, dict)) or name not in value:
            raise ValueError(f"the batch has no {'/'.join(path)!r}, which keep= names: it must come with every step")
        value = value[name]
    return _plain(value)


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
