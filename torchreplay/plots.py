"""Plots of a run: what was learned, and whether the replay is in good health.

matplotlib is imported only when a plot is drawn.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.buffer.stats import Stats
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.limiters import SamplesPerInsert
from torchreplay.schema.samplers import Fifo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

AGE_BINS = 100


@dataclass(frozen=True)
class Palette:
    """The colours of a picture.

    Attributes:
        ground: Behind everything.
        ink: Text and titles.
        muted: What is of less account: axes, remarks, backgrounds of a comparison.
        grid: Lines of the grid.
        main: What the panel is about.
        other: What it is compared with.
        alarm: What should be small.
    """

    ground: str
    ink: str
    muted: str
    grid: str
    main: str
    other: str
    alarm: str


LIGHT = Palette("#ffffff", "#1e293b", "#64748b", "#e2e8f0", "#2563eb", "#ea580c", "#dc2626")
DARK = Palette("#0d1117", "#e6edf3", "#8b98a9", "#263040", "#6ea8fe", "#ffa657", "#ff7b72")


def style(palette: Palette) -> dict[Any, Any]:
    """Returns matplotlib's parameters while a picture is drawn: text is readable at half of the picture's size."""
    return {
        "figure.facecolor": palette.ground,
        "savefig.facecolor": palette.ground,
        "font.size": 11,
        "font.family": "sans-serif",
        "text.color": palette.ink,
        "axes.facecolor": palette.ground,
        "axes.labelcolor": palette.ink,
        "axes.edgecolor": palette.muted,
        "axes.titlesize": 13,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": palette.ink,
        "axes.titlepad": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": palette.grid,
        "grid.linewidth": 0.8,
        "lines.linewidth": 2.2,
        "xtick.color": palette.ink,
        "ytick.color": palette.ink,
        "legend.frameon": False,
        "legend.fontsize": 10.5,
    }


@contextmanager
def picture(
    path: str | os.PathLike[str], title: str, remark: str, palette: Palette, rows: int = 2
) -> Iterator[Sequence[Axes]]:
    """Yields the axes of a picture with two columns, row after row, and writes it when they are drawn.

    Args:
        path: Where to write; the suffix (`.png`, `.pdf`, `.svg`) names the format.
        title: Above the panels.
        remark: Below them.
        palette: Its colours.
        rows: Rows of panels.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(style(palette)):
        layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12, wspace=0.05, hspace=0.06)
        figure = Figure(figsize=(11, 1 + 3.1 * rows), dpi=130, layout=layout)
        if title:
            figure.suptitle(title, x=0.014, ha="left", fontsize=16, fontweight="bold")
        yield list(figure.subplots(rows, 2).flat)
        if remark:
            figure.supxlabel(remark, fontsize=10.5, color=palette.muted)
        figure.savefig(path)


def thousands(axis: Axis) -> None:
    """Writes the numbers of an axis with commas."""
    axis.set_major_formatter("{x:,.10g}")


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
        is_queue: Whether the sampler is `Fifo`.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.moments: list[Moment] = []
        self.age_counts = torch.zeros(AGE_BINS, dtype=torch.int64, device="cpu")
        self.age_uniform = torch.zeros(AGE_BINS, dtype=torch.float64, device="cpu")
        self.priorities: dict[str, torch.Tensor] = {}
        self.target_ratio = buffer.limiter.ratio if isinstance(buffer.limiter, SamplesPerInsert) else None
        self.capacity = buffer.capacity
        self.alpha = getattr(buffer.sampler, "alpha", 0.0)
        self.eps = getattr(buffer.sampler, "eps", 0.0)
        self.is_queue = isinstance(buffer.sampler, Fifo)
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
            edges = torch.linspace(0, ring.capacity, AGE_BINS + 1, dtype=torch.float64, device="cpu")
            self.age_uniform += edges.clamp_(max=ring.size).diff() * (count / max(stats.size, 1))

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
    history: ReplayHistory,
    path: str | os.PathLike[str],
    title: str = "",
    solved: float | None = None,
    dark: bool = False,
) -> None:
    """Writes a picture of four panels: learning curve, samples per insert, ages of the drawn items, priorities.

    Of a queue the fourth has the items to draw, held, and dropped.

    Args:
        history: A run with at least one recorded moment.
        path: Where to write; the suffix (`.png`, `.pdf`, `.svg`) names the format.
        title: Above the panels.
        solved: A return to mark in the learning curve.
        dark: Light lines on a dark ground.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: Nothing was recorded.
    """
    if not history.moments:
        raise ValueError("the history is empty: call history.record(step) before drawing it")
    palette = DARK if dark else LIGHT
    with picture(path, title, _totals(history), palette) as axes:
        draw_learning_curve(axes[0], history, solved, palette)
        draw_samples_per_insert(axes[1], history, palette)
        draw_ages(axes[2], history, palette)
        (draw_queue if history.is_queue else draw_priorities)(axes[3], history, palette)


