"""What a field makes of a value, and what is lost on the way."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from ..spec import Field


class Casting:
    """Casts values to fields; tells of values that change, once a field.

    Args:
        quiet: Paths of fields whose rounding is not worth a word: Python's floats are float64 and rewards seldom are.
    """

    def __init__(self, quiet: set[str]) -> None:
        self._told = set(quiet)

    def __call__(self, path: str, field: Field, value: Any, place: object) -> np.ndarray[Any, Any]:
        """Returns what the field at `path` holds after `value` was written.

        Raises:
            ValueError: An integer or a float is beyond the field's range, and would come back as another.
        """
        given = as_numpy(torch.as_tensor(value)) if isinstance(value, torch.Tensor) else np.asarray(value)
        held = cast(given, field.dtype)
        changed = _changed(given, held)
        if changed is None:
            return held
        before, after = given[changed], held[changed]
        what = f"field {path!r}, {place}: {before!r} of {given.dtype} comes back as {after!r}"
        if not field.dtype.is_floating_point or np.isfinite(before) != np.isfinite(after):
            raise ValueError(f"{what}, since the field is {field.dtype}: choose a wider dtype")
        if path not in self._told:
            self._told.add(path)
            warnings.warn(f"{what}, since the field is {field.dtype}: values are rounded", stacklevel=4)
        return held


def cast(values: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Returns `values` in a torch dtype; float32 stands for bfloat16, which numpy does not know."""
    if dtype == torch.bfloat16:
        return as_numpy(torch.from_numpy(np.array(values)).to(dtype))
    with np.errstate(all="ignore"):
        return values.astype(str(dtype).removeprefix("torch."))


def as_numpy(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns a tensor as numpy holds it; float32 for bfloat16."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def _changed(given: np.ndarray[Any, Any], held: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """The place of the first value that a cast changed; NaN is NaN."""
    if given.dtype == held.dtype:
        return None
    differs = (held != given) & ~((held != held) & (given != given))
    places = np.argwhere(differs)
    return tuple(int(i) for i in places[0]) if len(places) else None
