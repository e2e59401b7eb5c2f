"""Hindsight experience replay: transitions whose goal is one that the episode reached."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch

from torchreplay.schema.batch_plan import (
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
from torchreplay.schema.spec import Column, Path, Ragged
from torchreplay.validation import as_floats, as_numbers, checked_choice

GoalFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Stands for a function that the view has in other processes, and that did not travel to this one."""


@dataclass(frozen=True, slots=True)
class Hindsight:
    """One-step transitions of ended episodes, some of them with another goal (Andrychowicz et al. 2017).

    With probability `share` the desired goal of `obs` and `next_obs` is replaced by the goal achieved at another step
    of the same episode (section 4.5): `"future"`: a uniform one of those after the anchor; `"final"`: the last one;
    `"episode"`: a uniform one of the episode's that are still held. The reward of such an item, and its terminated flag
    where a function is given, are computed for the new goal. A batch is that of `Transitions(n_step=1)` and has
    `relabelled`, bool `[B]`, besides. `gather` and `Reverse` relabel nothing.

    The functions are called once a batch, if one of its items is relabelled. They get copies of the goals of all its
    items, on the CPU and without gradients. What they return may be anything that `torch.as_tensor` takes, on any
    device. A `priority` given with a step is that of the item that starts at the observation before it.

    Args:
        compute_reward: `compute_reward(achieved, desired)`, both `[B, *goal]`, returns the rewards `[B]` (`[B, *shape]`
            where the reward field has a shape) for having achieved the one while the other was desired. None: draws
            that relabel an item are refused; another process may be given the function.
        achieved: Name of the field with the goal that was achieved; a part of the observation.
        desired: Name of the field with the goal that was desired; a part of the observation, of the same type.
        strategy: `"future"`, `"final"` or `"episode"`.
        share: Of the items to relabel: 0.8 is the paper's k = 4.
        compute_terminated: `compute_terminated(achieved, desired)` returns bools `[B]`, for environments that end when
            the goal is reached. None: the flags are as recorded. All processes have one, or none has.
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

    Example:
        >>> flag = tr.Field((), torch.bool)
        >>> obs = {"place": tr.Field(2), "achieved_goal": tr.Field(2), "desired_goal": tr.Field(2)}
        >>> spec = {"obs": obs, "reward": tr.Field(), "terminated": flag, "truncated": flag}
        >>> view = tr.Hindsight(lambda achieved, desired: (achieved == desired).all(1).float() - 1)
        >>> buffer = tr.ReplayBuffer(spec, capacity=100, view=view)
    """

    functions: ClassVar[tuple[str, ...]] = ("compute_reward", "compute_terminated")

    compute_reward: GoalFunction | Elsewhere | None
    achieved: str = "obs/achieved_goal"
    desired: str = "obs/desired_goal"
    strategy: str = "future"
    share: float = 0.8
    compute_terminated: GoalFunction | Elsewhere | None = None
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
            if not (function is None or isinstance(function, Elsewhere) or callable(function)):
                raise TypeError(f"{name} is {function!r}: expected a function of (achieved, desired)")
        check_names(self, "achieved", "desired", "reward", "terminated", "truncated")
        if self.achieved == self.desired:
            raise ValueError(f"achieved and desired are both {self.achieved!r}: expected two fields")
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

    def roles(self, fields: Mapping[Path, Column]) -> Roles:
        """Returns the fields' roles; raises ValueError for a spec that does not fit the view."""
        return roles_of(fields, self.observation, self.terminated, self.truncated, self.reward)

    def plan(self, fields: Mapping[Path, Column]) -> BatchPlan:
        """Returns how a batch is built; raises ValueError for a spec that does not fit the view."""
        plan = BatchPlan(fields, 1, self.gamma, self.strategy, self.share)
        observed = observation_fields(fields, self.observation)
        reward = reward_field(fields, self.reward, observed)
        achieved, desired = (field_named(fields, role, getattr(self, role)) for role in ("achieved", "desired"))
        unseen = [name for name in (self.achieved, self.desired) if as_path(name) not in observed]
        if unseen:
            names = (*names_of(self.observation), *unseen)
            raise ValueError(f"{unseen[0]!r} is not an observation: name it in observation={names!r}")
        for role, path in (("achieved", achieved), ("desired", desired)):
            if isinstance(fields[path], Ragged):
                raise ValueError(
                    f"{role}={'/'.join(path)!r} is {fields[path]}: expected a Field, as goals have one shape"
                )
        if fields[achieved] != fields[desired]:
            raise ValueError(
                f"achieved={self.achieved!r} is {fields[achieved]} and desired={self.desired!r} is {fields[desired]}: "
                f"expected fields of one type"
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
            RuntimeError: Some are relabelled, and this process lacks the functions.
            ValueError: A function returned what is no reward, or no flag, of each item.
        """
        # torch.compile does not look at values.
        if not torch.compiler.is_compiling() and not batch["relabelled"].any():
            return
        if not callable(self.compute_reward) or isinstance(self.compute_terminated, Elsewhere):
            raise RuntimeError(
                "this process lacks the view's functions, which relabelled items need: make the buffer, or attach, "
                "load or open it, with view=Hindsight(compute_reward, ...)"
            )
        self._compute(batch, self.compute_reward, "compute_reward", as_path(self.reward))
        if self.compute_terminated is not None:
            self._compute(batch, self.compute_terminated, "compute_terminated", as_path(self.terminated))
            batch["discount"] = (~_get(batch, as_path(self.terminated))).to(torch.float32) * self.gamma

    @torch.no_grad()
    def _compute(self, batch: dict[str, Any], function: GoalFunction, name: str, path: Path) -> None:
        """Puts what `function`, called `name`, returns for the relabelled items into the batch's `path`."""
        # Copies: a function may work in place.
        goals = (_get(batch, next_path(as_path(goal))).clone() for goal in (self.achieved, self.desired))
        values = function(*goals)
        level = _get(batch, path[:-1])
        old = level[path[-1]]
        bools = old.dtype == torch.bool
        kind = "bools" if bools else "real numbers"
        new = as_numbers(f"what {name} returned", values, f"{kind}, one for each item", device=old.device)
        if new.shape != old.shape or (new.dtype != torch.bool if bools else new.is_complex()):
            raise ValueError(f"{name} returned {new.dtype} {list(new.shape)}: expected {kind} {list(old.shape)}")
        relabelled = batch["relabelled"].reshape(-1, *[1] * (old.ndim - 1))
        level[path[-1]] = torch.where(relabelled, new.to(old.dtype), old)

    def as_data(self) -> Hindsight:
        """Returns the view with `Elsewhere` for each function that it has: what a segment can say about it."""
        functions = (self.compute_reward, self.compute_terminated)
        reward, terminated = (None if function is None else Elsewhere() for function in functions)
        return replace(self, compute_reward=reward, compute_terminated=terminated)

    def with_functions_of(self, view: object) -> Hindsight:
        """Returns the view, as a segment describes it, with the functions of `view`, if that has any.

        Raises:
            ValueError: `view` is another one, or it has a `compute_terminated` and the segment's has none, or the other
                way round. Where the segment's has no `compute_reward` either, it is not known what others have.
        """
        if not (isinstance(view, Hindsight) and self.is_same_but_for_functions(view)):
            raise ValueError(f"view is {view}: expected the buffer's own, which is {self}")
        if not callable(view.compute_reward):
            return self
        others, ours = self.compute_terminated is not None, callable(view.compute_terminated)
        if self.compute_reward is not None and ours != others:
            has, made, do = ("a", "without", "leave it out") if ours else ("no", "with", "give it too")
            raise ValueError(
                f"view has {has} compute_terminated, and the buffer was made {made} one: learners would compute "
                f"different targets; {do}"
            )
        return view

    def _without_functions(self) -> Hindsight:
        return replace(self, compute_reward=None, compute_terminated=None)

    def is_same_but_for_functions(self, view: object) -> bool:
        """Whether `view` is this one but for the functions."""
        return isinstance(view, Hindsight) and view._without_functions() == self._without_functions()

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
