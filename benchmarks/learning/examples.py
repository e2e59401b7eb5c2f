"""Examples as cells: each run is `python examples/NAME.py` with flags, a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.learning.cell import Point

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEVER = "2"
"""More than a mean return of 1 or a share of 1: so that a run is as long as the others."""


def play(seed: int, name: str, flags: tuple[str, ...], x: str, y: str) -> Iterable[Point]:
    """Runs an example, and yields what it prints.

    Args:
        seed: Of the run.
        name: Of the example.
        flags: Its other flags.
        x: The entry of a line of its that is the point's x.
        y: And the one that is its y. The point's seconds contain the evaluations.

    Raises:
        RuntimeError: The program failed.
    """
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--seed", str(seed), "--solved-at", NEVER]
    done = subprocess.run([*command, "--no-tensorboard", *flags], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name}.py {' '.join(flags)} ended with {done.returncode}: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [Point(line[x], line[y], line["seconds"]) for line in lines]
