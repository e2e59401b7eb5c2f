"""The names and values of what is logged about a buffer: the same for every logger."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

import torch

from torchreplay.buffer.base import Replay
from torchreplay.buffer.stats import Stats

PREFIX: Final = "replay"
"""With which every name begins."""
RATES: Final = ("inserted", "sampled", "updated")
"""Counters that are also told per second."""
HISTOGRAMS: Final = {
    "priority": "raw priorities |td| of the items that can be drawn",
    "age": "rows written since each row held",
}
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Of the priorities and ages, for Prometheus."""
FINE: Final = 1024
"""Bins from which they are taken."""
COUNTERS: Final = {
    "inserted": "items that ever became drawable",
    "sampled": "items drawn",
    "draws": "batches drawn",
    "updated": "TD errors applied",
    "stale_updates": "TD errors dropped because their row was overwritten or cleared",
    "unready_updates": "TD errors dropped because their item was not complete",
    "redraws": "items drawn again because their row was overwritten while it was copied",
    "evicted_unsampled": "items overwritten before they were ever drawn",
    "evicted_by_pages": "rows that left because the bytes of their ragged values were taken again",
    "rows_written": "keys given to writers",
    "dropped_rows": "rows that were being written when all processes had died",
    "expired_items": "items that became too old for the learner's policy version",
    "dropped_items": "items of a queue that were overwritten before they were drawn, or held and not committed",
    "insert_wait": "seconds that writers waited",
    "sample_wait": "seconds that learners waited for rows",
}
GAUGES: Final = {
    "admitted_items": "items of a queue that count as admitted",
    "admission_limit": "how many these may be",
    "open_admissions": "items that writers have begun",
    "size": "rows held",
    "capacity": "rows that fit",
    "nbytes": "bytes of shared memory, or of the file",
    "drawable": "items that can be drawn now",
    "ragged_bytes": "bytes for values of any length",
    "ragged_fill": "share of them that rows take",
    "staleness": "TD errors that came between a batch's draw and its handing out, on average",
    "priority_change": "by how much an applied TD error changed its item's leaf, on average",
    "samples_per_insert": "items drawn for each item inserted",
    "priority_total": "sum of all leaves",
    "priority_min": "smallest raw priority of the items that can be drawn",
    "priority_max": "largest raw priority seen",
    "writers": "writers alive",
    "learners": "learners alive",
    "held_items": "items of a queue that somebody holds",
    "oldest_age": "seconds since the oldest item of a queue was written, of those that can be drawn",
    "policy_version": "the learner's",
    "age_mean": "policy versions that the items drawn were behind the learner's, on average",
    "age_max": "the most that one was",
    "last_write_age": "seconds since a writer last wrote",
    "insert_wait_share": "share of the last 10 to 20 seconds that a writer waited",
    "sample_wait_share": "share of the last 10 to 20 seconds that a learner waited for rows",
    "stopped": "1 when the buffer was stopped",
}
"""With `COUNTERS` all figures of `Stats`, in a few words each."""


class Scalars:
    """Takes the scalars of `buffer.stats()`, and rates between two looks."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._counts: dict[str, float] = {}

    def take(self, replay: Replay) -> tuple[Stats, dict[str, float]]:
        """Returns the statistics of a buffer, and what is logged of them by name.

        The names are those of `Stats`, and `<counter>_per_second` since the look before. What is not finite is left
        out. So is an age of what never was.
        """
        stats = replay.stats()
        told = stats.as_dict()
        values = {name: float(value) for name, value in told.items()}
        values |= self._rates(told)
        for age in ("last_write_age", "oldest_age"):
            if values[age] < 0:
                del values[age]
        return stats, {name: value for name, value in values.items() if math.isfinite(value)}

    def forget(self) -> None:
        """Has the next look return no rates."""
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


def prometheus_text(
    values: Mapping[str, float], histograms: Mapping[str, torch.Tensor], labels: Mapping[str, str]
) -> str:
    """Returns figures in Prometheus' text format, version 0.0.4.

    Args:
        values: What `Scalars.take` returned.
        histograms: What `Replay.histograms` returned, of which quantiles are taken; may be empty.
        labels: Of each line.
    """
    lines = []
    for name, value in values.items():
        full = f"{PREFIX}_{name}"
        base = name.removesuffix("_per_second")
        about = COUNTERS.get(base) or GAUGES.get(base, "")
        lines += [
            f"# HELP {full} {about}{' a second' if base != name else ''}",
            f"# TYPE {full} {'counter' if name in COUNTERS else 'gauge'}",
            f"{full}{_labels(labels)} {value!r}",
        ]
    for name in HISTOGRAMS:
        if name in histograms:
            lines += _prometheus_quantiles(name, histograms[name], histograms[f"{name}_edges"], labels)
    return "\n".join([*lines, ""])


def _prometheus_quantiles(name: str, counts: torch.Tensor, edges: torch.Tensor, labels: Mapping[str, str]) -> list[str]:
    """Returns gauges. A histogram of Prometheus counts events that only add up; this is what the buffer holds now."""
    if not counts.sum():
        return []
    full = f"{PREFIX}_{name}_quantile"
    reached = counts.cumsum(0).double() / counts.sum()
    bins = torch.searchsorted(reached, torch.tensor(QUANTILES, dtype=torch.float64, device="cpu"))
    values = ((edges[1:] + edges[:-1]) / 2)[bins.clamp(max=len(counts) - 1)].tolist()
    return [
        f"# HELP {full} {HISTOGRAMS[name]}, quantiles",
        f"# TYPE {full} gauge",
        *(
            f"{full}{_labels({**labels, 'quantile': repr(quantile)})} {value!r}"
            for quantile, value in zip(QUANTILES, values, strict=True)
        ),
    ]


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items()) + "}"
