"""How rows become training items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from torchreplay.schema.batch_plan import (
    BatchPlan,
    Kind,
    Roles,
    as_path,
    check_gamma,
    check_names,
    discount_field,
    names_of,
    next_path,
    observation_fields,
    reward_field,
    roles_of,
)
from torchreplay.schema.hindsight import Hindsight
from torchreplay.schema.spec import Column, Path
from torchreplay.validation import as_floats, checked_instance, checked_int

MAX_STEPS = 1 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """Every row is an item: a batch has the spec's fields, `[B, *shape]`.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100, view=tr.Rows())
        >>> keys = buffer.extend(obs=torch.zeros(5, 3))
        >>> buffer.num_items
        5
    """

    def native(self) -> tuple[int, ...]:
        """Returns what decides which items can be drawn, for the native core."""
        return (0, 1, 1, 0, 0, 0)

    def roles(self, fields: Mapping[Path, Column]) -> Roles | None:
        """Returns None: rows have no roles."""
        return None

    def plan(self, fields: Mapping[Path, Column]) -> BatchPlan | None:
        """Returns None: a batch is made of the fields as they are."""
        return None

    @property
    def rows_of_an_item(self) -> int:
        """The rows that one item needs."""
        return 1

    @property
    def complete_when(self) -> str:
        """When an item can be drawn, for errors: ""; always."""
        return ""


@dataclass(frozen=True, slots=True)
class Transitions:
    """n-step transitions, built from linked rows when a batch is drawn: each observation is stored once.

    With m = min(n_step, steps to the episode's end), a batch has for the anchor's observation s_t

    - the observation fields of s_t, and every other field of the step taken there, `[B, *shape]`;
    - `reward`: R = sum over k < m of gamma^k r_{t+1+k} (Sutton 1988), computed in float64;
    - `next_<name>` for each observation field: s_{t+m}. A truncated episode bootstraps from its true last observation;
    - `terminated` and `truncated` of the last of these steps;
    - `discount`, float32 `[B]`: gamma^m, 0 where terminated: the target is `reward + discount * V(next_obs)`.

    With `discount=`, a step has a discount d of its own, as in dm_env, or where steps take different times. Then
    gamma d_{t+1} ... gamma d_{t+k} stands for gamma^k in both, and the field itself is not in the batch.

    Args:
        n_step: Steps of the return.
        gamma: Discount of a step.
        observation: Name of the observation field, or of several; a name may be that of a nested dict (`"obs"`) or of a
            field in one (`"obs/image"`).
        reward: Name of the reward field, of a floating dtype.
        terminated: Name of the bool scalar field that says the episode ended for good.
        truncated: Name of the bool scalar field that says the episode was cut short.
        stack: Frames to stack of an observation field, such as `{"obs": 4}`: they get a new leading axis, oldest first,
            and the episode's first frame is repeated before its start. Frames are stored once.
        discount: Name of the scalar field, of a floating dtype, that discounts a step beside `gamma`, or None.

    Raises:
        ValueError: An argument is out of range, a number of steps or frames is no int, or `gamma` is a text.
        TypeError: `gamma` is no number, `stack` no dict, or a name no text.

    Example:
        >>> flag = tr.Field((), torch.bool)
        >>> spec = {"obs": tr.Field(), "reward": tr.Field(), "terminated": flag, "truncated": flag}
        >>> buffer = tr.ReplayBuffer(spec, capacity=100, view=tr.Transitions(n_step=2, gamma=0.5))
        >>> end, no = [False, False, True], [False, False, False]
        >>> keys = buffer.extend(obs=[0.0, 1.0, 2.0, 3.0], reward=[1.0, 1.0, 1.0], terminated=end, truncated=no)
        >>> batch = buffer.gather(keys[:3])
        >>> batch["next_obs"], batch["reward"], batch["discount"]
        (tensor([2., 3., 3.]), tensor([1.5000, 1.5000, 1.0000]), tensor([0.2500, 0.0000, 0.0000]))
    """

    n_step: int = 1
    gamma: float = 0.99
    observation: str | Sequence[str] = "obs"
    reward: str = "reward"
    terminated: str = "terminated"
    truncated: str = "truncated"
    stack: Mapping[str, int] | None = None
    discount: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_step", checked_int("n_step", self.n_step, 1, MAX_STEPS))
        as_floats(self, "gamma")
        check_gamma(self.gamma)
        _freeze_names(self, "observation")
        check_names(self, "reward", "terminated", "truncated", *(() if self.discount is None else ("discount",)))
        if self.stack is not None:
            checked_instance("stack", self.stack, Mapping, "a dict of frames by field, such as {'obs': 4}")
            names_of(list(self.stack), "stack")
            frames = {name: checked_int(f"stack[{name!r}]", k, 1, MAX_STEPS) for name, k in self.stack.items()}
            object.__setattr__(self, "stack", frames)

    def native(self) -> tuple[int, ...]:
        """Returns what decides which items can be drawn, for the native core."""
        return (self.n_step, 1, 1, self._history, 0, 0)

    @property
    def _history(self) -> int:
        return max((self.stack or {}).values(), default=1) - 1

    @property
    def rows_of_an_item(self) -> int:
        """The rows that one item needs."""
        return self._history + self.n_step + 1

    @property
    def complete_when(self) -> str:
        """When an item can be drawn, for errors."""
        steps = "1 step" if self.n_step == 1 else f"{self.n_step} steps, fewer where a flag ends the episode"
        return f"an item takes {steps}"

    def roles(self, fields: Mapping[Path, Column]) -> Roles:
        """Returns the fields' roles; raises ValueError for a spec that does not fit the view."""
        return roles_of(fields, self.observation, self.terminated, self.truncated, self.reward)

    def plan(self, fields: Mapping[Path, Column]) -> BatchPlan:
        """Returns how a batch is built; raises ValueError for a spec that does not fit the view."""
        plan = BatchPlan(fields, self.n_step, self.gamma)
        observed = observation_fields(fields, self.observation)
        frames = self._frames(observed)
        reward = reward_field(fields, self.reward, observed)
        if self.discount is not None:
            plan.discount = discount_field(fields, self.discount, reward, observed)
        ends = (as_path(self.terminated), as_path(self.truncated))
        for path in fields:
            if path in observed:
                lead = (frames[path],) if path in frames else ()
                plan.add(Kind.ANCHOR, path, lead, 1 - frames.get(path, 1))
            elif path == reward:
                plan.add(Kind.RETURN, path)
            elif path != plan.discount:
                plan.add(*((Kind.END, path) if path in ends else (Kind.ANCHOR, path, (), 1)))
        for path in observed:
            lead = (frames[path],) if path in frames else ()
            plan.add(Kind.END, path, lead, 1 - frames.get(path, 1), next_path(path))
        plan.add_flags(Kind.DISCOUNT, "discount", torch.float32)
        return plan

    def _frames(self, observed: list[Path]) -> dict[Path, int]:
        frames = {as_path(name): k for name, k in (self.stack or {}).items()}
        for path in frames:
            if path not in observed:
                known = ", ".join(repr("/".join(p)) for p in observed)
                raise ValueError(f"stack names {'/'.join(path)!r}: expected observation fields, which are {known}")
        return frames


@dataclass(frozen=True, slots=True)
class Sequences:
    """Windows of consecutive steps of an episode, for recurrent networks and world models.

    A window has T = burn_in + length steps. A batch has

    - the observation fields, `[B, T + 1, *shape]`: s_t ... s_{t+T};
    - every other field, `[B, T, *shape]`: index i is the step taken at observation i;
    - `mask`, bool `[B, T]`: whether step i is one of the episode's; beyond its end all values are zeros;
    - `is_first`, bool `[B, T]`: whether observation i is the first one of its episode;
    - the fields named in `initial` for the window's first step only, `[B, *shape]`: stored recurrent state.

    Windows start at multiples of `stride`, counted from the episode's start. They can be drawn when they are complete,
    or when the episode has ended and at least one step follows the burn-in. Episodes of at most `burn_in` steps are
    never drawn. With `partial=False` only windows of T steps are drawn: `mask` is True everywhere, and what remains of
    an episode behind its last window is not learned from.

    `sequence_priority` makes one priority of a window's TD errors; before the first, a window has the largest of the
    priorities given with its steps.

    A learner that uses `mask[:, burn_in:]` alone never learns from the first `burn_in` steps of an episode (unless
    windows run across episodes). A window that begins with its episode, `is_first[:, 0]`, needs no burn-in: learn from
    all of its `mask`.

    Args:
        length: Steps to learn from.
        stride: Steps between the starts of windows; None: `length`.
        burn_in: Steps before them that warm up a recurrent state (Kapturowski et al. 2019, section 2.3).
        initial: Names of fields wanted for the first step only; they are stored with the action they led to.
        across_episodes: Windows start at every row and run on into the stream's next episode, without padding. `mask`
            is False for the step that leads from one episode into the next, whose action, reward and flags are zeros.
        observation: Name of the observation field, or of several, as for `Transitions`.
        terminated: Name of the bool scalar field that says the episode ended for good.
        truncated: Name of the bool scalar field that says the episode was cut short.
        partial: Whether windows that an episode's end cuts short are drawn, padded. Those across episodes are whole.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument is no number, or no name, where it should be one.

    Example:
        >>> flag = tr.Field((), torch.bool)
        >>> spec = {"obs": tr.Field(), "reward": tr.Field(), "terminated": flag, "truncated": flag}
        >>> buffer = tr.ReplayBuffer(spec, capacity=100, view=tr.Sequences(length=2))
        >>> end, no = [False, False, True], [False, False, False]
        >>> keys = buffer.extend(obs=[0.0, 1.0, 2.0, 3.0], reward=[1.0, 1.0, 1.0], terminated=end, truncated=no)
        >>> batch = buffer.gather(keys[:1])
        >>> batch["obs"], batch["reward"], batch["mask"]
        (tensor([[0., 1., 2.]]), tensor([[1., 1.]]), tensor([[True, True]]))
    """

    length: int
    stride: int | None = None
    burn_in: int = 0
    initial: str | Sequence[str] = ()
    across_episodes: bool = False
    observation: str | Sequence[str] = "obs"
    terminated: str = "terminated"
    truncated: str = "truncated"
    partial: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", checked_int("length", self.length, 1, MAX_STEPS >> 1))
        object.__setattr__(self, "burn_in", checked_int("burn_in", self.burn_in, 0, MAX_STEPS >> 1))
        if self._steps >= MAX_STEPS:
            raise ValueError(f"burn_in + length is {self._steps:,}: expected fewer than {MAX_STEPS:,} steps")
        if self.stride is not None:
            object.__setattr__(self, "stride", checked_int("stride", self.stride, 1, MAX_STEPS))
        checked_instance("across_episodes", self.across_episodes, bool, "True or False")
        checked_instance("partial", self.partial, bool, "True or False")
        if self.across_episodes and self.stride not in (None, 1):
            raise ValueError(f"stride is {self.stride}: windows across episodes start at every row")
        _freeze_names(self, "initial")
        _freeze_names(self, "observation")
        check_names(self, "terminated", "truncated")

    @property
    def _steps(self) -> int:
        return self.burn_in + self.length

    def native(self) -> tuple[int, ...]:
        """Returns what decides which items can be drawn, for the native core."""
        stride = self.length if self.stride is None else self.stride
        least = self.burn_in + 1 if self.partial else self._steps
        return (self._steps, least, stride, 0, int(self.across_episodes), self._steps)

    @property
    def rows_of_an_item(self) -> int:
        """The rows that one item needs."""
        return self._steps + 1

    @property
    def complete_when(self) -> str:
        """When an item can be drawn, for errors."""
        if self.across_episodes:
            return f"a window takes {self._steps + 1} rows of one stream"
        if not self.partial:
            return f"a window takes {self._steps} steps of one episode"
        longer = f", but more than the {self.burn_in} of burn_in" if self.burn_in else ""
        return f"a window takes {self._steps} steps, fewer where a flag ends the episode{longer}"

    def roles(self, fields: Mapping[Path, Column]) -> Roles:
        """Returns the fields' roles; raises ValueError for a spec that does not fit the view."""
        return roles_of(fields, self.observation, self.terminated, self.truncated)

    def plan(self, fields: Mapping[Path, Column]) -> BatchPlan:
        """Returns how a batch is built; raises ValueError for a spec that does not fit the view."""
        steps = self._steps
        plan = BatchPlan(fields, steps)
        observed = observation_fields(fields, self.observation)
        initial = observation_fields(fields, self.initial, "initial") if self.initial else []
        for path in initial:
            if path in observed:
                name = "/".join(path)
                raise ValueError(f"initial names {name!r}, an observation: expected fields stored with actions")
        for path in fields:
            if path in observed:
                plan.add(Kind.ANCHOR, path, (steps + 1,))
            else:
                plan.add(Kind.ANCHOR, path, () if path in initial else (steps,), 1)
        plan.add_flags(Kind.MASK, "mask", lead=(steps,))
        plan.add_flags(Kind.FIRST, "is_first", lead=(steps,))
        return plan


View: TypeAlias = Rows | Transitions | Sequences | Hindsight
VIEWS = (Rows, Transitions, Sequences, Hindsight)


def _freeze_names(view: Transitions | Sequences, attribute: str) -> None:
    names = getattr(view, attribute)
    several = names_of(names, attribute)
    if not isinstance(names, str):
        object.__setattr__(view, attribute, several)
