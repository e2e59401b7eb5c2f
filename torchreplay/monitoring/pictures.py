"""Pictures of recordings. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from torchreplay.monitoring.recording import Recording
from torchreplay.plots import DARK, LIGHT, Palette, picture, thousands

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 240
"""Moments drawn: rates are taken between two of them."""


def draw_recording(recording: Recording, path: str | os.PathLike[str], title: str = "", dark: bool = False) -> None:
    """Writes a picture of six panels: rates, samples per insert, waits, late TD errors, priorities, and the fill.

    Of a queue three are others: the items to draw and held, the age of the oldest one, and the dropped items.

    Args:
        recording: What was recorded, two records at least.
        path: Where to write; the suffix (`.png`, `.pdf`, `.svg`) names the format.
        title: Above the panels.
        dark: Light lines on a dark ground.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are too few records, or the format is unknown.
    """
    if len(recording.seconds) < 2:
        raise ValueError("the recording has one record: rates need two at least")
    palette = DARK if dark else LIGHT
    is_queue = len(recording.queue["time"]) > 0
    of_replay = (_draw_samples_per_insert, _draw_late, _draw_priorities)
    of_items = (_draw_depth, _draw_oldest, _draw_dropped) if is_queue else of_replay
    with picture(path, title, _totals(recording), palette, rows=3) as axes:
        panels = (_draw_rates, of_items[0], _draw_waits, of_items[1], of_items[2], _draw_fill)
        for each, draw in zip(axes, panels, strict=True):
            draw(each, recording, palette)
            each.set_xlim(0, float(recording.seconds[-1]))
            thousands(each.xaxis)
            each.set_xlabel("seconds")


class _Moments:
    """Moments of a recording, evenly spread, and the growth of counters between them."""

    def __init__(self, recording: Recording) -> None:
        seconds = recording.seconds
        self._recording = recording
        self._at = np.unique(np.linspace(0, len(seconds) - 1, min(POINTS, len(seconds)), dtype=int))
        self.starts, self.ends = self._at[:-1], self._at[1:]
        self.seconds = seconds[self.ends]
        self.elapsed = np.maximum(np.diff(seconds[self._at]), 1e-9)

    def growth(self, counter: str) -> NDArray[np.float64]:
        """Returns by how much it has grown up to each moment."""
        grown: NDArray[np.float64] = np.maximum(np.diff(self._recording.counters[counter][self._at]), 0.0)
        return grown

    def rate(self, counter: str) -> NDArray[np.float64]:
        """Returns the same for each second."""
        each: NDArray[np.float64] = self.growth(counter) / self.elapsed
        return each

    def value(self, counter: str) -> NDArray[np.float64]:
        """Returns what it was at each moment."""
        values: NDArray[np.float64] = self._recording.counters[counter][self.ends]
        return values


def _draw_rates(axes: Axes, recording: Recording, palette: Palette) -> None:
    axes.set(title="Rows written and items drawn", ylabel="per second, log scale")
    moments = _Moments(recording)
    for counter, colour, label in (("sampled", palette.main, "items drawn"), ("head", palette.other, "rows written")):
        rate = moments.rate(counter)
        axes.plot(moments.seconds, np.where(rate > 0, rate, np.nan), color=colour, label=label)
    axes.set_yscale("log")
    axes.margins(y=0.3)
    _legend(axes)


def _draw_samples_per_insert(axes: Axes, recording: Recording, palette: Palette) -> None:
    axes.set(title="Samples per insert", ylabel="drawn / inserted items")
    moments = _Moments(recording)
    inserted = moments.value("inserted")
    ratio = np.where(inserted > 0, moments.value("sampled") / np.maximum(inserted, 1), np.nan)
    axes.plot(moments.seconds, ratio, color=palette.main, label="so far")
    target = recording.counters["target_ratio"][-1]
    if target:
        axes.axhline(
            target, color=palette.other, linestyle="--", linewidth=1.5, label=f"the limiter's target: {target:g}"
        )
    axes.set_ylim(0, 1.15 * max(target, float(np.nanmax(ratio, initial=0.0)), 1e-9))
    _legend(axes, "lower right")


def _draw_queue(
    axes: Axes, recording: Recording, palette: Palette, lines: Sequence[tuple[NDArray[np.float64], str, str]]
) -> None:
    seconds = recording.queue["time"] - recording.counters["time"][0]
    at = np.unique(np.linspace(0, len(seconds) - 1, min(POINTS, len(seconds)), dtype=int))
    for values, colour, label in lines:
        axes.plot(seconds[at], values[at], color=colour, label=label)
    axes.set_ylim(bottom=0, top=1.25 * max(1.0, *(float(np.nanmax(values, initial=0.0)) for values, _, _ in lines)))
    thousands(axes.yaxis)
    _legend(axes)


def _draw_depth(axes: Axes, recording: Recording, palette: Palette) -> None:
    axes.set(title="Items in the queue", ylabel="items")
    depth, held = recording.queue["drawable"], recording.queue["held_items"]
    _draw_queue(axes, recording, palette, [(depth, palette.main, "to draw"), (held, palette.other, "held")])


def _draw_oldest(axes: Axes, recording: Recording, palette: Palette) -> None:
    axes.set(title="Age of the oldest item to draw", ylabel="seconds")
    age = recording.queue["oldest_age"]
    _draw_queue(axes, recording, palette, [(np.where(age >= 0, age, np.nan), palette.main, "")])


def _draw_dropped(axes: Axes, recording: Recording, palette: Palette) -> None:
    axes.set(title="Items dropped before they were drawn", ylabel="items, since the beginning")
    _draw_queue(axes, recording, palette, [(recording.queue["dropped_items"], palette.alarm, "")])


def _draw_waits(axes: Axes, recording: Recording, palette: Palette) -> None:
    axes.set(title="Who waits for whom", ylabel="share of their time, %")
    moments = _Moments(recording)
    sides = (
        ("sample_wait", "learners", palette.main, "learners, for rows"),
        ("insert_wait", "writers", palette.other, "explorers, for the learner"),
    )
    for counter, many, colour, label in sides:
        share = 100 * moments.rate(counter) / np.maximum(moments.value(many), 1)
        axes.plot(moments.seconds, np.minimum(share, 100), color=colour, label=label)
    axes.set_ylim(-3, 125)
    axes.set_yticks([0, 25, 50, 75, 100])
    _legend(axes)


def _draw_late(axes: Axes, recording: Recording, palette: Palette) -> None:
    axes.set(title="TD errors that come too late", ylabel="share of the TD errors, %")
    moments = _Moments(recording)
    lost = (
        ("stale_updates", palette.alarm, "row overwritten"),
        ("unready_updates", palette.muted, "item not complete"),
    )
    fed_back = sum(moments.growth(counter) for counter in ("updated", "stale_updates", "unready_updates"))
    for counter, colour, label in lost:
        share = 100 * moments.growth(counter) / np.maximum(fed_back, 1)
        axes.plot(moments.seconds, share, color=colour, label=label)
    low, high = axes.get_ylim()
    axes.set_ylim(-0.03 * max(high, 5), 1.25 * max(high, 5) if low < high else 5)
    _legend(axes)


def _draw_priorities(axes: Axes, recording: Recording, palette: Palette) -> None:
    axes.set(title="Priorities of the items", ylabel="|TD error|, log scale")
    table = recording.priorities
    seconds = table["time"] - recording.counters["time"][0]
    known = np.isfinite(table["p50"]) & (table["p90"] > 0)
    low = np.maximum(table["p10"], 1e-9)
    axes.fill_between(
        seconds[known],
        low[known],
        table["p90"][known],
        color=palette.main,
        alpha=0.25,
        linewidth=0,
        label="80 % of them",
    )
    axes.plot(seconds[known], table["p50"][known], color=palette.main, label="median")
    if known.any():
        axes.set_yscale("log")
    axes.margins(y=0.3)
    _legend(axes)


def _draw_fill(axes: Axes, recording: Recording, palette: Palette) -> None:
    axes.set(title="Rows in use" if len(recording.queue["time"]) else "Rows held", ylabel="share of the capacity, %")
    moments = _Moments(recording)
    share = 100 * moments.value("fill") / recording.config.capacity
    axes.fill_between(moments.seconds, share, color=palette.main, alpha=0.25, linewidth=0)
    axes.plot(moments.seconds, share, color=palette.main)
    axes.set_ylim(0, 108)
    axes.text(
        0.98,
        0.06,
        f"capacity: {recording.config.capacity:,}",
        transform=axes.transAxes,
        ha="right",
        color=palette.muted,
    )


def _legend(axes: Axes, place: Literal["upper left", "lower right"] = "upper left") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=place, ncols=2, columnspacing=1.2, handlelength=1.6)


def _totals(recording: Recording) -> str:
    first, last = ({name: values[at] for name, values in recording.counters.items()} for at in (0, -1))
    parts = [("head", "rows written"), ("draws", "batches drawn"), ("updated", "TD errors applied")]
    texts = [f"{last[name] - first[name]:,.0f} {what}" for name, what in parts]
    return "   ·   ".join([*texts, f"{recording.seconds[-1]:,.0f} s"])
