"""How items are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import torch

from torchreplay.validation import as_float, as_floats, checked_choice, checked_int

Normalization: TypeAlias = Literal["buffer", "batch", "none"]
NORMALIZATIONS: tuple[Normalization, ...] = ("buffer", "batch", "none")  # the position is the code in the segment

LARGEST_PRIORITY = 3.4028234663852886e38
"""Of float32, in which priorities are kept."""

MOST_DRAWS = (1 << 16) - 2
"""How often an item can be handed out where that is bounded."""

MOST_VERSIONS = 1 << 62
"""Of a policy; and by how many an item may be behind the learner's."""

Initial: TypeAlias = Literal["max_seen", "max_held"]
INITIALS: tuple[Initial, ...] = ("max_seen", "max_held")  # likewise; a number comes after them


@dataclass(frozen=True, slots=True)
class LinearSchedule:
    """A schedule that goes from `start` to `end` in `steps` equal steps and stays there.

    Raises:
        ValueError: `steps` is below 1, or an end is not finite.

    Example:
        >>> beta = tr.LinearSchedule(0.4, 1.0, steps=100)
        >>> beta(0), beta(50), beta(1000)
        (0.4, 0.7, 1.0)
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", checked_int("steps", self.steps, 1, 1 << 62))
        as_floats(self, "start", "end")
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise ValueError(f"a schedule from {self.start} to {self.end}: expected finite numbers")

    def __call__(self, step: int) -> float:
        """Returns the value after `step` steps."""
        return self.start + (self.end - self.start) * min(max(step / self.steps, 0.0), 1.0)


Schedule: TypeAlias = float | Callable[[int], float]


def value_of(beta: Schedule, step: int) -> float:
    """Returns the number that `beta` is at `step`.

    Raises:
        ValueError: It is negative or not finite.
    """
    value = as_float("beta", beta(step) if callable(beta) else beta)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"beta is {value}: expected a finite number >= 0")
    return value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every drawable item is equally likely; all weights are 1. TD errors are checked, then ignored.

    Without replacement the buffer goes through its items in epochs, which all its learners share: every item is drawn
    once before any is drawn again. An item that comes is drawn in the epoch under way. A batch takes what is left of
    one epoch, and the rest from the next; it holds an item twice only where it is larger than the buffer.
    `ReplayDataset(buffer, epochs=n)` ends with an epoch::

        buffer = tr.ReplayBuffer(spec, 10_000, sampler=tr.Uniform(replacement=False))
        for batch in tr.ReplayDataset(buffer, 256, epochs=4):
            train(batch)

    What a learner that dies has drawn, and not yet used, comes again in the next epoch. So does what one has drawn
    ahead and gives up, where another learner has begun that epoch since. The first draw of an epoch takes O(capacity).

    Args:
        replacement: Whether an item may be drawn again at any time. False: once in each epoch. Such a buffer holds at
            most 2^30 rows.
        max_draws: How often an item is handed out, 1 to 65,534; then it leaves. None: as often as it is drawn. A batch
            waits until as many draws are left as it has items. What is drawn ahead, and never asked for, counts for
            nothing; what a learner that dies has drawn counts. `Fifo` loses nothing then.
        max_age: By how many policy versions an item may be behind `buffer.policy_version`, the learner's, when it is
            drawn; of several rows the oldest step counts. What is older leaves at the next draw, and is counted
            (`stats().expired_items`). It stays away where its checkpoint is loaded, with another `max_age`, too. The
            spec needs a field `policy_version`. None: by any.

    Raises:
        ValueError: `replacement` is no bool, or `max_draws` or `max_age` is out of range.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100, sampler=tr.Uniform())
        >>> keys = buffer.extend(obs=torch.zeros(5, 3))
        >>> buffer.sample(4)["weight"]
        tensor([1., 1., 1., 1.])
        >>> once = tr.ReplayBuffer({"obs": tr.Field()}, capacity=100, sampler=tr.Uniform(max_draws=1))
        >>> keys = once.extend(obs=torch.arange(6.0))
        >>> sorted(once.sample(6)["obs"].tolist()), once.num_items
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 0)
    """

    beta: ClassVar[float] = 0.0

    replacement: bool = True
    max_draws: int | None = None
    max_age: int | None = None

    def __post_init__(self) -> None:
        _check_limits(self)
        if not isinstance(self.replacement, bool):
            raise ValueError(f"replacement is {self.replacement!r}: expected True or False")


