"""Plots of a run: what was learned, and whether the replay is in good health.

matplotlib is imported only when a plot is drawn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.buffer.stats import Stats
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.limiters import SamplesPerInsert

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGE_BINS = 100
BLUE, ORANGE, GREY, INK = "#2563eb", "#ea580c", "#94a3b8", "#1e293b"
STYLE: dict[Any, Any] = {  # matplotlib's parameters while a picture is drawn
    "font.size": 9.5,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Moment:
    """The state of a run at one learner step.

    Attributes:
        step: Learner steps so far.
        seconds: Since the history began.
        mean_return: Of the evaluated policy; None where none was evaluated.
        explorer_returns: Each explorer's recent mean return, in the order of the explorers; may be empty.
        stats: The buffer's statistics.
    """

    step: int
    seconds: float
    mean_return: float | None
    explorer_returns: tuple[float, ...]
    stats: Stats


class ReplayHistory:
    """What a run leaves for its plots: call `observe` with batches and `record` now and then.

    The memory it takes does not grow with the number of batches.

    Args:
        buffer: The buffer to watch.

    Attributes:
        moments: What `record` noted, oldest first.
        age_counts: int64 `[AGE_BINS]`, items drawn by age, the youngest first; the bins divide the capacity. An item of
            a `ShardedReplay` has the age that it has in its shard, and the bins divide the shard's capacity.
        age_uniform: float64 `[AGE_BINS]`, the counts to expect of uniform draws from the same buffer.
        priorities: The buffer's `histograms()` at the last `record`; empty before.
        alpha: Exponent of the buffer's sampler; 0 under `Uniform()`.
        eps: What the sampler adds to |td|; 0 under `Uniform()`.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.moments: list[Moment] = []
        self.age_counts = torch.zeros(AGE_BINS, dtype=torch.int64)
        self.age_uniform = torch.zeros(AGE_BINS, dtype=torch.float64)
        self.priorities: dict[str, torch.Tensor] = {}
        self.target_ratio = buffer.limiter.ratio if isinstance(buffer.limiter, SamplesPerInsert) else None
        self.capacity = buffer.capacity
        self.alpha = getattr(buffer.sampler, "alpha", 0.0)
        self.eps = getattr(buffer.sampler, "eps", 0.0)
        self._buffer = buffer
        self._start = time.monotonic()

    def observe(self, batch: ReplayBatch) -> None:
        """Counts the ages of a batch's items: the rows that were written after each.

        Args:
            batch: As it came from `sample`; best at once, since items grow older while it waits.
        """
        stats, count = self._buffer.stats(), len(batch["key"])
        for keys, ring in _by_ring(batch["key"], stats):
            bins = (ring.rows_written - 1 - keys) * AGE_BINS // ring.capacity
            self.age_counts += torch.bincount(bins.clamp_(0, AGE_BINS - 1), minlength=AGE_BINS)
            edges = torch.linspace(0, ring.capacity, AGE_BINS + 1, dtype=torch.float64).clamp_(max=ring.size)
            self.age_uniform += edges.diff() * (count / max(stats.size, 1))

    def record(self, step: int, mean_return: float | None = None, explorer_returns: Sequence[float] = ()) -> Moment:
        """Notes the state of the run, and returns it. Costs one pass over the buffer's priorities.

        Args:
            step: Learner steps so far.
            mean_return: Of the policy just evaluated, if one was.
            explorer_returns: Each explorer's recent mean return; NaN where there is none yet.
        """
        seconds = time.monotonic() - self._start
        moment = Moment(step, seconds, mean_return, tuple(explorer_returns), self._buffer.stats())
        self.moments.append(moment)
        self.priorities = self._buffer.histograms()
        return moment


def _by_ring(keys: torch.Tensor, stats: Stats) -> Iterator[tuple[torch.Tensor, Stats]]:
    """Yields each ring's keys, counted from its first row, and its statistics; a ring is the buffer or a shard."""
    shards = getattr(stats, "shards", None)  # of `torchreplay.ray`, which is not needed here
    if shards is None:
        yield keys, stats
        return
    for shard in shards:
        yield keys[(keys >= shard.first_key) & (keys <= shard.last_key)] - shard.first_key, shard.stats


def replay_health(
    history: ReplayHistory, path: str | os.PathLike[str], title: str = "", solved: float | None = None
) -> None:
    """Writes a picture of four panels: learning curve, samples per insert, ages of the drawn items, priorities.

    Args:
        history: A run with at least one recorded moment.
        path: Where to write; the suffix (`.png`, `.pdf`, `.svg`) names the format.
        title: Above the panels.
        solved: A return to mark in the learning curve.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: Nothing was recorded.
    """
    if not history.moments:
        raise ValueError("the history is empty: call history.record(step) before drawing it")
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.04, hspace=0.06)
        figure = Figure(figsize=(11, 7), dpi=130, layout=layout)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
        axes = figure.subplots(2, 2)
        draw_learning_curve(axes[0, 0], history, solved)
        draw_samples_per_insert(axes[0, 1], history)
        draw_ages(axes[1, 0], history)
        draw_priorities(axes[1, 1], history)
        figure.supxlabel(_totals(history), fontsize=9, color="#64748b")
        figure.savefig(path)


