"""The last observations of a vector environment's episodes, in the forms in which environments give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .spec import Field, Path


def last_observations(given: Any, names: Sequence[str], fields: Mapping[Path, Field], lanes: int) -> dict[str, Any]:
    """Returns `infos["final_obs"]` by the names of the observation fields, with values `[lanes, ...]`.

    Gymnasium gives an array of all lanes, a nested dict of them, or an object array with one observation a lane and
    None in lanes whose episode goes on; those get zeros.

    Args:
        given: What the environment gave; for several observation fields a dict of their names.
        names: Names of the view's observation fields.
        fields: The fields of the spec.
        lanes: Environments.
    """
    paths = [tuple(name.split("/")) for name in names]
    values: dict[str, Any] = {}
    for path in paths:
        value = given if len(paths) == 1 else _inner(given, path, lanes)
        if value is None and len({p[0] for p in paths}) == 1:
            value = _inner(given, path[1:], lanes)  # of an observation whose name is that of the dict itself
        level = values
        for part in path[:-1]:
            level = level.setdefault(part, {})
        level[path[-1]] = _per_lane(value, path, fields, lanes)
    return values


def _inner(given: Any, path: Path, lanes: int) -> Any:
    """Returns the part of `given` at `path`, lane by lane where it is given so; None where there is none."""
    each = _each_lane(given, lanes)
    if each is not None and path:
        parts = [_inner(observation, path, lanes) for observation in each]
        return None if all(part is None for part in parts) else parts
    for name in path:
        if not isinstance(given, Mapping) or name not in given:
            return None
        given = given[name]
    return given


def _per_lane(value: Any, path: Path, fields: Mapping[Path, Field], lanes: int) -> Any:
    inner = dict.fromkeys(p[len(path)] for p in fields if p[: len(path)] == path and len(p) > len(path))
    if inner and isinstance(value, Mapping):
        return {name: _per_lane(value.get(name), (*path, name), fields, lanes) for name in inner}
    if inner and isinstance(value, tuple):
        return {name: _per_lane(value[int(name)], (*path, name), fields, lanes) for name in inner}
    each = _each_lane(value, lanes)
    if each is None:
        return value
    if inner:
        return {name: _per_lane([_of(v, name) for v in each], (*path, name), fields, lanes) for name in inner}
    absent = torch.zeros(fields[path].shape, dtype=fields[path].dtype)
    return torch.stack([absent if v is None else torch.as_tensor(v) for v in each]) if path in fields else value


def _each_lane(value: Any, lanes: int) -> list[Any] | None:
    """Returns the lanes' observations where they are given one by one."""
    one_by_one = isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object)
    return list(value) if one_by_one and len(value) == lanes else None


def _of(observation: Any, name: str) -> Any:
    if observation is None:
        return None
    return observation[int(name)] if isinstance(observation, tuple) else observation[name]
