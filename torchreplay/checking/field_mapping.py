"""Which field of a spec takes what an environment's loop produces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchreplay.checking.ragged_values import as_array
from torchreplay.checking.rollout import Call, Row
from torchreplay.schema.batch_plan import as_path, names_of
from torchreplay.schema.spec import Column, Field, Path, Ragged, flatten, nest
from torchreplay.schema.views import Rows

LONGEST = 8
"""Random values of any length are shorter."""


class FieldMapping:
    """Fills the values of a writer's calls, and says what each row should then hold.

    A linked view names its fields itself; otherwise the names are `obs`, `action`, `reward`, `next_obs`, `terminated`,
    `truncated` and `done`. Observations of a `Dict` space may instead lie at the top of the spec, under the space's own
    keys. Fields that no environment fills (a log-probability, a recurrent state) get random numbers. Those of ragged
    ones are of random lengths, or of that of the field which they are `like`.

    Raises:
        ValueError: The spec has no field for the environment's observation.
    """

    def __init__(self, spec: Mapping[str, Any], view: Any, observation_space: Any, seed: int) -> None:
        self.fields = flatten(spec)
        self.linked = not isinstance(view, Rows)
        self.reward = as_path(getattr(view, "reward", "reward"))
        self.flags = {name: as_path(getattr(view, name, name)) for name in ("terminated", "truncated")}
        self.named = [as_path(name) for name in names_of(getattr(view, "observation", "obs"))]
        self._tops, self._by_key = _tops(spec, self.named, observation_space)
        nexts = () if self.linked else tuple(f"next_{top}" for top in self._tops)
        tops = (*self._tops, *nexts)
        self.observed = [path for path in self.fields if path[0] in tops]
        known = {self.reward, *self.flags.values(), *([] if self.linked else [("done",)])}
        self.own = [p for p in self.fields if p not in known and p not in self.observed and p[0] != "action"]
        self._rng = np.random.default_rng(seed)

    def fill(self, num_envs: int | None, given: Mapping[str, Any]) -> dict[Path, Any]:
        """Returns random values for the fields that no environment fills.

        Args:
            num_envs: Environments that the values are of; None: one, and no dimension for it.
            given: The other values of the rows, by which some have their lengths.
        """
        shape = () if num_envs is None else (num_envs,)
        lengths = dict[Path, list[int]]()  # of each environment, by the field that has a length of its own
        for path, column in self.fields.items():
            if isinstance(column, Ragged) and path not in self.own:
                value = _found(given, path)
                each = [value] if num_envs is None else value
                if each is not None:
                    lengths[_leader(path, column)] = [len(as_array(part, column)) for part in each]
        return {path: self._random(path, shape, lengths) for path in self.own}

    def _random(self, path: Path, shape: tuple[int, ...], lengths: dict[Path, list[int]]) -> Any:
        column = self.fields[path]
        if isinstance(column, Field):
            return _random(self._rng, column, shape)
        lanes = shape[0] if shape else 1
        each = lengths.setdefault(_leader(path, column), self._rng.integers(0, LONGEST, lanes).tolist())
        values = [_random(self._rng, column, (length,)) for length in each]
        return values if shape else values[0]

    def ragged_as_arrays(self, values: Any, lanes: bool, at: Path = ()) -> Any:
        """Returns nested values with arrays in the place of those of any length, such as texts and graphs.

        Args:
            values: By the names at the top of the spec.
            lanes: Whether they are of several environments: then each such value is a list of one for each.
            at: Where in the spec they are.
        """
        column = self.fields.get(at)
        if isinstance(column, Ragged):
            return [as_array(value, column) for value in values] if lanes else as_array(values, column)
        inner = dict.fromkeys(path[len(at)] for path in self.fields if path[: len(at)] == at and len(path) > len(at))
        if column is not None or not any(isinstance(self.fields[path], Ragged) for path in self._below(at)):
            return values
        named = isinstance(values, Mapping) and not at
        return {
            name: self.ragged_as_arrays(lookup(values, (name,)), lanes, (*at, name))
            for name in inner
            if not named or name in values
        }

    def ragged_bytes(self, row: Row) -> int:
        """Returns the bytes that the values of any length of a row take at most, when it is written."""
        given = [(self.observation(row.obs), self.observed)]
        if row.action is not None:
            given.append(({"action": row.action}, [path for path in self.fields if path[0] == "action"]))
        longest = LONGEST
        for values, paths in given:
            found = (
                (column, _found(values, path)) for path in paths if isinstance(column := self.fields[path], Ragged)
            )
            longest = max([longest, *(len(as_array(value, column)) for column, value in found)])
        return sum(longest * column.nbytes + 8 for column in self.fields.values() if isinstance(column, Ragged))

    def _below(self, at: Path) -> list[Path]:
        return [path for path in self.fields if path[: len(at)] == at]

    def observation(self, obs: Any, prefix: str = "") -> dict[str, Any]:
        """Returns the observation's values by the names at the top of the spec, if the spec has them."""
        named = {prefix + top: obs[top] if self._by_key else obs for top in self._tops}
        return {name: value for name, value in named.items() if any(path[0] == name for path in self.fields)}

    def written(self, obs: Any, lanes: bool, prefix: str = "") -> dict[str, Any]:
        """Returns the observation's values in the form that writers take: of texts their bytes."""
        values: dict[str, Any] = self.ragged_as_arrays(self.observation(obs, prefix), lanes)
        return values

    def final_obs(self, final_obs: Any) -> Any:
        """Returns a vector environment's last observations in the form that `Writer.step` takes."""
        if any(isinstance(self.fields[path], Ragged) for path in self.observed):
            final_obs = [None if obs is None else self.written(obs, False) for obs in final_obs]
            each = final_obs
            values = {path: [None if obs is None else lookup(obs, path) for obs in each] for path in self.named}
            return nest(values) if len(values) > 1 else values[self.named[0]]
        if self.named == [(self._tops[0],)] and not self._by_key:
            return final_obs
        if isinstance(final_obs, (Mapping, tuple)):  # of arrays of all environments
            whole = self.observation(final_obs)
            values = {path: lookup(whole, path) for path in self.named}
        else:
            each = [None if obs is None else self.observation(obs) for obs in final_obs]
            values = {path: [None if obs is None else lookup(obs, path) for obs in each] for path in self.named}
        return nest(values) if len(values) > 1 else values[self.named[0]]

    def step(self, given: Call | Row, fill: Mapping[Path, Any], lanes: bool) -> dict[str, Any]:
        """Returns the values of a step without the observation; `lanes`: it is one of several environments."""
        flags = {"terminated": given.terminated, "truncated": given.truncated}
        values = {self.reward: given.reward, ("action",): self.action(given.action, lanes), **fill}
        values |= {self.flags[name]: flag for name, flag in flags.items()}
        if not self.linked:
            values[("done",)] = np.logical_or(given.terminated, given.truncated)
        return nest({path: value for path, value in values.items() if self._has(path)})

    def action(self, action: Any, lanes: bool) -> Any:
        """Returns an action in the form that writers take."""
        return self.ragged_as_arrays(action, lanes, ("action",)) if self._has(("action",)) else action

    def _has(self, path: Path) -> bool:
        return any(field[: len(path)] == path for field in self.fields)


