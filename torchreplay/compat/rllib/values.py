"""RLlib's observations and actions as nested fields, and back: tuples lie as dicts of their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchreplay.schema.spec import Field


def equal(one: Any, other: Any) -> bool:
    """Returns whether two values of `row` are the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(part, other[name]) for name, part in one.items())
    return np.array_equal(one, other)


def spec_of(value: Any) -> Any:
    """Returns what holds a value: a field, or dicts of them for dicts and tuples."""
    if isinstance(value, tuple):
        value = {str(i): part for i, part in enumerate(value)}
    if isinstance(value, dict):
        return {name: spec_of(part) for name, part in value.items()}
    array = np.asarray(value)
    return Field(array.shape, array.dtype)


def row(values: Any, i: int) -> Any:
    """Returns the value at time i of an episode's, which are a list, or nested arrays; tuples become dicts."""
    if isinstance(values, list):
        return _named(values[i])
    if isinstance(values, tuple):
        values = {str(k): part for k, part in enumerate(values)}
    return {name: row(part, i) for name, part in values.items()} if isinstance(values, dict) else values[i]


def _named(value: Any) -> Any:
    if isinstance(value, tuple):
        value = {str(k): part for k, part in enumerate(value)}
    return {name: _named(part) for name, part in value.items()} if isinstance(value, dict) else value


def reader(example: Any, columns: Any) -> Callable[[int], Any]:
    """Returns what returns the i-th value of the columns, nested as an example is."""
    if isinstance(example, tuple):
        parts = [reader(part, columns[str(k)]) for k, part in enumerate(example)]
        return lambda i: tuple(part(i) for part in parts)
    if isinstance(example, dict):
        named = {name: reader(part, columns[name]) for name, part in example.items()}
        return lambda i: {name: part(i) for name, part in named.items()}
    values: NDArray[Any] = columns.numpy()
    return values.__getitem__
