"""The names and values of what is logged about a buffer: the same for every logger."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

import torch

from torchreplay.buffer.base import Replay
from torchreplay.buffer.stats import Stats

RATES: Final = ("inserted", "sampled", "updated")
"""Counters that are also told per second."""
PREFIX: Final = "replay"
HISTOGRAMS: Final = ("priority", "age")


class Scalars:
    """The scalars of `buffer.stats()`, and rates between two looks.

    Args:
        replay: The buffer.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._clock = 0.0
        self._counts: dict[str, float] = {}

    def take(self) -> tuple[Stats, dict[str, float]]:
        """Returns the statistics, and what is logged of them by name.

        The names are those of `Stats`, and `<counter>_per_second` since the look before. What is not finite is left
        out, and so is an age that there is none of yet, which `Stats` says by -1.
        """
        stats = self._replay.stats()
        told = stats.as_dict()
        values = {name: float(value) for name, value in told.items() if isinstance(value, int | float)}
        values |= self._rates(told)
        return stats, {name: value for name, value in values.items() if math.isfinite(value)}

    def forget(self) -> None:
        """Has the next look count no rates."""
        self._counts = {}

    def _rates(self, told: Mapping[str, Any]) -> dict[str, float]:
        now, counts = time.monotonic(), {name: float(told[name]) for name in RATES}
        elapsed, before = now - self._clock, self._counts
        self._clock, self._counts = now, counts
        return {f"{name}_per_second": (counts[name] - before[name]) / elapsed for name in before if elapsed > 0}


def named(values: Mapping[str, float], separator: str = "/") -> dict[str, float]:
    """Returns values by the names under which they are logged: `replay/size`, ..."""
    return {f"{PREFIX}{separator}{name}": value for name, value in values.items()}


def tensorboard_histogram(counts: torch.Tensor, edges: torch.Tensor) -> dict[str, Any]:
    """Returns what TensorBoard's `add_histogram_raw` takes; the sums put every value into the middle of its bin.

    Args:
        counts: int64 `[bins]`.
        edges: float64 `[bins + 1]`.
    """
    middles = (edges[1:] + edges[:-1]) / 2
    return {
        "min": edges[0].item(),
        "max": edges[-1].item(),
        "num": int(counts.sum()),
        "sum": (counts * middles).sum().item(),
        "sum_squares": (counts * middles**2).sum().item(),
        "bucket_limits": edges[1:].tolist(),
        "bucket_counts": counts.tolist(),
    }
