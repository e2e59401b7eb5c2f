"""What a field makes of a value, and what is lost on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchreplay.schema.spec import Column


class Casting:
    """Casts values to fields, and collects in `rounded` the first value of each field that is rounded by that."""

    def __init__(self) -> None:
        self.rounded: dict[str, str] = {}

    def __call__(self, path: str, field: Column, value: Any, place: object) -> np.ndarray[Any, Any]:
        """Returns what the field at `path` holds after `value` was written, which was within its range."""
        given = as_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)
        held = cast(given, field.dtype)
        changed = _changed(given, held)
        if changed is None:
            return held
        before, after = given[changed], held[changed]
        what = f"field {path!r}, {place}: {before!r} of {given.dtype} comes back as {after!r}"
        self.rounded.setdefault(path, f"{what}, since the field is {field.dtype}: values are rounded")
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
    differs = (held != given) & ~((held != held) & (given != given))
    places = np.argwhere(differs)
    return tuple(int(i) for i in places[0]) if len(places) else None
