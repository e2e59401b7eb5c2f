"""The last observations of a vector environment's episodes, in the forms in which environments give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from torchreplay.schema.spec import Column, Field, Path, Ragged

Array: TypeAlias = np.ndarray[Any, Any]


class FinalObservations:
    """Turns `infos["final_obs"]` into values `[num_envs, ...]` of the observation fields.

    Gymnasium gives an array of all environments, a nested dict of them, or an object array with one observation for
    each environment. The object array has None in environments whose episode goes on; those get zeros.

    Args:
        fields: The fields of the spec.
        ended: For each environment whether its episode ends.
    """

    def __init__(self, fields: Mapping[Path, Column], ended: Sequence[int]) -> None:
        self._fields = fields
        self._ended = ended

    def by_name(self, given: Any, names: Sequence[str]) -> dict[str, Any]:
        """Returns the values, nested by the names of the observation fields.

        Args:
            given: What the environment gave; for several observation fields a dict of their names.
            names: Names of the view's observation fields.

        Raises:
            ValueError: An environment that ends has no observation, or one that does not fit its field.
        """
        paths = [tuple(name.split("/")) for name in names]
        values: dict[str, Any] = {}
        for path in paths:
            value = None if paths == [path[:1]] else self._inner(given, path)
            if value is None and len({p[0] for p in paths}) == 1:
                value = self._inner(given, path[1:])  # of an observation whose name is that of the dict itself
            if value is None and len(paths) == 1:
                value = given
            level = values
            for part in path[:-1]:
                level = level.setdefault(part, {})
            level[path[-1]] = self._per_lane(value, path)
        return values

    def _inner(self, given: Any, path: Path) -> Any:
        """Returns the part of `given` at `path`, for each environment where it is given so; None: there is none."""
        each = self._each_environment(given)
        if each is not None and path:
            parts = [self._inner(observation, path) for observation in each]
            return None if all(part is None for part in parts) else parts
        for name in path:
            given = _part(given, name)
        return given

    def _per_lane(self, value: Any, path: Path) -> Any:
        inner = dict.fromkeys(p[len(path)] for p in self._fields if p[: len(path)] == path and len(p) > len(path))
        each = self._each_environment(value)
        if inner and isinstance(value, (Mapping, tuple)):
            return {name: self._per_lane(_part(value, name), (*path, name)) for name in inner}
        if inner and each is not None:
            return {name: self._per_lane([_part(v, name) for v in each], (*path, name)) for name in inner}
        if each is None:
            return value
        field = self._fields[path]
        for index, observation in enumerate(each):
            if observation is None and self._ended[index]:
                raise ValueError(
                    f"field {'/'.join(path)!r}: the episode ends in environment {index}, and final_obs has nothing for "
                    f"it"
                )
        if isinstance(field, Ragged):
            return [() if observation is None else observation for observation in each]
        return _stacked(field, [self._observation(v, index, path, field) for index, v in enumerate(each)])

    def _observation(self, value: Any, index: int, path: Path, field: Field) -> torch.Tensor | Array | None:
        """Returns one environment's value of one field; None where its episode goes on and it has none."""
        if value is None:
            return None
        found = _numbers(value)
        if found is None or tuple(found.shape) != field.shape:
            given = type(value).__name__ if found is None else f"shape {tuple(found.shape)}"
            raise ValueError(
                f"field {'/'.join(path)!r}: final_obs of environment {index} is of {given}, expected {field}"
            )
        return found

    def _each_environment(self, value: Any) -> list[Any] | None:
        """Returns the environments' observations where they are given one by one."""
        one_by_one = isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object)
        return list(value) if one_by_one and len(value) == len(self._ended) else None


def _numbers(value: Any) -> torch.Tensor | Array | None:
    """Returns a tensor as it is and anything else as an array; None where it is none of numbers."""
    if isinstance(value, torch.Tensor):
        return value
    if type(value) is not np.ndarray and isinstance(value, np.ndarray) and np.ma.is_masked(value):
        return None  # what an array makes of it has lost the mask
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array if array.dtype.kind in "biufc" else None


def _stacked(field: Field, values: list[torch.Tensor | Array | None]) -> torch.Tensor | Array:
    """Returns the environments' values of a field as one, with zeros where there is none."""
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if arrays and not any(isinstance(value, torch.Tensor) for value in values):
        # Not by way of torch, which takes arrays of fewer kinds and makes float32 of Python floats.
        zeros = np.zeros(field.shape, arrays[0].dtype)
        return np.stack([zeros if value is None else value for value in values])
    absent = torch.zeros(field.shape, dtype=field.dtype, device="cpu")
    return torch.stack([absent if value is None else torch.as_tensor(value, device="cpu") for value in values])


def _part(value: Any, name: str) -> Any:
    """Returns the part of an observation that `name` names; None where there is none."""
    if isinstance(value, Mapping):
        return value.get(name)
    if hasattr(value, "_fields"):  # a graph
        return getattr(value, name, None)
    if isinstance(value, tuple) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return None
