"""`create_env_dict`, `create_before_add_func`: what Gymnasium's spaces say about the columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def create_env_dict(env: Any, *, int_type: Any = None, float_type: Any = None) -> dict[str, Any]:
    """Returns the `env_dict` of an environment: `rew`, `done`, and what its spaces have.

    `obs`, `next_obs` and `act` are numbered where the space is a `Tuple`. Those of a `Dict` have its keys as names.

    Args:
        env: A Gymnasium environment.
        int_type: Of discrete values; None: int32.
        float_type: Of others, `rew` and `done`; None: float32.

    Raises:
        NotImplementedError: A space is none of `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, nor a `Dict` or
            `Tuple` of such.
    """
    int_type, float_type = int_type or np.int32, float_type or np.float32
    found: dict[str, Any] = {name: {"shape": 1, "dtype": float_type} for name in ("rew", "done")}
    for name, space in _parts("obs", env.observation_space):
        found[name] = _column(space, int_type, float_type)
        found[f"next_{name}"] = _column(space, int_type, float_type)
    for name, space in _parts("act", env.action_space):
        found[name] = _column(space, int_type, float_type)
    return found


def create_before_add_func(env: Any) -> Callable[..., dict[str, Any]]:
    """Returns a function that takes `obs`, `act`, `next_obs`, `rew`, `done` apart, as `create_env_dict` names them."""

    def before_add(obs: Any, act: Any, next_obs: Any, rew: Any, done: Any) -> dict[str, Any]:
        following = _values("obs", env.observation_space, next_obs)
        return {
            **_values("obs", env.observation_space, obs),
            **_values("act", env.action_space, act),
            **{f"next_{name}": value for name, value in following.items()},
            "rew": rew,
            "done": done,
        }

    return before_add


def _parts(name: str, space: Any) -> Iterator[tuple[str, Any]]:
    from gymnasium.spaces import Dict, Tuple

    if isinstance(space, Dict):
        yield from space.spaces.items()
    elif isinstance(space, Tuple):
        yield from ((f"{name}{i}", part) for i, part in enumerate(space.spaces))
    else:
        yield name, space


def _values(name: str, space: Any, value: Any) -> dict[str, Any]:
    from gymnasium.spaces import Dict, Tuple

    if isinstance(space, Dict):
        return {key: value[key] for key in space.spaces}
    if isinstance(space, Tuple):
        return {f"{name}{i}": part for i, part in enumerate(value)}
    return {name: value}


def _column(space: Any, int_type: Any, float_type: Any) -> dict[str, Any]:
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    if isinstance(space, Discrete):
        return {"shape": 1, "dtype": int_type}
    if isinstance(space, (MultiBinary, MultiDiscrete)):
        return {"shape": space.shape, "dtype": int_type}
    if isinstance(space, Box):
        return {"shape": space.shape, "dtype": float_type}
    raise NotImplementedError(f"{space} is no space whose values are one column")
