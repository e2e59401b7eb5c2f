"""Checks of arguments that say what was given and what is expected."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Choice = TypeVar("Choice", bound=str)


def checked_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Returns `value` as an int.

    Raises:
        ValueError: It is no integer, or not within `low` to `high`, where None is no bound.
    """
    try:
        n = value if type(value) is int else operator.index(value)  # which torch.compile would compile in
    except TypeError:
        n = low - 1
    if isinstance(value, bool) or n < low or (high is not None and n > high):
        expected = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} is {value!r:.200}: expected an int {expected}")
    return n


def checked_kind(name: str, value: T | None, default: T, kinds: tuple[type[T], ...]) -> T:
    """Returns `value`, or `default` for None.

    Raises:
        TypeError: It is none of `kinds`. A class derived from one is none: other processes would not know it.
    """
    if value is None:
        return default
    given = checked_instance(name, value, kinds, " or ".join(f"torchreplay.{kind.__name__}" for kind in kinds))
    if type(given) not in kinds:
        base = next(kind for kind in kinds if isinstance(given, kind))
        raise TypeError(
            f"{name} is a {type(given).__name__}, a class of yours: expected a torchreplay.{base.__name__} itself, "
            f"because other processes know only that"
        )
    return given


def checked_instance(name: str, value: T, kinds: type[Any] | tuple[type[Any], ...], expected: str) -> T:
    """Returns `value`.

    Raises:
        TypeError: It is none of `kinds`; the text says `expected`.
    """
    if not isinstance(value, kinds):
        # The class instead of an object of it is the commonest slip.
        made = isinstance(value, type) and issubclass(value, kinds)
        hint = f"; did you mean {value.__name__}(...)?" if made else ""  # type: ignore[attr-defined]  # it is a class
        raise TypeError(f"{name} is {value!r:.200}: expected {expected}{hint}")
    return value


def checked_choice(name: str, value: Any, choices: Sequence[Choice]) -> Choice:
    """Returns `value`.

    Raises:
        ValueError: It is none of `choices`.
    """
    for choice in choices:
        if isinstance(value, str) and value == choice:  # an array would be compared element by element
            return choice
    raise ValueError(f"{name} is {value!r:.200}: expected one of {', '.join(map(repr, choices))}")


def checked_path(name: str, value: Any) -> Path:
    """Returns `value` as a path.

    Raises:
        TypeError: It is no path.
        ValueError: It is empty, as an unset variable is: that would be the working directory.
    """
    if checked_instance(name, value, (str, os.PathLike), "a path, str or os.PathLike") == "":
        raise ValueError(f"{name} is '': expected a path; that of the working directory is '.'")
    return Path(value)


MAX_NAME = 64


def checked_name(name: str, value: Any) -> str | None:
    """Returns `value`, what something is to be called, or None for None.

    Raises:
        TypeError: It is no str.
        ValueError: It is empty or longer than 64 characters, begins or ends with a space, or has characters that cannot
            be printed.
    """
    if value is None:
        return None
    text: str = checked_instance(name, value, str, 'a short text, such as "red team"')
    if not 0 < len(text) <= MAX_NAME or not text.isprintable() or text != text.strip():
        raise ValueError(
            f"{name} is {text!r:.200}: expected 1 to {MAX_NAME} printable characters, without a space at either end"
        )
    return text


def checked_number(name: str, value: Any, low: float) -> float:
    """Returns `value` as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is below `low`, or not finite.
    """
    number = as_float(name, value)
    if not low <= number < math.inf:
        raise ValueError(f"{name} is {value!r}: expected a finite number of at least {low}")
    return number


def checked_timeout(timeout: Any) -> float | None:
    """Returns `timeout` in seconds, which may be infinite, or None for no limit.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative or NaN, a text or a bool.
    """
    seconds = None if timeout is None else as_float("timeout", timeout)
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"timeout is {timeout!r}: expected seconds >= 0, or None for as long as someone may write")
    return seconds


def column_hint(shape: Sequence[int], n: int) -> str:
    """Returns what to do about TD errors for n items whose shape comes of a column of values; empty for others."""
    if tuple(shape) == (n, 1):
        return "; give td.squeeze(-1)"
    if n > 1 and tuple(shape) == (n, n):
        return (
            f"; values [{n}, 1] and targets [{n}] were broadcast to [{n}, {n}]: give value.squeeze(-1) - target, and "
            "look at the loss, which has the same mistake"
        )
    return ""


def as_numbers(
    name: str, values: Any, expected: str, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Returns `values` as a tensor, what is none yet as one on the CPU; of `dtype` and on `device`, if one is given.

    Raises:
        ValueError: torch cannot make one of them, or some are masked; the text says `expected`.
    """
    if isinstance(values, np.ndarray) and np.ma.is_masked(values):
        raise ValueError(
            f"{name}: got an array of which values are masked: pass array.filled(...), expected {expected}"
        )
    try:
        if device is None:  # for every default device of torch, which tensors would use
            device = values.device if isinstance(values, torch.Tensor) else torch.device("cpu")
        given = _as_torch_takes(values) if isinstance(values, np.ndarray) else values
        return torch.as_tensor(given, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: got {values!r:.200}, expected {expected}") from error


def _as_torch_takes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns an array, or a copy of one that runs backwards, is read-only, of another byte order or a long double."""
    if array.flags.carray and array.dtype.isnative and array.dtype.char != "g":
        return array
    dtype = np.dtype(np.float64) if array.dtype.char == "g" else array.dtype.newbyteorder("=")
    return np.require(array, dtype, ["C", "W"])


def as_floats(instance: object, *names: str) -> None:
    """Makes the named attributes of a frozen dataclass plain floats, from the numbers of any library.

    Raises:
        TypeError: One is no number.
    """
    for name in names:
        object.__setattr__(instance, name, as_float(name, getattr(instance, name)))


def as_float(name: str, value: Any) -> float:
    """Returns `value` as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is a text or a bool.
    """
    if isinstance(value, str | bytes | bool):
        raise ValueError(f"{name} is {value!r}: expected a number")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {value!r}: expected a number") from None
