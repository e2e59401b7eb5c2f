"""One thing, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from torch import nn

from torchreplay.buffer.base import Replay
from torchreplay.schema.config import Configured
from torchreplay.validation import checked_instance
from torchreplay.weights.shared_weights import SharedWeights

T = TypeVar("T")

OneOrNamed: TypeAlias = T | Mapping[str, T]

Fillable: TypeAlias = Replay
"""What explorers write to: a `ReplayBuffer` or a `ShardedReplay`."""


def named_buffers(given: OneOrNamed[Fillable]) -> dict[str | None, Fillable]:
    """Returns the buffers by name; one alone has the name None.

    Raises:
        ValueError: It is an empty dict, or one whose keys are no strings.
        TypeError: It is no buffer, or one of several is none.
    """
    return _named("buffer", given, Configured, "a torchreplay.ReplayBuffer or a ShardedReplay")


def named_weights(given: OneOrNamed[SharedWeights] | None) -> dict[str | None, SharedWeights]:
    """Returns weights by name, as `named_buffers` does with buffers; None has none."""
    return {} if given is None else _named("weights", given, SharedWeights, "torchreplay.SharedWeights(module)")


def named_modules(given: OneOrNamed[nn.Module] | None) -> dict[str | None, nn.Module]:
    """Returns modules by name, as `named_buffers` does with buffers; None has none."""
    return {} if given is None else _named("module", given, nn.Module, "a torch.nn.Module")


def _named(what: str, given: Any, kind: type[Any], expected: str) -> dict[str | None, Any]:
    if not isinstance(given, Mapping):
        return {None: checked_instance(what, given, kind, f"{expected}, or a dict of several by name")}
    if not given or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{what} is {given!r:.200}: expected one, or a dict of several by name")
    return {name: checked_instance(f"{what}[{name!r}]", one, kind, expected) for name, one in given.items()}


def chosen(what: str, options: Mapping[str | None, T], name: str | None) -> T:
    """Returns the one of that name.

    Raises:
        ValueError: There is none of that name.
    """
    try:
        return options[name]
    except (KeyError, TypeError):
        names = "none, for there is only one" if None in options else f"one of {', '.join(map(repr, options))}"
        raise ValueError(f"name={name!r} of {what}: expected {names}") from None
