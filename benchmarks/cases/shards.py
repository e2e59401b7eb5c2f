"""A replay buffer over several nodes: beside single buffers, a bare socket, and what Ray lets through."""

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.child import run_module
from benchmarks.line import Line
from benchmarks.plan import Plan

START = 240.0
"""Seconds that a cluster, its shards and its learners may take to start, fill and end."""
NOTE = "all nodes lie on this machine, so that what would cross a network is copied by the same cores"
WINDOW = 1 / 8
"""Of the contest's seconds: what one way to draw is measured for in a round, of which there are many."""


def measure_shards(plan: Plan) -> Iterator[Line]:
    """Yields the lines, where Ray is installed."""
    if find_spec("ray") is None:
        return
    yield from _lines("shard_places", plan, WINDOW)
    yield from _lines("shared_limit", plan, WINDOW, "a limiter of all nodes, two learners, 64: ")
    yield from _lines("shards", plan, 1 / 2)


def _lines(module: str, plan: Plan, share: float, prefix: str = "") -> Iterator[Line]:
    options = {"rounds": plan.contest_rounds, "seconds": share * plan.contest_seconds}
    limit = START + 50 * plan.contest_rounds * plan.contest_seconds
    lines: dict[str, dict[str, list[float]]] = run_module(f"benchmarks.{module}", options, limit)
    for place, (name, samples) in enumerate(lines.items()):
        is_rate, note = " asks " not in name, "" if place else NOTE
        yield Line("shards", prefix + name, "/s" if is_rate else "%", samples, higher_is_better=is_rate, note=note)