def lookup(values: Any, path: Path) -> Any:
    """Returns the value at `path` of nested dicts and tuples, and of graphs: of one, or of one for each environment."""
    for name in path:
        if hasattr(values, "_fields"):
            values = getattr(values, name)
        elif isinstance(values, tuple | list) and values and all(hasattr(value, "_fields") for value in values):
            values = [getattr(value, name) for value in values]
        else:
            values = values[int(name)] if isinstance(values, tuple) else values[name]
    return values


def _found(values: Mapping[str, Any], path: Path) -> Any:
    try:
        return lookup(values, path)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _leader(path: Path, column: Ragged) -> Path:
    """Returns the path of the field whose length values have."""
    return path if column.like is None else as_path(column.like)


def _tops(spec: Mapping[str, Any], named: list[Path], space: Any) -> tuple[list[str], bool]:
    """The names at the spec's top that hold observations, and whether they are keys of the observation."""
    tops = list(dict.fromkeys(path[0] for path in named if path[0] in spec))
    keys = list(getattr(space, "spaces", None) or ()) if hasattr(space, "keys") else []
    if len(tops) == 1 and not (tops[0] in keys and isinstance(spec[tops[0]], Field)):
        return tops, False
    by_key = [key for key in keys if key in (tops or spec)]
    if not by_key or len(by_key) < len(tops):
        raise ValueError(
            f"the spec has fields {list(spec)}, the environment's observation space is {space}: expected the "
            "observation in a field 'obs', in the view's `observation` fields, or fields with the names of a Dict space"
        )
    return by_key, True


def _random(rng: np.random.Generator, field: Column, shape: tuple[int, ...]) -> Any:
    shape += field.shape
    if field.dtype == torch.bool:
        return rng.integers(0, 2, shape).astype(bool)
    if field.dtype.is_floating_point:
        return torch.from_numpy(rng.standard_normal(shape)).to(field.dtype)
    info = torch.iinfo(field.dtype)
    name = str(field.dtype).removeprefix("torch.")
    return rng.integers(info.min, info.max, shape, dtype=name, endpoint=True)
