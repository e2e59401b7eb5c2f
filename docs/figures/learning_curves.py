"""Draws learning curves from the lines that examples print: one curve for each file, named after it.

    python examples/r2d2.py --total-steps 1000 --eval-every 50 --solved-at 2 > lstm.jsonl
    python examples/r2d2.py --total-steps 1000 --eval-every 50 --solved-at 2 --network feedforward > feedforward.jsonl
    python docs/figures/learning_curves.py lstm.jsonl feedforward.jsonl --to docs/r2d2.png --title "R2D2 on a T-maze" \
        --bound 0 --bound-name "best without memory"

These three commands make docs/r2d2.png.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib import rc_context
from matplotlib.figure import Figure

from torchreplay.plots import LIGHT, style

COLORS = (LIGHT.main, LIGHT.other, LIGHT.alarm, LIGHT.muted, "#16a34a")


@dataclass
class Args:
    """Draws the mean returns of one or several runs over learner steps."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """what runs have printed: JSON lines with step and mean_return; at most five"""
    to: Path
    """file for the picture"""
    title: str = ""
    """of the picture"""
    bound: float | None = None
    """a return to mark"""
    bound_name: str = "bound"
    """what it is called"""


def main(args: Args) -> None:
    """Draws the curves."""
    with rc_context(style(LIGHT)):
        figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
        axes = figure.subplots()
        axes.set(title=args.title, xlabel="learner step", ylabel="mean return of a greedy episode")
        if args.bound is not None:
            axes.axhline(args.bound, color=LIGHT.ink, linestyle="--", linewidth=1.2, label=args.bound_name, zorder=3)
        for path, color in zip(args.files, COLORS, strict=False):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            steps, returns = [line["step"] for line in lines], [line["mean_return"] for line in lines]
            axes.plot(steps, returns, color=color, marker="o", markersize=4, label=path.stem)
        axes.set_xlim(left=0)
        figure.legend(loc="outside lower center", ncols=6, fontsize=8.5)
        figure.savefig(args.to)


if __name__ == "__main__":
    main(tyro.cli(Args))