def _check_limits(sampler: Uniform | Prioritized | Fifo) -> None:
    if sampler.max_draws is not None:
        object.__setattr__(sampler, "max_draws", checked_int("max_draws", sampler.max_draws, 1, MOST_DRAWS))
    if sampler.max_age is not None:
        object.__setattr__(sampler, "max_age", checked_int("max_age", sampler.max_age, 0, MOST_VERSIONS))


def takes_what_it_draws(sampler: Sampler) -> bool:
    """Returns whether an item that is drawn, and that nobody gets, has to go back."""
    return keeps_epochs(sampler) or sampler.max_draws is not None


def counts_draws(sampler: Sampler) -> bool:
    """Returns whether an item leaves after so many draws, and nobody holds it."""
    return not isinstance(sampler, Fifo) and sampler.max_draws is not None


def keeps_epochs(sampler: Sampler) -> bool:
    """Returns whether every item is drawn once before any is drawn again."""
    return isinstance(sampler, Uniform) and not sampler.replacement


@dataclass(frozen=True, slots=True)
class Prioritized:
    """Proportional prioritization (Schaul et al. 2016, https://arxiv.org/abs/1511.05952, section 3.3).

    An item's leaf is p = (|td| + eps)^alpha and its probability P = p / sum p (equation 1). Its weight is (N P)^-beta
    (section 3.4), N being the number of drawable items. TD errors of any scale do: leaves times a constant are drawn
    alike. In a buffer of a million rows a leaf keeps its proportion within 2 % down to 2^-36 of the largest. A |td|
    beyond 3.4e38, the largest number of a float32, counts as that.

    Args:
        alpha: How much prioritization: 0 none, 1 full.
        beta: How much of the bias the weights correct: a number, or a schedule of the number of batches drawn by all
            learners, such as `LinearSchedule(0.4, 1.0, steps)`. A function of your own does not travel: attached
            processes and copies take its value at 0, and `load` and `open` are given the sampler again.
        eps: What is added to |td|: no item is lost for ever.
        weights: `"buffer"` divides them by the largest one of the buffer, the same for every learner. `"batch"` takes
            the largest one of the batch. `"none"` leaves them as they are.
        initial: The priority |td| of new items that are given none. `"max_held"` is the largest of the items held at
            that moment; of a `ShardedReplay`, in the item's shard. `"max_seen"` is the largest one ever seen, as in the
            paper: one outlier makes all later items likely until `clear()`, even if it is corrected at once. Both are 1
            at first. A number is that priority.
        max_draws: How often an item is handed out, as for `Uniform`. TD errors of items that are used up count
            for nothing, unless their last draw was ahead and goes back: then they have these. A checkpoint keeps which
            items are used up; of the others it counts from 0 again. A file counts on.
        max_age: As for `Uniform`. Weights and probabilities are those among the items that are left.

    Raises:
        ValueError: An argument, or an end of a `LinearSchedule`, is negative or not finite, or `eps` is 0. Or `weights`
            or `initial` is unknown, or `max_draws` or `max_age` is out of range.

    Example:
        >>> sampler = tr.Prioritized(alpha=1.0, beta=tr.LinearSchedule(0.4, 1.0, steps=100_000))
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100, sampler=sampler)
        >>> keys = buffer.extend(obs=torch.zeros(3, 3), priority=[1.0, 1.0, 2.0])
        >>> buffer.gather(keys)["probability"]
        tensor([0.2500, 0.2500, 0.5000])
    """

    alpha: float = 0.6
    beta: Schedule = 0.4
    eps: float = 1e-6
    weights: Normalization = "buffer"
    initial: Initial | float = "max_held"
    max_draws: int | None = None
    max_age: int | None = None

    def __post_init__(self) -> None:
        _check_limits(self)
        as_floats(self, "alpha", "eps", *(() if callable(self.beta) else ("beta",)))
        self._check_initial()
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"alpha is {self.alpha}: expected a finite number >= 0")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"eps is {self.eps}: expected a finite number > 0")
        checked_choice("weights", self.weights, NORMALIZATIONS)
        for beta in (self.beta.start, self.beta.end) if isinstance(self.beta, LinearSchedule) else (self.beta,):
            value_of(beta, 0)

    def _check_initial(self) -> None:
        if isinstance(self.initial, str):
            if self.initial not in INITIALS:
                raise ValueError(f"initial is {self.initial!r}: expected 'max_seen', 'max_held' or a number")
            return
        as_floats(self, "initial")
        if not 0 <= self.initial <= LARGEST_PRIORITY:
            raise ValueError(f"initial is {self.initial}: expected a number from 0 to {LARGEST_PRIORITY:.3g}")


