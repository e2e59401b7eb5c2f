"""Draws who waits, what is dropped and which lengths that favours, from what the simulation of ages wrote.

python -m benchmarks staleness_sim --json build/staleness_sim.json
python docs/figures/staleness.py build/staleness_sim.json --to docs/figures/staleness.png

These two commands make docs/figures/staleness.png.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib import rc_context
from matplotlib.figure import Figure

from torchreplay.plots import LIGHT, style

BOUNDS = {
    "torchreplay": ("Admission and Fifo(max_age=)", LIGHT.main),
    "admission alone": ("Admission alone", LIGHT.muted),
    "dropping": ("Fifo(max_age=) alone", LIGHT.other),
}
QUANTITIES = {
    "learner waits, %": "Learner waits, % of the time",
    "generators wait, %": "Generators wait, % of the time",
    "dropped, %": "Dropped for their age, %",
    "beyond max_age, %": "Learned from too old, %",
}
ROWS = {"1": "learner as fast as generators", "2": "learner half as fast"}


@dataclass
class Args:
    """Draws the simulation of ages."""

    file: tyro.conf.Positional[Path]
    """what `python -m benchmarks staleness_sim --json` wrote"""
    to: Path
    """file for the picture"""


def main(args: Args) -> None:
    """Draws a row of panels for each speed of the learner."""
    lines = {line["name"]: line["candidates"] for line in json.loads(args.file.read_text())["lines"]}
    ages = [0, 1, 2, 4]
    with rc_context(style(LIGHT)):
        figure = Figure(figsize=(13, 6.6), dpi=110, layout="constrained")
        grid = figure.subplots(len(ROWS), len(QUANTITIES), sharey="col")
        for axes, title in zip(grid[0], QUANTITIES.values(), strict=True):
            axes.set_title(title, fontsize=11)
        for row, (load, speed) in zip(grid, ROWS.items(), strict=True):
            for axes, quantity in zip(row, QUANTITIES, strict=True):
                for place, (bound, (name, color)) in enumerate(BOUNDS.items()):
                    heights = [lines[f"load {load}, max_age {age}: {quantity}"][bound]["median"] for age in ages]
                    axes.bar([x + 0.27 * (place - 1) for x in range(len(ages))], heights, 0.25, color=color, label=name)
                axes.set_xticks(range(len(ages)), [str(age) for age in ages])
                axes.grid(axis="x", visible=False)
                axes.set_xlabel("max_age")
            row[0].set_ylabel(speed, fontsize=10)
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(args.to)


if __name__ == "__main__":
    main(tyro.cli(Args))
