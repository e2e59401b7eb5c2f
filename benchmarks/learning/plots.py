"""One picture a question: a panel for each task, a line for each variant."""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from benchmarks.learning.cell import Question
from benchmarks.learning.results import Result
from benchmarks.learning.statistics import summarize

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito, for colour-blind people
STYLES = ("-", "--", "-.", ":")  # so that lines which lie on each other are both seen


def draw(question: Question, results: Sequence[Result], path: Path) -> None:
    """Draws what was found out; tasks and variants without results are left out."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = [task for task in question.tasks if any(result.task == task for result in results)]
    across, down = min(len(tasks), 2), math.ceil(len(tasks) / 2)
    figure, axes = pyplot.subplots(down, across, figsize=(4.6 * across + 0.4, 4.3 * down), squeeze=False)
    for axis, task in zip(axes.flat, tasks, strict=False):
        _draw_task(axis, question, task, [result for result in results if result.task == task])
    for axis in axes.flat[len(tasks) :]:
        axis.remove()
    for row in axes:
        row[0].set_ylabel(question.y)
    figure.suptitle(question.title, fontsize=11, wrap=True)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def _draw_task(axis: Axes, question: Question, task: str, results: Sequence[Result]) -> None:
    variants = [variant for variant in question.tasks[task] if any(result.variant == variant for result in results)]
    for variant, colour, style in zip(variants, COLOURS, cycle(STYLES), strict=False):
        chosen = [result for result in results if result.variant == variant]
        summaries, seeds = summarize(chosen), len({result.seed for result in chosen})
        xs = [summary.x for summary in summaries]
        means, label = [summary.mean for summary in summaries], f"{variant} ({seeds} seeds)"
        axis.plot(xs, means, color=colour, linestyle=style, linewidth=1.6, label=label)
        axis.fill_between(
            xs, [s.low for s in summaries], [s.high for s in summaries], color=colour, alpha=0.18, linewidth=0
        )
    axis.set_title(task, fontsize=10)
    axis.set_xlabel(question.x)
    if question.log_x:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
    if question.log_y:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.2))  # where no line is
