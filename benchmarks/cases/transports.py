"""What may carry batches from other nodes' shards, side by side."""

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.child import run_module
from benchmarks.line import Line
from benchmarks.plan import Plan

START = 120.0
"""Seconds that a cluster and the other processes may take to start and to end."""


def measure_transports(plan: Plan) -> Iterator[Line]:
    """Yields the batches a second that each brings from another process, where Ray is installed."""
    if find_spec("ray") is None:
        return
    options = {"rounds": plan.contest_rounds, "seconds": plan.contest_seconds / 4}
    lines: dict[str, dict[str, list[float]]] = run_module(
        "benchmarks.transports", options, START + 10 * plan.contest_rounds * plan.contest_seconds
    )
    note = "between two processes of this machine, one batch at a time, nothing drawn; for Ray on two of its nodes"
    for name, samples in lines.items():
        yield Line("transports", name, "/s", samples, higher_is_better=True, note=note)
