"""The columns of an `env_dict`: what cpprb calls the values of a transition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torchreplay as tr
from torchreplay.schema.spec import RESERVED


@dataclass(frozen=True, slots=True)
class Column:
    """One value of a transition.

    Attributes:
        name: Its name in `env_dict`.
        shape: Of one transition's value; `(1,)` for scalars, as cpprb has it.
        dtype: Of the arrays that come back.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def field(self) -> str:
        """The name of its field in the buffer."""
        return f"column {self.name}" if self.name in RESERVED else self.name

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in a row. Scalars have none: so `add(rew=1.0)` is what the writer takes as it is."""
        return () if self.shape == (1,) else self.shape

    def as_field(self) -> tr.Field:
        """Returns the field that holds it."""
        return tr.Field(self.stored_shape, self.dtype)

    def rows(self, values: Any) -> NDArray[Any]:
        """Returns what was given for one transition or for several as `[n, *stored_shape]`.

        Axes of 1 do not matter, and a transition's values may be flat.

        Raises:
            ValueError: The number of values is no multiple of what one transition has, or the axes come in another
                order.
        """
        array = np.asarray(values)
        if array.ndim > 1 and array.shape[1:] != self.stored_shape:
            given, expected = ([n for n in shape if n != 1] for shape in (array.shape, self.stored_shape))
            if expected and given[-len(expected) :] != expected and given[-1:] != [math.prod(expected)]:
                raise ValueError(
                    f"{self.name!r} has shape {array.shape}: expected [n, {', '.join(map(str, self.shape))}]; nothing "
                    f"is added"
                )
        return array.reshape(-1, *self.stored_shape)

    def cast(self, values: Any) -> NDArray[Any]:
        """Returns what `rows` does in the column's dtype, cast as C does."""
        return self.rows(values).astype(self.dtype, copy=False)

    def shown(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns `[n, *stored_shape]` as `[n, *shape]`."""
        return values[:, None] if self.shape == (1,) else values


def columns_of(env_dict: Mapping[str, Mapping[str, Any]] | None, default_dtype: Any = None) -> tuple[Column, ...]:
    """Returns the columns that `env_dict` defines, which stays as it is.

    Args:
        env_dict: Names to dicts with `"shape"` (default 1) and `"dtype"`.
        default_dtype: Of columns that name none; None: float32.

    Raises:
        ValueError: There is no column, or one whose values have any length.
    """
    if not env_dict:
        raise ValueError(f"env_dict is {env_dict!r}: expected a dict of names to dicts, such as {{'obs': {{}}}}")
    for name, defs in env_dict.items():
        if isinstance(defs, tr.Ragged) or any(isinstance(part, tr.Ragged) for part in defs.values()):
            raise ValueError(
                f"column {name!r} is {defs!r}: cpprb's columns have one shape; pad the values to it, or use a "
                f"torchreplay.ReplayBuffer"
            )
    fallback = np.single if default_dtype is None else default_dtype
    return tuple(
        Column(name, tuple(int(n) for n in np.ravel(defs.get("shape", 1))), np.dtype(defs.get("dtype", fallback)))
        for name, defs in env_dict.items()
    )


def names_in(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns the names in an argument that is one, several or none."""
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(str(name) for name in names)


def required(columns: Iterable[Column], names: Iterable[str], argument: str) -> dict[str, Column]:
    """Returns the columns of these names by name.

    Raises:
        KeyError: One is not in `env_dict`.
    """
    known = {column.name: column for column in columns}
    for name in names:
        if name not in known:
            raise KeyError(f"{argument} names {name!r}, which env_dict has not: it has {sorted(known)}")
    return {name: known[name] for name in names}


def equal_rows(
    columns: Iterable[Column], values: Mapping[str, Any], priorities: NDArray[Any] | None
) -> dict[str, NDArray[Any]]:
    """Returns what was given as `[n, *stored_shape]` by column name. The last column says n; one row stands for all n.

    Args:
        columns: All of them must be given.
        values: By name, and others too.
        priorities: One for each row, or None.

    Raises:
        KeyError: A column is missing.
        ValueError: Columns have different numbers of rows, or there are more or fewer priorities.
    """
    rows = {column.name: column.rows(values[column.name]) for column in columns}
    last = next(reversed(rows))
    n = len(rows[last])
    for name, array in rows.items():
        if len(array) != n:
            if len(array) != 1:
                raise ValueError(f"{name!r} has {len(array)} rows, {last!r} has {n}: nothing is added")
            rows[name] = np.broadcast_to(array, (n, *array.shape[1:]))
    if priorities is not None and len(priorities) != n:
        raise ValueError(f"there are {len(priorities)} priorities for {n} transitions: nothing is added")
    return rows
