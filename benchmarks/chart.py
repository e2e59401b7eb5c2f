"""Three figures as one small picture, for the README: speed, what a death costs, and memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.line import OURS, Line


class Panel(NamedTuple):
    """A part of the picture.

    Attributes:
        title: What is shown, and which way is better.
        lines: Section and name of each benchmark; of a candidate the last one that it has counts.
        unit: Behind the figures.
        scale: What a figure is multiplied by.
    """

    title: str
    lines: Sequence[tuple[str, str]]
    unit: str
    scale: float = 1.0


PANELS = (
    Panel("Draw 512 by priority, feed back", [("small", "sample + update 512")], " us"),
    Panel("Explorer killed: the learner hangs", [("kills", "explorer killed: learner hangs")], " %"),
    Panel(
        "An Atari transition, stacks of four",
        [("memory", "atari, 56,461 of values"), ("memory", "frames, stored once")],
        " KB",
        1e-3,
    ),
)
THEMES = {"": ("white", "#24292f", "#0969da", "#b0b7be"), "_dark": ("#0d1117", "#e6edf3", "#58a6ff", "#484f58")}
NAMES = {"stable_baselines3": "SB3", "tianshou": "Tianshou", "torchrl": "TorchRL"}


def draw(lines: Sequence[Line], path: Path) -> list[Path]:
    """Draws the picture, light and dark, if all of its benchmarks were run.

    Args:
        lines: What was measured.
        path: Of the light one; the dark one has `_dark` before the suffix.

    Returns:
        The files; none where a benchmark is missing.
    """
    found = {(line.section, line.name): line for line in lines}
    if any(key not in found for panel in PANELS for key in panel.lines):
        return []
    figures = [_figures(panel, found) for panel in PANELS]
    return [_draw(figures, path.with_stem(path.stem + end), *colours) for end, colours in THEMES.items()]


def _figures(panel: Panel, found: Mapping[tuple[str, str], Line]) -> dict[str, float]:
    """Returns the figure of each candidate, ours first."""
    medians = {name: found[key].median(name) for key in panel.lines for name in found[key].samples}
    others = sorted((name for name in medians if name != OURS), key=lambda name: medians[name])
    return {name: panel.scale * medians[name] for name in [OURS, *others]}


def _draw(figures: Sequence[Mapping[str, float]], path: Path, back: str, ink: str, ours: str, theirs: str) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(10.5, 1.9), facecolor=back, layout="constrained")
    for axis, panel, values in zip(axes, PANELS, figures, strict=True):
        _draw_panel(axis, panel, values, ink, (ours, theirs))
        axis.set_facecolor(back)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor=back)
    pyplot.close(figure)
    return path


def _draw_panel(axis: Any, panel: Panel, values: Mapping[str, float], ink: str, colours: tuple[str, str]) -> None:
    names = [NAMES.get(name, name) for name in values]
    bars = axis.barh(names, list(values.values()), color=[colours[name != OURS] for name in values], height=0.62)
    axis.bar_label(bars, [f" {value:.3g}{panel.unit}" for value in values.values()], color=ink, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.32 * max(1e-9, *values.values()))
    axis.set_title(panel.title, color=ink, fontsize=10, loc="left")
    axis.tick_params(colors=ink, labelsize=9, length=0)
    axis.set_xticks([])
    axis.spines[:].set_visible(False)
