"""What a batch of a linked view consists of, in the form in which the native core builds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from torchreplay.schema.spec import Column, Field, Path, Ragged, to_native
from torchreplay.validation import checked_instance


class Kind(IntEnum):
    """How an output comes about; in the order of the native core's `Output::Kind`."""

    ANCHOR = 0  # rows counted from the anchor
    END = 1  # rows counted from the item's end
    RETURN = 2
    DISCOUNT = 3
    MASK = 4
    FIRST = 5
    RELABELLED = 6
    GOAL = 7


GOALS = ("none", "future", "final", "episode")
"""Where hindsight takes a goal from; in the order of the native core's `Goal`."""


@dataclass(slots=True, repr=False, eq=False)
class BatchPlan:
    """The tensors of a batch, by path and in order, and how each comes about.

    Args:
        fields: The fields of the rows.
        steps: Steps of an item at most.
        gamma: Discount of the return.
        goal: One of `GOALS`.
        share: Of items that get another goal.
        discount: The field by which a step is discounted beside `gamma`; None: there is none.
    """

    fields: Mapping[Path, Column]
    steps: int
    gamma: float = 1.0
    goal: str = "none"
    share: float = 0.0
    discount: Path | None = None
    outputs: dict[Path, Column] = field(default_factory=dict)
    native: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    several: set[Path] = field(default_factory=set)
    """Ragged outputs of which an item has a value for each of several rows."""

    def native_outputs(self) -> list[tuple[Any, ...]]:
        """Returns the form in which the native core takes the tensors: as `to_native` gives it, and `several`."""
        return [
            (*output, output[0] in self.several) if len(output) > 3 else output for output in to_native(self.outputs)
        ]

    @property
    def discount_field(self) -> int:
        """The position of the field `discount`; -1: there is none."""
        return -1 if self.discount is None else list(self.fields).index(self.discount)

    def add(self, kind: Kind, path: Path, lead: tuple[int, ...] = (), first: int = 0, to: Path | None = None) -> None:
        """Adds rows of the field `path`, or their return, as the output `to` (by default of the same name).

        Args:
            kind: Which rows.
            path: The field.
            lead: Leading dimensions: () for one row, (n,) for n rows.
            first: Position of the first row.
            to: The output's path.

        Raises:
            ValueError: Two outputs would have one name.
        """
        source = self.fields[path]
        if isinstance(source, Ragged):
            self._put(to or path, Ragged(source.dtype, source.shape))
            if lead:
                self.several.add(to or path)
        else:
            self._put(to or path, Field(lead + source.shape, source.dtype))
        self.native.append((kind, list(self.fields).index(path), first, lead[0] if lead else 1, 0))

    def add_goal(self, path: Path, achieved: Path, first: int, to: Path) -> None:
        """Adds the desired goal `path`, replaced by another row's `achieved` where the item is relabelled."""
        self.add(Kind.GOAL, path, first=first, to=to)
        self.native[-1] = (*self.native[-1][:4], list(self.fields).index(achieved))

    def add_flags(self, kind: Kind, name: str, dtype: torch.dtype = torch.bool, lead: tuple[int, ...] = ()) -> None:
        """Adds an output that is no field's."""
        self._put((name,), Field(lead, dtype))
        self.native.append((kind, 0, 0, lead[0] if lead else 1, 0))

    def _put(self, path: Path, output: Column) -> None:
        if any(path[: len(p)] == p or p[: len(path)] == path for p in self.outputs):
            raise ValueError(f"the batch would have two values named {'/'.join(path)!r}: rename the field of that name")
        self.outputs[path] = output


class Roles(NamedTuple):
    """What a writer has to know of a linked view: the positions of fields in the spec."""

    observation: tuple[int, ...]
    terminated: int
    truncated: int
    reward: int | None
    """None: there is no such field."""


def names_of(names: str | Iterable[str], role: str = "observation") -> tuple[str, ...]:
    """Returns one name, or several, of the fields with this role in the view, as a tuple.

    Raises:
        TypeError: It is no name, or one of several is none.
    """
    if isinstance(names, str):
        return (names,)
    given: Any = names
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, bytes | Mapping) else (None,)
    if not all(isinstance(name, str) for name in several):
        raise TypeError(f"{role} is {names!r:.200}: expected the name of a field, or several of them")
    return several