WhenFull: TypeAlias = Literal["wait", "drop_oldest"]
WHEN_FULL: tuple[WhenFull, ...] = get_args(WhenFull)
Commit: TypeAlias = Literal["next", "manual"]
COMMITS: tuple[Commit, ...] = get_args(Commit)


@dataclass(frozen=True, slots=True)
class Fifo:
    """A queue: the oldest items first, each handed out `max_draws` times in all.

    The order is that of the keys of the items' anchors. An item that is not complete is passed over, and is the first
    one as soon as it is. Who gets an item *holds* it: nobody else gets it. When the process is done with it, it leaves.
    If the process dies before, the item is in its old place again, for others; with `path=` also for a program that
    starts again. So every item is used at least once, and exactly once where nobody dies. All weights and
    probabilities are 1; TD errors are checked, then ignored::

        queue = tr.ReplayBuffer(spec, 10_000, sampler=tr.Fifo())
        for batch in tr.ReplayDataset(queue, 64):  # ends when no writer is left and all is drawn
            train(batch)

    An iteration, and a thread that calls `sample`, is a *loop*: it is done with its last batch when it asks for the
    next one. An iteration is also done with it when it is closed, by `break` or by an error in the loop: use `claim`
    for work that may fail. What is drawn ahead, and never asked for, goes back. So does what a thread holds that ends,
    and what is held when the buffer is closed.

    Args:
        max_draws: How often an item is handed out, 1 to 65,534. Once a draw is done, it is in its old place again.
        when_full: `"wait"`: writers wait while their next slot has a row of an item to draw. Rows that
            are held, and those of unfinished episodes whose writer lives, stay too. They are passed over, as long as a
            row comes after them that is done with: a slow learner or environment stops nobody. `"drop_oldest"`:
            writers overwrite what is not drawn. `stats().dropped_items` counts it. They overwrite what is held, too:
            that counts once it is given back, or its holder has died, and not if it is committed.
        commit: `"next"`: as above. `"manual"`: only `buffer.commit()` ends what is held, such as when the model is
            saved. After a crash all items since then come again, in the same order. The capacity must hold them.
        window: Share of the capacity by which an item may overtake older ones that are not complete yet, above 0 and at
            most 1. Items further ahead wait, and so do writers that come to such a row. The capacity must hold all that
            is written until the older ones are complete, or nobody can go on: `WouldBlockForever`. None: any.
        max_age: By how many policy versions an item may be behind the learner's when it is handed out, as for
            `Uniform`. What is older is dropped, and counted. What somebody holds stays that one's.

    Raises:
        ValueError: An argument is of the wrong kind, out of range or unknown.

    Example:
        >>> queue = tr.ReplayBuffer({"obs": tr.Field()}, capacity=100, sampler=tr.Fifo())
        >>> keys = queue.extend(obs=torch.arange(6.0))
        >>> queue.sample(4)["obs"]
        tensor([0., 1., 2., 3.])
        >>> queue.sample(4, at_least=1)["obs"]
        tensor([4., 5.])
    """

    beta: ClassVar[float] = 0.0

    max_draws: int = 1
    when_full: WhenFull = "wait"
    commit: Commit = "next"
    window: float | None = None
    max_age: int | None = None

    def __post_init__(self) -> None:
        _check_limits(self)
        object.__setattr__(self, "max_draws", checked_int("max_draws", self.max_draws, 1, MOST_DRAWS))  # None neither
        checked_choice("when_full", self.when_full, WHEN_FULL)
        checked_choice("commit", self.commit, COMMITS)
        if self.window is not None:
            as_floats(self, "window")
            if not 0 < self.window <= 1:
                raise ValueError(f"window is {self.window}: expected a share of the capacity, above 0 and at most 1")


Sampler: TypeAlias = Uniform | Prioritized | Fifo
SAMPLERS: tuple[type[Sampler], ...] = (Uniform, Prioritized, Fifo)


def ignores_td(sampler: Sampler) -> bool:
    """Returns whether TD errors change nothing."""
    return not isinstance(sampler, Prioritized)


def priorities_of(leaves: torch.Tensor, sampler: Sampler) -> torch.Tensor:
    """Returns the raw priorities that leaves were made of: |td| = p^(1/alpha) - eps, equation 1 solved for |td|.

    Args:
        leaves: float64, positive.
        sampler: The buffer's. Where it ignores TD errors, and with an alpha of 0, every priority counts as 1.

    Returns:
        float64, from 0 to the largest float32.
    """
    if not isinstance(sampler, Prioritized) or not sampler.alpha:
        return torch.ones_like(leaves)
    return (leaves ** (1.0 / sampler.alpha) - sampler.eps).clamp(0.0, LARGEST_PRIORITY)
