"""How items are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch

from torchreplay.validation import as_float, as_floats, checked_choice, checked_int

Normalization: TypeAlias = Literal["buffer", "batch", "none"]
NORMALIZATIONS: tuple[Normalization, ...] = ("buffer", "batch", "none")  # the position is the code in the segment

LARGEST_PRIORITY = 3.4028234663852886e38
"""Of float32, in which priorities are kept."""

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

    Raises:
        ValueError: `replacement` is no bool.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100, sampler=tr.Uniform())
        >>> keys = buffer.extend(obs=torch.zeros(5, 3))
        >>> buffer.sample(4)["weight"]
        tensor([1., 1., 1., 1.])
    """

    beta: ClassVar[float] = 0.0

    replacement: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.replacement, bool):
            raise ValueError(f"replacement is {self.replacement!r}: expected True or False")


def keeps_epochs(sampler: Sampler) -> bool:
    """Returns whether every item is drawn once before any is drawn again."""
    return isinstance(sampler, Uniform) and not sampler.replacement


@dataclass(frozen=True, slots=True)
class Prioritized:
    """Proportional prioritization (Schaul et al. 2016, https://arxiv.org/abs/1511.05952, section 3.3).

    An item's leaf is p = (|td| + eps)^alpha and its probability P = p / sum p (equation 1). Its weight is (N P)^-beta
    (section 3.4), N being the number of drawable items. TD errors of any scale do: leaves times a constant are drawn
    alike. In a buffer of a million rows a leaf keeps its proportion within 2 % down to 2^-36 of the largest.

    Args:
        alpha: How much prioritization: 0 none, 1 full.
        beta: How much of the bias the weights correct: a number, or a schedule of the number of batches drawn by all
            learners, such as `LinearSchedule(0.4, 1.0, steps)`. A function of your own does not travel: attached
            processes and copies take its value at 0, and `load` and `open` are given the sampler again.
        eps: What is added to |td|, so that no item is lost for ever.
        weights: `"buffer"` divides weights by the largest one of the buffer, the same for every learner; `"batch"` by
            the largest one of the batch; `"none"` leaves them.
        initial: The priority |td| of new items that are given none. `"max_seen"` is the largest one ever seen, as in
            the paper: one outlier makes all later items likely until `clear()`, even if it is corrected at once.
            `"max_held"` is the largest of the items held at that moment; of a `ShardedReplay`, in the item's shard.
            Both are 1 at first. A number is that priority.

    Raises:
        ValueError: An argument, or an end of a `LinearSchedule`, is negative or not finite, `eps` is 0, or `weights` or
            `initial` is unknown.

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
    initial: Initial | float = "max_seen"

    def __post_init__(self) -> None:
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


Sampler: TypeAlias = Uniform | Prioritized


def priorities_of(leaves: torch.Tensor, sampler: Sampler) -> torch.Tensor:
    """Returns the raw priorities that leaves were made of: |td| = p^(1/alpha) - eps, equation 1 solved for |td|.

    Args:
        leaves: float64, positive.
        sampler: The buffer's. Under `Uniform()`, and with an alpha of 0, every priority counts as 1.

    Returns:
        float64, from 0 to the largest float32.
    """
    if isinstance(sampler, Uniform) or not sampler.alpha:
        return torch.ones_like(leaves)
    return (leaves ** (1.0 / sampler.alpha) - sampler.eps).clamp(0.0, LARGEST_PRIORITY)