def draw_learning_curve(
    axes: Axes, history: ReplayHistory, solved: float | None = None, palette: Palette = LIGHT
) -> None:
    """Draws the evaluated returns over learner steps, and behind them the range of the explorers' returns."""
    axes.set(title="Return of an episode", xlabel="learner step", ylabel="mean return")
    explored = [(m.step, low_high) for m in history.moments if (low_high := _range(m.explorer_returns)) is not None]
    if explored:
        steps, ranges = zip(*explored, strict=True)
        low, high = zip(*ranges, strict=True)
        axes.fill_between(steps, low, high, color=palette.muted, alpha=0.25, linewidth=0, label="explorers")
    evaluated = [(m.step, m.mean_return) for m in history.moments if m.mean_return is not None]
    if evaluated:
        steps, returns = zip(*evaluated, strict=True)
        axes.plot(steps, returns, color=palette.main, marker="o", markersize=4.5, label="greedy policy")
    if solved is not None:
        axes.axhline(solved, color=palette.other, linestyle="--", linewidth=1.5, label=f"solved: {solved:,g}")
    axes.set_xlim(left=0)
    bottom, top = axes.get_ylim()
    bottom = min(bottom, 0.0)
    axes.set_ylim(bottom, top + 0.25 * (top - bottom))  # room for the legend
    thousands(axes.xaxis)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", ncols=3, columnspacing=1.2, handlelength=1.6)


def _range(returns: Sequence[float]) -> tuple[float, float] | None:
    """Returns the lowest and the highest number; None where there is none."""
    known = [value for value in returns if math.isfinite(value)]
    return (min(known), max(known)) if known else None


def draw_samples_per_insert(axes: Axes, history: ReplayHistory, palette: Palette = LIGHT) -> None:
    """Draws how often each inserted item has been drawn so far, and the limiter's target if it has one."""
    axes.set(title="Samples per insert", xlabel="learner step", ylabel="drawn / inserted items")
    steps = [moment.step for moment in history.moments]
    axes.plot(steps, [m.stats.samples_per_insert for m in history.moments], color=palette.main, label="so far")
    if history.target_ratio is not None:
        label = f"the limiter's target: {history.target_ratio:g}"
        axes.axhline(history.target_ratio, color=palette.other, linestyle="--", linewidth=1.5, label=label)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.15 * max([history.target_ratio or 1e-9, *(m.stats.samples_per_insert for m in history.moments)]))
    thousands(axes.xaxis)
    axes.legend(loc="lower right")


def draw_ages(axes: Axes, history: ReplayHistory, palette: Palette = LIGHT) -> None:
    """Draws the share of draws that went to items of each age, beside what uniform draws would give."""
    axes.set(title="Ages of the drawn items", xlabel="rows written since (thousands)", ylabel="share of the draws, %")
    total = max(int(history.age_counts.sum()), 1)
    oldest = int(torch.nonzero(history.age_uniform).max()) + 1 if total > 1 else 1
    width = history.capacity / AGE_BINS / 1000
    edges = [width * bin_ for bin_ in range(oldest + 1)]
    drawn = (100 * history.age_counts[:oldest] / total).tolist()
    uniform = (100 * history.age_uniform[:oldest] / total).tolist()
    _draw_both(axes, edges, (drawn, "drawn by priority"), (uniform, "if draws were uniform"), palette)
    axes.set_xlim(0, edges[-1])
    axes.legend(loc="upper right")


def draw_priorities(axes: Axes, history: ReplayHistory, palette: Palette = LIGHT) -> None:
    """Draws the priorities in the buffer at the end, and which of them the draws go to: P(i) = p_i / sum p.

    p = (|td| + eps)^alpha: Schaul et al. 2016, equation 1.
    """
    axes.set(title="Priorities at the end", xlabel="priority: the item's |TD error|", ylabel="share, %")
    counts, edges = history.priorities["priority"].double(), history.priorities["priority_edges"]
    middle = (edges[1:] * edges[:-1]).sqrt()  # what the priorities of a bin are taken for
    mass = counts * (middle + history.eps) ** history.alpha
    items, draws = (100 * values / values.sum().clamp(min=1e-300) for values in (counts, mass))
    _draw_both(axes, edges.tolist(), (draws.tolist(), "of the draws"), (items.tolist(), "of the items"), palette)
    axes.set_xscale("log")
    axes.legend(loc="upper left")


def draw_queue(axes: Axes, history: ReplayHistory, palette: Palette = LIGHT) -> None:
    """Draws how many items of a queue wait to be drawn, and are held; and how many were dropped so far, if any were."""
    axes.set(title="Items in the queue", xlabel="learner step", ylabel="items")
    steps, stats = [moment.step for moment in history.moments], [moment.stats for moment in history.moments]
    axes.plot(steps, [s.drawable for s in stats], color=palette.main, label="to draw")
    axes.plot(steps, [s.held_items for s in stats], color=palette.other, label="held")
    if stats[-1].dropped_items:
        axes.plot(steps, [s.dropped_items for s in stats], color=palette.alarm, label="dropped so far")
    axes.set_xlim(left=0)
    axes.margins(y=0.3)
    axes.set_ylim(bottom=0)
    thousands(axes.xaxis)
    thousands(axes.yaxis)
    axes.legend(loc="upper left", ncols=3)


def _draw_both(
    axes: Axes,
    edges: list[float],
    main: tuple[list[float], str],
    other: tuple[list[float], str],
    palette: Palette,
) -> None:
    """Draws two histograms over the same bins, the main one filled."""
    axes.stairs(main[0], edges, fill=True, color=palette.main, alpha=0.3)
    axes.stairs(main[0], edges, color=palette.main, linewidth=1.6, label=main[1])
    axes.stairs(other[0], edges, color=palette.other, linewidth=1.6, linestyle="--", label=other[1], zorder=3)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)


def _totals(history: ReplayHistory) -> str:
    last = history.moments[-1]
    stats = last.stats
    parts = [
        (stats.inserted, "rows inserted"),
        (stats.draws, "batches drawn"),
        (stats.updated, "priorities updated"),
        (stats.stale_updates, "TD errors too late for their row"),
    ]
    return "   ·   ".join([*(f"{count:,} {name}" for count, name in parts), f"{last.seconds:.0f} s"])
