"""Draws the success rates that examples/her.py prints, with hindsight and without: a curve for each run.

    for seed in 0 1 2; do for flag in --hindsight --no-hindsight; do
        python examples/her.py --seed $seed $flag --solved-at 2 --no-tensorboard
    done; done > her.jsonl
    python docs/figures/hindsight_curves.py her.jsonl docs/her.png

These commands make docs/her.png. They take about an hour of one core.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib import rc_context
from matplotlib.figure import Figure

from torchreplay.plots import LIGHT, style


@dataclass
class Args:
    """Draws the share of greedy episodes that end at the target, over observations written."""

    lines: tyro.conf.Positional[Path]
    """what runs have printed, one after another"""
    to: tyro.conf.Positional[Path]
    """file for the picture"""


def main(args: Args) -> None:
    """Draws the curves."""
    runs = defaultdict(list)
    for line in map(json.loads, args.lines.read_text().splitlines()):
        runs[line["hindsight"], line["seed"]].append((line["rows"], line["success_rate"]))
    labels = {True: "with hindsight", False: "without"}
    with rc_context(style(LIGHT)):
        figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
        axes = figure.subplots()
        axes.set(title="DDPG on Reacher-v5, told only whether it is at the target", xlabel="observations written")
        axes.set(ylabel="greedy episodes that end at the target", ylim=(-0.02, 1.02))
        for (hindsight, _), points in sorted(runs.items(), reverse=True):
            color = LIGHT.main if hindsight else LIGHT.other
            label = labels.pop(hindsight, "_the same again")
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.6, marker="o", markersize=3, label=label)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlim(left=0)
        axes.legend(loc="center right")
        figure.savefig(args.to)


if __name__ == "__main__":
    main(tyro.cli(Args))
