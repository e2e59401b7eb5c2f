"""Checks of arguments that say what was given and what is expected."""

from __future__ import annotations

import operator
from typing import Any, TypeVar

T = TypeVar("T")


def checked_int(name: str, value: Any, low: int, high: int) -> int:
    """Returns `value` as an int.

    Raises:
        ValueError: It is no integer, or not within `low` to `high`.
    """
    try:
        n = operator.index(value)
    except TypeError:
        n = low - 1
    if isinstance(value, bool) or not low <= n <= high:
        raise ValueError(f"{name} is {value!r}: expected an int from {low} to {high}")
    return n


def checked_kind(name: str, value: T | None, default: T, kinds: tuple[type[T], ...]) -> T:
    """Returns `value`, or `default` for None.

    Raises:
        TypeError: It is none of `kinds`.
    """
    if value is None:
        return default
    if not isinstance(value, kinds):
        names = " or ".join(f"torchreplay.{kind.__name__}" for kind in kinds)
        raise TypeError(f"{name} is {value!r}: expected {names}")
    return value


def as_floats(instance: object, *names: str) -> None:
    """Makes the named attributes of a frozen dataclass plain floats, whatever library's numbers they are.

    Raises:
        TypeError: One is no number.
    """
    for name in names:
        object.__setattr__(instance, name, as_float(name, getattr(instance, name)))


def as_float(name: str, value: Any) -> float:
    """Returns `value` as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is a text that is no number.
    """
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {value!r}: expected a number") from None
