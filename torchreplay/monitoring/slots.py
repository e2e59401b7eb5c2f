"""Priorities and ages of a live buffer, from slots spread evenly over its ring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.monitoring.snapshot import LiveBuffer
from torchreplay.schema.samplers import priorities_of

SLOTS = 1 << 13
"""Slots looked at, of larger rings. A look takes some hundred microseconds."""

BLOCK = 64
"""Slots that lie together: a look takes whole lines of the processor's cache."""


@dataclass(frozen=True, slots=True)
class SlotSample:
    """What some of the slots hold.

    Attributes:
        priorities: Raw |TD error| of drawable items, ascending, float64 `[n]`.
        leaves: What they are drawn in proportion to, in the same order, float64 `[n]`.
        ages: Rows written since, of the rows held, float64 `[m]`.
        leaves_by_age: The leaves in the order of `ages`, 0 where no item can be drawn, float64 `[m]`.
    """

    priorities: NDArray[np.float64]
    leaves: NDArray[np.float64]
    ages: NDArray[np.float64]
    leaves_by_age: NDArray[np.float64]

    def quantiles(self, *shares: float) -> list[float]:
        """Returns the priorities below which these shares of the items lie; NaN where there is none."""
        if not len(self.priorities):
            return [float("nan")] * len(shares)
        return [float(value) for value in np.quantile(self.priorities, shares)]

    @property
    def half_of_draws(self) -> float:
        """The smallest share of the items that gets half of the draws: 0.5 when all are equally likely."""
        mass = np.cumsum(self.leaves[::-1])
        if not len(mass) or mass[-1] <= 0:
            return 0.5
        return float(np.searchsorted(mass, mass[-1] / 2) + 1) / len(mass)

    def priority_histogram(self, bins: int) -> tuple[NDArray[np.float64], float, float]:
        """Returns the share of items in each bin, on a logarithmic scale, and the priorities at its ends."""
        positive = self.priorities[self.priorities > 0]
        if not len(positive):
            return np.zeros(bins), 0.0, 0.0
        low, high = np.log10(positive[0]), np.log10(positive[-1])
        low, high = (low, high) if high - low > 1e-6 else (low - 0.5, high + 0.5)
        counts, _ = np.histogram(np.log10(positive).clip(low, high), bins, (low, high))
        return counts / len(positive), float(10**low), float(10**high)

    def draws_by_age(self, bins: int, capacity: int) -> NDArray[np.float64]:
        """Returns the share of draws that go to each bin of ages, from the newest rows to those overwritten next.

        The ring has equally many rows of every age, up to that of its oldest. Those looked at may not.
        """
        where = (self.ages * bins / capacity).astype(int).clip(0, bins - 1)
        rows = np.bincount(where, minlength=bins)
        means = np.bincount(where, self.leaves_by_age, bins) / np.maximum(rows, 1)
        held = np.clip((self.ages.max(initial=-1.0) + 1) * bins / capacity - np.arange(bins), 0, 1)
        mass: NDArray[np.float64] = means * held
        return mass / max(float(mass.sum()), 1e-300)


def sample_slots(buffer: LiveBuffer, head: int, slots: int = SLOTS) -> SlotSample:
    """Looks at up to `slots` slots, blocks of them spread evenly over the ring.

    Args:
        buffer: The buffer.
        head: Rows begun so far.
        slots: How many to look at.
    """
    if buffer.capacity <= slots:
        starts = list(range(0, buffer.capacity, BLOCK))
    else:
        starts = [number * (buffer.capacity - BLOCK) // (slots // BLOCK - 1) for number in range(slots // BLOCK)]
    parts = [buffer.copy_slots(start, BLOCK) for start in starts]
    leaves = np.frombuffer(b"".join(part[0] for part in parts), np.float32).astype(np.float64)
    keys1 = np.frombuffer(b"".join(part[1] for part in parts), np.int64)
    held = keys1 > 0  # other rows are being restored
    drawable = np.sort(leaves[held & (leaves > 0)])
    priorities = priorities_of(torch.from_numpy(drawable), buffer.config.sampler).numpy()
    ages = np.maximum(head - keys1[held], 0).astype(np.float64)  # written since the head was read: of no age
    return SlotSample(priorities, drawable, ages, leaves[held])
