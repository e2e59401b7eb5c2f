"""Who must wait: limiters keep explorers and learners in step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from torchreplay.validation import as_floats, checked_int


@dataclass(frozen=True, slots=True)
class MinSize:
    """Draws wait until `min_size` items have become drawable; writers never wait.

    It counts items that ever did, so it may be more than the buffer holds: then a learner that waits looks once a turn
    of the ring. Items overwritten before anybody looked do not count: no writer waits for somebody to look.

    Raises:
        ValueError: `min_size` is below 1.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=10_000, limiter=tr.MinSize(1000))
    """

    min_size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_size", checked_int("min_size", self.min_size, 1, 1 << 62))

    def bounds(self) -> tuple[int, float, float, float]:
        """Returns (min_size, ratio, min_diff, max_diff); a ratio of 0 means none is kept."""
        return self.min_size, 0.0, 0.0, 0.0

    def native(self) -> tuple[int, float, float, float, float]:
        """Returns what the native core takes."""
        return *self.bounds(), 0.0


@dataclass(frozen=True, slots=True)
class SamplesPerInsert:
    """Each inserted item is drawn `ratio` times on average: the side that is ahead waits.

    The rules are those of Reverb's rate limiter (https://arxiv.org/abs/2102.04736, section 3.4), counted over all
    explorers and learners. Once `min_size` items are in, `inserted * ratio - sampled` stays within `min_size * ratio`
    plus or minus a tolerance. A learner that waits is never waited for: what its batch needs is always admitted, which
    may be more. And each writer may add up to two calls' rows, or 128 of longer calls. It checks once for 64 rows of a
    call, so a call may wait halfway. Rows that it is writing do not count yet. Items count when they are complete, and
    an episode's end completes all that it has begun. That is up to `n_step` of `Transitions`, and with `Hindsight` one
    for each step. Each environment may exceed the bound by so much. A writer counts what was written at least once in
    half a turn of the ring, so that no item is overwritten uncounted.

    Args:
        ratio: Draws per inserted item.
        min_size: Items that must be in before the first draw.
        tolerance: How far the running balance may be off, as a share of `min_size * ratio`. None: a tenth, or 1024
            draws if that is more, so that whole batches fit. A program of one thread needs as much as a call has rows
            (environments, or those of an `extend`), times `ratio`.

    Raises:
        ValueError: `ratio` or `tolerance` is not positive and finite, `min_size` is below 1, or the bounds are not
            finite.

    Example:
        >>> limiter = tr.SamplesPerInsert(8.0, min_size=1000)  # 8 draws per item, once 1000 are in
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=10_000, limiter=limiter)
    """

    ratio: float
    min_size: int = 1
    tolerance: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_size", checked_int("min_size", self.min_size, 1, 1 << 62))
        as_floats(self, "ratio", *(() if self.tolerance is None else ("tolerance",)))
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise ValueError(f"ratio is {self.ratio}: expected a finite number > 0 of draws per insert")
        if self.tolerance is not None and not (math.isfinite(self.tolerance) and self.tolerance > 0):
            raise ValueError(f"tolerance is {self.tolerance}: expected a finite number > 0")
        _, _, low, high = self.bounds()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"{self} keeps the balance from {low:g} to {high:g}: expected finite bounds; take less")

    def bounds(self) -> tuple[int, float, float, float]:
        """Returns (min_size, ratio, min_diff, max_diff)."""
        centre = self.min_size * self.ratio
        error = max(0.1 * centre, 1024.0) if self.tolerance is None else self.tolerance * centre
        error = max(error, self.ratio, 1.0)  # Reverb: a smaller window than one insert or one draw is a deadlock
        return self.min_size, float(self.ratio), centre - error, centre + error

    def native(self) -> tuple[int, float, float, float, float]:
        """Returns what the native core takes: the bounds, and the tolerance or 0."""
        return *self.bounds(), self.tolerance or 0.0


Limiter: TypeAlias = MinSize | SamplesPerInsert


def from_native(min_size: int, ratio: float, tolerance: float) -> Limiter:
    """Returns the limiter that has these bounds in the native core."""
    return SamplesPerInsert(ratio, min_size, tolerance or None) if ratio else MinSize(min_size)
