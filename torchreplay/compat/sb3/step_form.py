"""The form of the steps that Stable-Baselines3 hands to a buffer, and the checks of their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Observation: TypeAlias = Array | dict[str, Array]
Flags: TypeAlias = NDArray[np.bool_]


class StepForm:
    """What the values of a step look like: one for each environment.

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        n_envs: Environments.
        handle_timeout_termination: Whether `"TimeLimit.truncated"` in an info means that the episode was cut short.

    Attributes:
        n_envs: Environments.
        snapshot: Returns the bytes of an observation, by which it is known again.
        never: False for each environment: the flags of a step that ends no episode.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        n_envs: int,
        handle_timeout_termination: bool,
    ) -> None:
        self.n_envs, self.never = n_envs, np.zeros(n_envs, bool)
        self._is_dict = isinstance(observation_space, spaces.Dict)
        parts = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {"": observation_space}
        self._shapes = {name: (n_envs, *(part.shape or ())) for name, part in parts.items()}
        self._action, self._each = (n_envs, *(action_space.shape or ())), (n_envs,)
        # Times 0, only NaN and infinity are not 0. One product takes a third of the time of isfinite().all().
        self._zeros = {name: _zeros(part, n_envs) for name, part in parts.items() if _is_float(part)}
        self._action_zeros = _zeros(action_space, n_envs) if _is_float(action_space) else None
        self.snapshot: Callable[[Any], Any] = _bytes_of_parts if self._is_dict else np.ndarray.tobytes
        self._tells_timeouts = handle_timeout_termination

    # Shapes

    def observation(self, name: str, value: Any) -> Observation:
        """Returns an observation as `[n_envs, *shape]`, or a dict of such; raises ValueError where it is none."""
        if self._is_dict:
            return {part: _shaped(f"{name}[{part!r}]", value[part], shape) for part, shape in self._shapes.items()}
        return _shaped(name, value, self._shapes[""])

    def action(self, value: Any) -> Array:
        """Returns an action, which may be flat, as `[n_envs, *shape]`; raises ValueError if it has another shape."""
        flat = self.n_envs, math.prod(self._action[1:])
        if len(self._action) > 1 and _is_like(np.shape(value), flat):
            return np.reshape(value, self._action)
        return _shaped("action", value, self._action)

    def each(self, name: str, value: Any) -> Array:
        """Returns a value as `[n_envs]`; raises ValueError if it has another shape."""
        if not _is_like(np.shape(value), self._each):
            _refuse_shape(name, value, self._each)
        return np.reshape(value, self._each)

    def ends(self, done: Any, infos: list[dict[str, Any]], linked: bool) -> tuple[Flags, Flags]:
        """Returns which episodes terminated and which were truncated; `never` twice if none did.

        Args:
            done: One for each environment.
            infos: One for each environment.
            linked: Whether a time limit counts where `done` is not set, as for n-step returns.
        """
        flags = done if done.__class__ is np.ndarray and done.shape == self._each else self.each("done", done)
        if True in flags.tolist():
            return self._flags(flags, infos)
        if linked and self._tells_timeouts:
            for info in infos:
                if info.get("TimeLimit.truncated"):
                    return self._flags(flags, infos)
        return self.never, self.never

    def _flags(self, done: Array, infos: list[dict[str, Any]]) -> tuple[Flags, Flags]:
        cut = [bool(info.get("TimeLimit.truncated")) for info in infos] if self._tells_timeouts else False
        truncated = np.broadcast_to(cut, self.n_envs)
        return done.astype(bool) & ~truncated, truncated

    # Values

    def unlike(self, observation: Any, earlier: Any) -> Flags:
        """Returns for each environment whether its observation is another than in a snapshot, bool `[n_envs]`."""
        parts, before = (observation.values(), earlier) if self._is_dict else ([observation], [earlier])
        differs = self.never.copy()
        for part, was in zip(parts, before, strict=True):
            if part.nbytes != len(was):
                return ~self.never
            differs |= (np.frombuffer(was, part.dtype).reshape(part.shape) != part).reshape(self.n_envs, -1).any(axis=1)
        return differs

    def check_observation(self, name: str, value: Any) -> None:
        """Raises ValueError if an observation has a NaN or an infinite number."""
        if not self._is_dict:
            if self._zeros and value.ravel().dot(self._zeros[""]) != 0:
                _refuse_unless_finite(name, value)
            return
        for part, zeros in self._zeros.items():
            if value[part].ravel().dot(zeros) != 0:
                _refuse_unless_finite(f"{name}[{part!r}]", value[part])

    def check_action_and_reward(self, action: Any, reward: Any) -> None:
        """Raises ValueError if one of them has a NaN or an infinite number."""
        if self._action_zeros is not None and action.ravel().dot(self._action_zeros) != 0:
            _refuse_unless_finite("action", action)
        if not math.isfinite(sum(reward.tolist())):
            _refuse_unless_finite("reward", reward)


def _is_like(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Returns whether two shapes differ in leading axes of 1 alone, such as that of one environment."""
    a, b = (next((s[i:] for i, n in enumerate(s) if n != 1), ()) for s in (shape, expected))
    return a == b


def _shaped(name: str, value: Any, expected: tuple[int, ...]) -> Array:
    """Returns a value for each environment in its shape. Only single numbers may come in any other."""
    if len(expected) > 1 and not _is_like(np.shape(value), expected):
        _refuse_shape(name, value, expected)
    return np.reshape(value, expected)


def _refuse_shape(name: str, value: Any, expected: tuple[int, ...]) -> NoReturn:
    given = np.shape(value)
    turned = sorted(given) == sorted(expected)
    why = ". Its axes come in another order. For pictures put VecTransposeImage inside VecNormalize" if turned else ""
    raise ValueError(f"{name} has shape {given}: expected {expected}, with a value for each environment{why}")


def _bytes_of_parts(observation: dict[str, Any]) -> list[bytes]:
    return [part.tobytes() for part in observation.values()]


def _is_float(space: spaces.Space[Any]) -> bool:
    return space.dtype is not None and space.dtype.kind == "f"


def _zeros(space: spaces.Space[Any], n_envs: int) -> Array:
    return np.zeros(n_envs * math.prod(space.shape or ()), space.dtype)


def _refuse_unless_finite(name: str, values: Any) -> None:
    """Raises ValueError if there is a NaN or an infinite number; a sum may have overflowed without one."""
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(
            f"{name} has {len(bad)} NaN or infinite numbers of {np.size(values)}, the first at index {bad[0]}: "
            f"expected finite ones; nothing was written. VecCheckNan shows where they come from"
        )
