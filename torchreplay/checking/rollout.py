"""A few episodes with random actions, recorded as the calls of a writer and the rows they should write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchreplay.buffer.writer import OwnAutoreset, checked_autoreset
from torchreplay.schema.spaces import single_spaces


@dataclass(slots=True)
class Row:
    """An observation and, unless it is an episode's first, the step that led to it."""

    env_index: int
    episode: int
    step: int
    obs: Any
    action: Any = None
    reward: Any = None
    terminated: Any = False
    truncated: Any = False
    key: int = -1
    values: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    @property
    def ends(self) -> bool:
        """Whether the episode ended here."""
        return bool(self.terminated) or bool(self.truncated)

    def __str__(self) -> str:
        return f"episode {self.episode}, step {self.step}" + (
            f" of environment {self.env_index}" if self.env_index else ""
        )


@dataclass(slots=True)
class Call:
    """One call of a writer's `reset` or `step`, with what the environment gave.

    The values may have a leading dimension of environments. `rows` are those whose keys it returns, by environment;
    `resets` the further ones of a same-step autoreset.
    """

    obs: Any
    rows: dict[int, Row]
    action: Any = None
    reward: Any = None
    terminated: Any = None
    truncated: Any = None
    final_obs: Any = None
    mask: Any = None
    resets: list[Row] = field(default_factory=list)

    @property
    def is_reset(self) -> bool:
        """Whether it is a `reset`, not a `step`."""
        return self.terminated is None


@dataclass(slots=True)
class Play:
    """All calls, in order; `num_envs` is None for an environment that is no vector environment."""

    calls: list[Call]
    num_envs: int | None = None
    autoreset: OwnAutoreset = "next_step"

    def streams(self) -> list[list[Row]]:
        """The rows of each environment in time."""
        streams: list[list[Row]] = [[] for _ in range(self.num_envs or 1)]
        for call in self.calls:
            for row in (*call.rows.values(), *call.resets):
                streams[row.env_index].append(row)
        return streams


class _Env:
    def __init__(self, index: int) -> None:
        self.index, self.episode, self.step = index, -1, 0

    def starts(self, obs: Any) -> Row:
        self.episode, self.step = self.episode + 1, 0
        return Row(self.index, self.episode, 0, obs)

    def goes_on(self, obs: Any, action: Any, reward: Any, terminated: Any, truncated: Any) -> Row:
        self.step += 1
        return Row(self.index, self.episode, self.step, obs, action, reward, terminated, truncated)


def play(env: Any, episodes: int, max_steps: int, seed: int) -> Play:
    """Returns what `episodes` episodes gave; one is broken off after `max_steps` steps."""
    env.action_space.seed(seed)
    if hasattr(env, "single_observation_space"):
        return _play_vector(env, episodes, max_steps, seed)
    calls, stream = [], _Env(0)
    for episode in range(episodes):
        obs = deepcopy(env.reset(seed=seed if episode == 0 else None)[0])
        calls.append(Call(obs, {0: stream.starts(obs)}))
        for _ in range(max_steps):
            action = env.action_space.sample()
            given = deepcopy(env.step(action)[:4])
            obs, reward, terminated, truncated = given
            calls.append(Call(obs, {0: stream.goes_on(obs, action, *given[1:])}, action, reward, terminated, truncated))
            if terminated or truncated:
                break
    return Play(calls)


def _play_vector(env: Any, episodes: int, max_steps: int, seed: int) -> Play:
    autoreset = checked_autoreset(env.metadata.get("autoreset_mode", "next_step"))
    streams = [_Env(i) for i in range(env.num_envs)]
    space, _ = single_spaces(env)
    obs = deepcopy(env.reset(seed=seed)[0])
    calls = [Call(obs, {stream.index: stream.starts(of_env(obs, stream.index, space)) for stream in streams})]
    over = np.zeros(len(streams), bool)
    ended = 0
    for _ in range(max_steps):
        calls.append(_step_vector(env, streams, autoreset, over))
        over = np.logical_or(calls[-1].terminated, calls[-1].truncated)
        if autoreset == "disabled" and over.any():
            obs = deepcopy(env.reset(options={"reset_mask": over.copy()})[0])
            rows = {i: streams[i].starts(of_env(obs, i, space)) for i in map(int, np.flatnonzero(over))}
            calls.append(Call(obs, rows, mask=over))
        ended += int(over.sum())
        if ended >= episodes:
            break
    return Play(calls, len(streams), autoreset)


def _step_vector(env: Any, streams: list[_Env], autoreset: OwnAutoreset, over: np.ndarray[Any, Any]) -> Call:
    space, actions = single_spaces(env)
    action = env.action_space.sample()
    obs, reward, terminated, truncated, info = deepcopy(env.step(action))
    final_obs = info.get("final_obs") if autoreset == "same_step" else None
    call = Call(obs, {}, action, reward, terminated, truncated, final_obs)
    for stream in streams:
        i = stream.index
        here = of_env(obs, i, space)
        if autoreset == "next_step" and over[i]:
            call.rows[i] = stream.starts(here)
            continue
        at_end = autoreset == "same_step" and (terminated[i] or truncated[i])
        led_to = of_env(final_obs, i, space) if at_end and final_obs is not None else here
        call.rows[i] = stream.goes_on(led_to, of_env(action, i, actions), reward[i], terminated[i], truncated[i])
        if at_end:
            call.resets.append(stream.starts(here))
    return call


def of_env(values: Any, index: int, space: Any) -> Any:
    """Returns the part of one environment of a vector environment's values, however they are nested.

    Args:
        values: Of all environments.
        index: Of the environment.
        space: Of one environment.
    """

    def own(part: Any) -> Any:
        # An array of objects has one for each environment.
        return part[index, ...] if isinstance(part, np.ndarray) and part.dtype != object else part[index]

    return each_part(own, values, space)


def each_part(change: Callable[[Any], Any], values: Any, space: Any = None) -> Any:
    """Returns what `change` makes of values, or of each part of nested ones, in dicts and tuples as they are.

    Args:
        change: What is done to each part.
        values: Perhaps nested.
        space: Of the values, or of one of several; a value of any length is one part. None: nobody knows.
    """
    inner = getattr(space, "spaces", None)
    if isinstance(values, Mapping):
        parts = inner if isinstance(inner, Mapping) else {}
        return {name: each_part(change, value, parts.get(name)) for name, value in values.items()}
    if hasattr(values, "_fields"):
        return change(values) if space is not None else type(values)(*(each_part(change, part) for part in values))
    if not isinstance(values, tuple) or (space is not None and has_any_length(space)):
        return change(values)
    of = inner if isinstance(inner, tuple) and len(inner) == len(values) else [None] * len(values)
    return tuple(each_part(change, value, part) for value, part in zip(values, of, strict=True))


def has_any_length(space: Any) -> bool:
    """Returns whether a space's values are texts, sequences or graphs."""
    return any(hasattr(space, name) for name in ("character_set", "feature_space", "node_space"))
