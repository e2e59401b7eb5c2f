"""Who must wait: limiters keep explorers and learners in step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from torchreplay.validation import as_floats, checked_int

NativeLimiter: TypeAlias = tuple[int, float, float, float, float, int, int]
"""(min_size, ratio, min_diff, max_diff, tolerance, batch_size, max_age) of the native core."""


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

    def native(self) -> NativeLimiter:
        """Returns what the native core takes."""
        return *self.bounds(), 0.0, 0, 0


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

    def native(self) -> NativeLimiter:
        """Returns what the native core takes: the bounds, and the tolerance or 0."""
        return *self.bounds(), self.tolerance or 0.0, 0, 0


@dataclass(frozen=True, slots=True)
class Admission:
    """Of a queue: an item is begun only when its turn to be drawn comes in time.

    A generator begins each item in `with writer.admit():`, which waits for its turn. So little is generated in vain,
    where `Fifo(max_age=...)` alone drops what has become too old. At most `(max_age + 1 + version) * batch_size` items
    are admitted in all. `version` is by how much `buffer.policy_version` has grown since the first one. The formula is
    that of AReaL (https://arxiv.org/abs/2505.24298, section 5.1). It keeps its promise where the learner draws batches
    of `batch_size` items, and publishes one version after each. An item that takes longer than those begun after it may
    still come too late: `Fifo(max_age=...)` beside it drops such a straggler.

    What is admitted and never comes to be drawn is given back. That is so for a block that ends without its row, and
    for a writer that died. It is so for an item that was dropped, was discarded, or has become too old. When a buffer
    is opened or loaded, what it holds counts, and nothing more.

    It is for `Fifo()` with the view `Rows()`, where each row is an item, and is drawn once. Whether a buffer has an
    admission is decided when it is made. `buffer.limiter` may be set to another `Admission`, which counts from there.

    Args:
        batch_size: Items of a batch of the learner's, at least 1.
        max_age: Policy versions that an item may be behind the learner's when it is drawn, at least 0. 0: generators
            wait while the learner learns.

    Raises:
        ValueError: One of them is no integer, or too small.

    Example:
        >>> spec = {"reward": tr.Field(), "policy_version": tr.Field((), torch.int64)}
        >>> queue = tr.ReplayBuffer(spec, 100, sampler=tr.Fifo(), limiter=tr.Admission(batch_size=2, max_age=1))
        >>> with queue.writer() as generator:
        ...     for _ in range(4):  # more would wait for the learner
        ...         with generator.admit():
        ...             key = generator.append(reward=1.0)
        >>> queue.stats().admitted_items, queue.stats().admission_limit
        (4, 4)
    """

    batch_size: int
    max_age: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", checked_int("batch_size", self.batch_size, 1, 1 << 31))
        object.__setattr__(self, "max_age", checked_int("max_age", self.max_age, 0, 1 << 31))

    def bounds(self) -> tuple[int, float, float, float]:
        """Returns those of a limiter that lets learners draw what there is."""
        return 1, 0.0, 0.0, 0.0

    def native(self) -> NativeLimiter:
        """Returns what the native core takes."""
        return *self.bounds(), 0.0, self.batch_size, self.max_age


Limiter: TypeAlias = MinSize | SamplesPerInsert | Admission
LIMITERS: tuple[type[Limiter], ...] = (MinSize, SamplesPerInsert, Admission)


def from_native(min_size: int, ratio: float, tolerance: float, batch_size: int = 0, max_age: int = 0) -> Limiter:
    """Returns the limiter that has these bounds in the native core."""
    if batch_size:
        return Admission(batch_size, max_age)
    return SamplesPerInsert(ratio, min_size, tolerance or None) if ratio else MinSize(min_size)
