"""A replay buffer over two nodes beside two single ones."""

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.child import run_module
from benchmarks.line import Line
from benchmarks.plan import Plan

START = 240.0
"""Seconds that a cluster, its shards and its learners may take to start, fill and end."""


def measure_shards(plan: Plan) -> Iterator[Line]:
    """Yields the lines, where Ray is installed."""
    if find_spec("ray") is None:
        return
    options = {"rounds": plan.contest_rounds, "seconds": plan.contest_seconds}
    limit = START + 10 * plan.contest_rounds * plan.contest_seconds
    lines: dict[str, dict[str, list[float]]] = run_module("benchmarks.shards", options, limit)
    note = "Atari rows; both nodes lie on this machine, so that what would cross a network is copied by the same cores"
    for name, samples in lines.items():
        yield Line("shards", name, "/s", samples, higher_is_better=True, note=note)