def check_names(view: object, *roles: str) -> None:
    """Checks the attributes of a view that name one field each.

    Raises:
        TypeError: One is no string.
    """
    for role in roles:
        checked_instance(role, getattr(view, role), str, "the name of a field")


def check_gamma(gamma: float) -> None:
    """Raises ValueError unless `gamma` is within [0, 1]."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}: expected 0 to 1")


def reward_field(fields: Mapping[Path, Column], name: str, observed: list[Path]) -> Path:
    """Returns the path of the reward.

    Raises:
        ValueError: There is none, it is observed, or of a dtype without fractions.
    """
    path = field_named(fields, "reward", name)
    if path in observed or not isinstance(fields[path], Field) or not fields[path].dtype.is_floating_point:
        raise ValueError(f"reward={name!r} is {fields[path]}: expected a floating dtype, not observed")
    return path


def discount_field(fields: Mapping[Path, Column], name: str, reward: Path, observed: list[Path]) -> Path:
    """Returns the path of the steps' discounts.

    Raises:
        ValueError: There is none, it is observed or the reward, or no floating scalar.
    """
    path = field_named(fields, "discount", name)
    if path == reward:
        raise ValueError(f"discount={name!r} is the reward: expected a field of its own")
    field = fields[path]
    if path in observed or not isinstance(field, Field) or field.shape or not field.dtype.is_floating_point:
        raise ValueError(f"discount={name!r} is {field}: expected Field(), or another floating dtype, not observed")
    return path


def as_path(name: str) -> Path:
    """Returns the path of a name like `"obs/image"`."""
    return tuple(name.split("/"))


def observation_fields(
    fields: Mapping[Path, Column], observation: str | Iterable[str], role: str = "observation"
) -> list[Path]:
    """Returns the fields that `observation` names, singly or as nested dicts; `role` is what it is called.

    Raises:
        ValueError: A name is no field's.
    """
    names = [as_path(name) for name in names_of(observation, role)]
    for name in names:
        if not any(path[: len(name)] == name for path in fields):
            raise ValueError(f"{role} {'/'.join(name)!r} is no field of the spec: it has {_names(fields)}")
    if not names:
        raise ValueError("the view observes nothing: expected the name of an observation field")
    return [path for path in fields if any(path[: len(name)] == name for name in names)]


def field_named(fields: Mapping[Path, Column], role: str, name: str) -> Path:
    """Returns the path of the field `name`, which has this role in the view.

    Raises:
        ValueError: There is none.
    """
    path = as_path(name)
    if path not in fields:
        raise ValueError(f"{role}={name!r} is no field of the spec: it has {_names(fields)}")
    return path


def roles_of(
    fields: Mapping[Path, Column],
    observation: str | Iterable[str],
    terminated: str,
    truncated: str,
    reward: str = "reward",
) -> Roles:
    """Returns the roles of the fields; a view without a role for the reward has it under its usual name.

    Raises:
        ValueError: A name is no field's, or the fields do not fit their roles.
    """
    paths = list(fields)
    observed = observation_fields(fields, observation)
    ends = [field_named(fields, role, name) for role, name in (("terminated", terminated), ("truncated", truncated))]
    for path in ends:
        if fields[path] != Field((), torch.bool) or path in observed:
            name = "/".join(path)
            raise ValueError(f"field {name!r} is {fields[path]}: expected Field((), torch.bool), not observed")
    named = as_path(reward)
    rewarded = named if named not in observed and isinstance(fields.get(named), Field) else None
    return Roles(
        tuple(paths.index(path) for path in observed),
        paths.index(ends[0]),
        paths.index(ends[1]),
        paths.index(rewarded) if rewarded in paths else None,
    )


def next_path(path: Path) -> Path:
    """Returns the path under which the observation after the item is found."""
    return (f"next_{path[0]}", *path[1:])


def _names(fields: Mapping[Path, Column]) -> str:
    return ", ".join(repr("/".join(path)) for path in fields)
