"""A remote writer: rows that cross from one node of a Ray cluster to another."""

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.child import run_module
from benchmarks.line import Line
from benchmarks.plan import Plan

START = 240.0
"""Seconds that a cluster and its workers may take to start and to end."""
UNITS = {"small rows": "/s", "Atari rows": "B/s"}


def measure_remote(plan: Plan) -> Iterator[Line]:
    """Yields the rows of small workloads a second, and the bytes of Atari rows beside those of the object store."""
    if find_spec("ray") is None:
        return
    options = {"rounds": plan.contest_rounds, "seconds": plan.contest_seconds, "shrink": plan.shrink}
    limit = START + 10 * plan.contest_rounds * plan.contest_seconds
    lines: dict[str, dict[str, list[float]]] = run_module("benchmarks.remote", options, limit)
    for name, samples in lines.items():
        yield Line("remote", name, UNITS[name], samples, higher_is_better=True)
