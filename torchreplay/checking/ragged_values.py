"""Values of any length, in the forms in which environments and loops give them, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchreplay.checking.casting import as_numpy, cast
from torchreplay.schema.spec import Column, Ragged


def as_array(value: Any, column: Column) -> np.ndarray[Any, Any]:
    """Returns a value as an array; of a ragged field `[n, *shape]`: text as its bytes, and None as nothing."""
    given: np.ndarray[Any, Any]
    if not isinstance(column, Ragged):
        given = as_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)
        return given
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value.item()  # numpy's text, or None
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(bytes(value), np.uint8)
    given = as_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(() if value is None else value)
    return given if given.size else nothing(column)


def nothing(column: Ragged) -> np.ndarray[Any, Any]:
    """Returns a value of length 0."""
    return cast(np.zeros((0, *column.shape)), column.dtype)


def zeros(column: Column) -> np.ndarray[Any, Any]:
    """Returns what a row has in a field that it was not given: zeros, or nothing."""
    return nothing(column) if isinstance(column, Ragged) else cast(np.zeros(column.shape), column.dtype)
