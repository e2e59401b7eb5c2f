"""GRPO over a queue, over `multiprocessing.Queue` and over a Ray actor with a list: the same program but for that."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.child import ChildError, run_module
from benchmarks.line import OURS, Line
from benchmarks.plan import Plan

PEERS = {OURS: "torchreplay", "multiprocessing.Queue": "", "Ray actor": "ray"}
"""What carries the rollouts, and the package that it needs."""
LIMIT, KILL_LIMIT = 90.0, 60.0
"""Seconds of a start and an end, and of a death: who hangs is waited for."""
MEGABYTE = 1e6

Figures = dict[str, float]


def measure_rollouts(plan: Plan) -> Iterator[Line]:
    """Yields rollouts a second and resident memory, and what deaths have cost."""
    peers = [name for name, package in PEERS.items() if not package or find_spec(package)]
    rounds = [{name: _run(name, {"seconds": plan.contest_seconds}) for name in peers} for _ in range(3)]
    rates = {name: [figures[name].get("rollouts", 0.0) for figures in rounds] for name in peers}
    yield Line("rollouts", "learned from", "/s", rates, higher_is_better=True)
    memory = {name: [figures[name].get("memory", 0.0) / MEGABYTE for figures in rounds] for name in peers}
    yield Line("rollouts", "resident memory", "MB", memory)
    deaths = {name: _run(name, {"kills": plan.kills}, plan.kills * KILL_LIMIT) for name in peers}
    for what, name in {"lost": "lost", "again": "learned from again", "hung": "somebody hangs"}.items():
        samples = {peer: [float(figures.get(what, 0))] for peer, figures in deaths.items() if figures}
        note = f"in {plan.kills} deaths, or until somebody hangs"
        yield Line("rollouts", name, "", samples, note=note)


def _run(peer: str, options: Figures, longer: float = 0.0) -> Figures:
    try:
        figures: Figures = run_module("benchmarks.rollouts", {"peer": peer, **options}, LIMIT + longer)
    except ChildError as error:
        print(f"rollouts: a round of {peer} failed: {error}", file=sys.stderr)
        return {}
    return figures
