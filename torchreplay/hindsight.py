"""Hindsight experience replay: transitions whose goal is one that the episode reached."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch

from .arguments import as_floats, checked_choice
from .plan import (
    GOALS,
    BatchPlan,
    Kind,
    Roles,
    as_path,
    check_gamma,
    check_names,
    field_named,
    names_of,
    next_path,
    observation_fields,
    reward_field,
    roles_of,
)
from .spec import Field, Path

GoalFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True, slots=True)
class Hindsight:
    """One-step transitions of ended episodes, some of them with another goal (Andrychowicz et al. 2017).

    With probability `share` the desired goal of `obs` and `next_obs` is replaced by what the same episode achieved at
    another of its steps (section 4.5): `"future"`: a uniform one of those after the anchor; `"final"`: the last one;
    `"episode"`: a uniform one of the episode's that are still held. The reward of such an item, and its terminated flag
    where a function is given, are computed for the new goal. A batch is that of `Transitions(n_step=1)` and has
    `relabelled`, bool `[B]`, besides.

    Args:
        compute_reward: `compute_reward(achieved, desired)`, both `[B, *goal]`, returns the rewards `[B]` for having
            achieved the one while the other was desired. Called once a batch, with the goals of all its items.
        achieved: Name of the field with the goal that was achieved; a part of the observation.
        desired: Name of the field with the goal that was desired; a part of the observation, of the same type.
        strategy: `"future"`, `"final"` or `"episode"`.
        share: Of the items to relabel: 0.8 is the paper's k = 4.
        compute_terminated: `compute_terminated(achieved, desired)` returns bools `[B]`, for environments that end when
            the goal is reached. None: the flags are as recorded.
        gamma: Discount of a step.
        observation: Name of the observation field, or of several, as for `Transitions`.
        reward: Name of the reward field, of a floating dtype.
        terminated: Name of the bool scalar field that says the episode ended for good.
        truncated: Name of the bool scalar field that says the episode was cut short.

    The functions travel to other processes only where pickle takes them; to draw in a process without them, attach with
    `ReplayBuffer.attach(handle, view=...)`.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument is no number, no name or no function where it should be one.
    """

    functions: ClassVar[tuple[str, ...]] = ("compute_reward", "compute_terminated")

    compute_reward: GoalFunction | None
    achieved: str = "obs/achieved_goal"
    desired: str = "obs/desired_goal"
    strategy: str = "future"
    share: float = 0.8
    compute_terminated: GoalFunction | None = None
    gamma: float = 0.99
    observation: str | Sequence[str] = "obs"
    reward: str = "reward"
    terminated: str = "terminated"
    truncated: str = "truncated"

    def __post_init__(self) -> None:
        as_floats(self, "share", "gamma")
        check_gamma(self.gamma)
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is {self.share}: expected 0 to 1")
        checked_choice("strategy", self.strategy, GOALS[1:])
        for name in self.functions:
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"{name} is {function!r}: expected a function of (achieved, desired)")
        check_names(self, "achieved", "desired", "reward", "terminated", "truncated")
        names = names_of(self.observation)
        if not isinstance(self.observation, str):
            object.__setattr__(self, "observation", names)

    def native(self) -> tuple[int, ...]:
        """Returns what decides which items can be drawn, for the native core: those of episodes that have ended."""
        whole_episode = (1 << 32) - 1
        return (whole_episode, 1, 1, 0, 0, 1)

    @property
    def rows_of_an_item(self) -> int:
        """The rows that one item needs."""
        return 2

    @property
    def complete_when(self) -> str:
        """When an item can be drawn, for errors."""
        return "only the steps of an episode that a flag has ended are items"

    def roles(self, fields: Mapping[Path, Field]) -> Roles:
        """Returns the fields' roles; raises ValueError for a spec that does not fit the view."""
        return roles_of(fields, self.observation, self.terminated, self.truncated)

    def plan(self, fields: Mapping[Path, Field]) -> BatchPlan:
        """Returns how a batch is built; raises ValueError for a spec that does not fit the view."""
        plan = BatchPlan(fields, 1, self.gamma, self.strategy, self.share)
        observed = observation_fields(fields, self.observation)
        reward = reward_field(fields, self.reward, observed)
        achieved, desired = (field_named(fields, role, getattr(self, role)) for role in ("achieved", "desired"))
        for path in (achieved, desired):
            if path not in observed or fields[path] != fields[achieved]:
                raise ValueError(
                    f"achieved={self.achieved!r} and desired={self.desired!r}: expected observations of one type, "
                    f"got {fields[achieved]} and {fields[desired]}"
                )

        def add_observation(path: Path, first: int, to: Path) -> None:
            if path == desired:
                plan.add_goal(path, achieved, first, to)
            else:
                plan.add(Kind.ANCHOR, path, first=first, to=to)

        for path in fields:
            if path in observed:
                add_observation(path, 0, path)
            else:
                plan.add(Kind.RETURN if path == reward else Kind.ANCHOR, path, first=0 if path == reward else 1)
        for path in observed:
            add_observation(path, 1, next_path(path))
        plan.add_flags(Kind.DISCOUNT, "discount", torch.float32)
        plan.add_flags(Kind.RELABELLED, "relabelled")
        return plan

    def finish(self, batch: dict[str, Any]) -> None:
        """Gives the relabelled items of a batch, in place, the rewards, and the terminated flags, of their new goals.

        Raises:
            RuntimeError: The functions did not travel to this process.
            ValueError: A function returned something of another shape.
        """
        relabelled = batch["relabelled"]
        if self.compute_reward is None:
            raise RuntimeError(
                "the reward function did not travel to this process: attach with ReplayBuffer.attach(handle, "
                "view=Hindsight(compute_reward, ...))"
            )
        goals = _get(batch, next_path(as_path(self.achieved))), _get(batch, next_path(as_path(self.desired)))
        _put(batch, as_path(self.reward), self.compute_reward(*goals), relabelled, "compute_reward")
        if self.compute_terminated is not None:
            _put(batch, as_path(self.terminated), self.compute_terminated(*goals), relabelled, "compute_terminated")
            batch["discount"] = (~_get(batch, as_path(self.terminated))).to(torch.float32) * self.gamma

    def as_data(self) -> Hindsight:
        """Returns the view without its functions: what a segment can say about it."""
        return replace(self, compute_reward=None, compute_terminated=None)

    def travelling(self) -> Hindsight | None:
        """Returns the view when pickle takes its functions, else None."""
        try:
            pickle.dumps(self)
        except Exception:  # pickle and what it calls raise all kinds
            return None
        return self


def _get(batch: dict[str, Any], path: Path) -> Any:
    value: Any = batch
    for name in path:
        value = value[name]
    return value


def _put(batch: dict[str, Any], path: Path, values: Any, where: torch.Tensor, function: str) -> None:
    level = _get(batch, path[:-1])
    old = level[path[-1]]
    new = torch.as_tensor(values)
    if new.shape != old.shape:
        raise ValueError(f"{function} returned shape {tuple(new.shape)}: expected {tuple(old.shape)}")
    level[path[-1]] = torch.where(where, new.to(old.dtype), old)
