"""Interquartile means and their bootstrap intervals (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264)."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks.learning.results import Result

CONFIDENCE = 0.95
RESAMPLES = 2_000


class Summary(NamedTuple):
    """What the seeds of one variant show at one place.

    Attributes:
        x: Where.
        mean: The interquartile mean.
        low: The lower end of its interval.
        high: The upper end.
        seeds: How many.
    """

    x: float
    mean: float
    low: float
    high: float
    seeds: int


def interquartile_mean(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Returns the mean without the lowest and the highest quarter."""
    return np.asarray(stats.trim_mean(values, 0.25, axis=axis))


def summarize(results: Iterable[Result]) -> list[Summary]:
    """Returns a summary for each x, ascending."""
    at: dict[float, list[float]] = {}
    for result in results:
        at.setdefault(result.x, []).append(result.y)
    return [Summary(x, *_interval(np.array(values)), len(values)) for x, values in sorted(at.items())]


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    mean = float(interquartile_mean(values))
    if len(values) < 2 or (values == values[0]).all():  # nothing to resample
        return mean, mean, mean
    with np.errstate(invalid="ignore"):  # runs that never end count as infinity, and have no difference
        found = stats.bootstrap((values,), interquartile_mean, n_resamples=RESAMPLES, method="percentile", rng=0)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found.bootstrap_distribution, (tail, 1 - tail), method="nearest")
    return mean, float(low), float(high)