def draw_learning_curve(axes: Axes, history: ReplayHistory, solved: float | None = None) -> None:
    """Draws the evaluated returns, and behind them those of the explorers, over learner steps."""
    axes.set(title="Return", xlabel="learner step", ylabel="mean return of an episode")
    explorers = max((len(moment.explorer_returns) for moment in history.moments), default=0)
    for index in range(explorers):
        points = [(m.step, m.explorer_returns[index]) for m in history.moments if len(m.explorer_returns) > index]
        strength = 0.25 + 0.6 * index / max(explorers - 1, 1)
        label = "explorers" if index == explorers - 1 else None
        axes.plot(*zip(*points, strict=True), color=GREY, alpha=strength, linewidth=1.3, label=label)
    evaluated = [(m.step, m.mean_return) for m in history.moments if m.mean_return is not None]
    if evaluated:
        steps, returns = zip(*evaluated, strict=True)
        axes.plot(steps, returns, color=BLUE, linewidth=2, marker="o", markersize=4, label="greedy policy")
    if solved is not None:
        axes.axhline(solved, color=ORANGE, linestyle="--", linewidth=1.2, label=f"solved: {solved:g}")
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    low = min(low, 0.0)
    axes.set_ylim(low, high + 0.2 * (high - low))  # room for the legend
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", ncols=3, fontsize=8.5)


def draw_samples_per_insert(axes: Axes, history: ReplayHistory) -> None:
    """Draws how often each inserted item has been drawn so far, and the limiter's target if it has one."""
    axes.set(title="Samples per insert", xlabel="learner step", ylabel="items drawn / items inserted")
    steps = [moment.step for moment in history.moments]
    axes.plot(steps, [m.stats.samples_per_insert for m in history.moments], color=BLUE, linewidth=2, label="realised")
    if history.target_ratio is not None:
        label = f"target of the limiter: {history.target_ratio:g}"
        axes.axhline(history.target_ratio, color=ORANGE, linestyle="--", linewidth=1.2, label=label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.legend(loc="lower right", fontsize=8.5)


def draw_ages(axes: Axes, history: ReplayHistory) -> None:
    """Draws the share of draws that went to items of each age, beside what uniform draws would give."""
    axes.set(title="Age of the drawn items", xlabel="rows written since (thousands)", ylabel="share of draws, %")
    total = max(int(history.age_counts.sum()), 1)
    oldest = int(torch.nonzero(history.age_uniform).max()) + 1 if total > 1 else 1
    width = history.capacity / AGE_BINS / 1000
    edges = [width * bin_ for bin_ in range(oldest + 1)]
    drawn = (100 * history.age_counts[:oldest] / total).tolist()
    uniform = (100 * history.age_uniform[:oldest] / total).tolist()
    axes.stairs(drawn, edges, fill=True, color=BLUE, alpha=0.35)
    axes.stairs(drawn, edges, color=BLUE, linewidth=1.4, label="drawn by priority")
    axes.stairs(uniform, edges, color=ORANGE, linewidth=1.4, linestyle="--", label="uniform draws", zorder=3)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize=8.5)


def draw_priorities(axes: Axes, history: ReplayHistory) -> None:
    """Draws the priorities in the buffer at the end, and which of them the draws go to: P(i) = p_i / sum p.

    p = (|td| + eps)^alpha: Schaul et al. 2016, equation 1.
    """
    axes.set(title="Priorities at the end", xlabel="priority |td|", ylabel="share, %")
    counts, edges = history.priorities["priority"].double(), history.priorities["priority_edges"]
    middle = (edges[1:] * edges[:-1]).sqrt()  # what the priorities of a bin are taken for
    mass = counts * (middle + history.eps) ** history.alpha
    items, draws = (100 * values / values.sum().clamp(min=1e-300) for values in (counts, mass))
    axes.stairs(draws.tolist(), edges.tolist(), fill=True, color=BLUE, alpha=0.35)
    axes.stairs(draws.tolist(), edges.tolist(), color=BLUE, linewidth=1.4, label="of the draws")
    axes.stairs(items.tolist(), edges.tolist(), color=ORANGE, linewidth=1.4, linestyle="--", label="of the items")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize=8.5)


def _totals(history: ReplayHistory) -> str:
    last = history.moments[-1]
    stats = last.stats
    parts = [
        (stats.inserted, "rows inserted"),
        (stats.draws, "batches drawn"),
        (stats.updated, "priorities updated"),
        (stats.stale_updates, "updates too late for their row"),
    ]
    return "   ·   ".join([*(f"{count:,} {name}" for count, name in parts), f"{last.seconds:.0f} s"])
