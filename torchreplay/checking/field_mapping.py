"""Which field of a spec takes what an environment's loop produces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchreplay.checking.rollout import Call, Row
from torchreplay.schema.batch_plan import as_path, names_of
from torchreplay.schema.spec import Field, Path, fixed_fields, flatten, nest
from torchreplay.schema.views import Rows


class FieldMapping:
    """Fills the values of a writer's calls, and says what each row should then hold.

    A linked view names its fields itself; otherwise the names are `obs`, `action`, `reward`, `next_obs`, `terminated`,
    `truncated` and `done`. Observations of a `Dict` space may instead lie at the top of the spec, under the space's own
    keys. Fields that no environment fills (a log-probability, a recurrent state) get random numbers.

    Raises:
        ValueError: The spec has no field for the environment's observation.
    """

    def __init__(self, spec: Mapping[str, Any], view: Any, observation_space: Any, seed: int) -> None:
        self.fields = fixed_fields(flatten(spec), "tr.check")
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

    def fill(self, num_envs: int | None) -> dict[Path, Any]:
        """Returns random values for the fields that no environment fills."""
        shape = () if num_envs is None else (num_envs,)
        return {path: _random(self._rng, self.fields[path], shape) for path in self.own}

    def observation(self, obs: Any, prefix: str = "") -> dict[str, Any]:
        """Returns the observation's values by the names at the top of the spec, if the spec has them."""
        named = {prefix + top: obs[top] if self._by_key else obs for top in self._tops}
        return {name: value for name, value in named.items() if any(path[0] == name for path in self.fields)}

    def final_obs(self, final_obs: Any) -> Any:
        """Returns a vector environment's last observations in the form that `Writer.step` takes."""
        if self.named == [(self._tops[0],)] and not self._by_key:
            return final_obs
        if isinstance(final_obs, (Mapping, tuple)):  # of arrays of all environments
            whole = self.observation(final_obs)
            values = {path: lookup(whole, path) for path in self.named}
        else:
            each = [None if obs is None else self.observation(obs) for obs in final_obs]
            values = {path: [None if obs is None else lookup(obs, path) for obs in each] for path in self.named}
        return nest(values) if len(values) > 1 else values[self.named[0]]

    def step(self, given: Call | Row, fill: Mapping[Path, Any]) -> dict[str, Any]:
        """Returns the values of a step without the observation."""
        flags = {"terminated": given.terminated, "truncated": given.truncated}
        values = {self.reward: given.reward, ("action",): given.action, **fill}
        values |= {self.flags[name]: flag for name, flag in flags.items()}
        if not self.linked:
            values[("done",)] = np.logical_or(given.terminated, given.truncated)
        return nest({path: value for path, value in values.items() if self._has(path)})

    def _has(self, path: Path) -> bool:
        return any(field[: len(path)] == path for field in self.fields)


def lookup(values: Any, path: Path) -> Any:
    """Returns the value at `path` of nested dicts and tuples."""
    for name in path:
        values = values[int(name)] if isinstance(values, tuple) else values[name]
    return values


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


def _random(rng: np.random.Generator, field: Field, shape: tuple[int, ...]) -> Any:
    shape += field.shape
    if field.dtype == torch.bool:
        return rng.integers(0, 2, shape).astype(bool)
    if field.dtype.is_floating_point:
        return torch.from_numpy(rng.standard_normal(shape)).to(field.dtype)
    info = torch.iinfo(field.dtype)
    name = str(field.dtype).removeprefix("torch.")
    return rng.integers(info.min, info.max, shape, dtype=name, endpoint=True)
