"""Casting what users hand over to the dtypes of the fields, as NumPy's `casting` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from torchreplay import _C
from torchreplay.schema.spec import Column, Path, Ragged
from torchreplay.validation import checked_choice

Casting: TypeAlias = Literal["same_kind", "unsafe"]
CASTINGS: tuple[Casting, ...] = get_args(Casting)


def cast_values(fields: Mapping[Path, Column], values: dict[str, Any], casting: Any) -> dict[str, Any]:
    """Returns `values` as `casting` asks for.

    Raises:
        ValueError: `casting` is unknown.
    """
    if casting == "same_kind":  # which the native core sees to
        return values
    checked_choice("casting", casting, CASTINGS)
    return cast_unsafely(fields, values)


def cast_unsafely(fields: Mapping[Path, Column], values: Mapping[str, Any], prefix: Path = ()) -> dict[str, Any]:
    """Returns `values` in the dtypes of `fields`, cast as C does: 1.9 becomes 1, and 300 becomes 44 in uint8.

    What is no number, and names that are no field's, stay as they are: the writer refuses them.

    Args:
        fields: By path.
        values: By name, nested as the fields are.
        prefix: Path of the dict that `values` is.
    """
    cast = {}
    for name, value in values.items():
        path = (*prefix, name)
        if isinstance(value, Mapping):
            cast[name] = cast_unsafely(fields, value, path)
        else:
            field = fields.get(path)
            as_dtype = _ragged_as_dtype if isinstance(field, Ragged) else _as_dtype
            cast[name] = value if field is None else as_dtype(value, field.dtype)
    return cast


def _ragged_as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Returns the values of a ragged field, each cast by itself: a list of them, (values, lengths), or one."""
    if isinstance(value, tuple):
        return (_ragged_as_dtype(value[0], dtype), *value[1:]) if value else value
    if isinstance(value, list) and any(isinstance(part, list | tuple | np.ndarray | torch.Tensor) for part in value):
        return [_ragged_as_dtype(part, dtype) for part in value]
    nothing = isinstance(value, list) and not value  # which says no shape
    return value if nothing else _as_dtype(value, dtype)


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("cpu", dtype)
    if np.ma.is_masked(value):  # an array of these numbers has lost the mask
        return value
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            return value
        return torch.as_tensor(np.ascontiguousarray(array).reshape(array.shape), device="cpu").to(dtype)
    except (TypeError, ValueError):  # ragged lists, and dtypes that torch does not have
        return value


def _astype(array: Any, dtype: str) -> Any:
    """Returns `array` in another dtype; raises FloatingPointError where a finite number becomes infinite."""
    with np.errstate(over="raise"):
        return array.astype(dtype)


# How the native core reads what users hand over. By way of NumPy, which makes float64 of Python floats.
_C.init_arrays(
    torch.Tensor,
    lambda values: torch.as_tensor(np.asarray(values), device="cpu"),
    torch.get_num_threads,
    np.ndarray,
    _astype,
)
