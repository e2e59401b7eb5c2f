"""One thing, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

T = TypeVar("T")

OneOrNamed: TypeAlias = T | Mapping[str, T]


def named(what: str, given: T | Mapping[str, T] | None) -> dict[str | None, T]:
    """Returns what was given by name; one alone has the name None, and nothing has none.

    Raises:
        ValueError: It is an empty dict, or one whose keys are no strings.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {None: given}
    if not given or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{what} is {given!r:.200}: expected one, or a dict of several by name")
    several: dict[str | None, T] = {}
    several.update(given)
    return several


def chosen(what: str, options: Mapping[str | None, T], name: str | None) -> T:
    """Returns the one of that name.

    Raises:
        ValueError: There is none of that name.
    """
    try:
        return options[name]
    except KeyError:
        names = "none, for there is only one" if None in options else f"one of {', '.join(map(repr, options))}"
        raise ValueError(f"name={name!r} of {what}: expected {names}") from None
