"""Explorers that outrun a learner, torchreplay beside cpprb's shared buffer."""

from collections.abc import Iterator

from benchmarks.child import ChildError, run_module
from benchmarks.line import OURS, Line
from benchmarks.overload import SMALL_RING
from benchmarks.peers.registry import SHARED, installed
from benchmarks.plan import Plan
from benchmarks.workload import SMALL

EXPLORERS = (1, 2, 4, 16)
ARRANGEMENTS = {
    "16, small ring": ("rows", SMALL_RING),
    "16, two learners": ("two learners", SMALL.capacity),
    "16, SamplesPerInsert": ("ratio", SMALL.capacity),
    "16, episodes": ("episodes", SMALL.capacity),
    "16, vector writers": ("vector", SMALL.capacity),
}
"""Of torchreplay alone: arrangement and capacity."""
BATCH_SIZE = 512
LIMIT = 60.0
NOTHING_DONE = {"batches": 0.0, "rows": 0.0, "worst": 1e3 * LIMIT, "stale": 100.0}


def measure_overload(plan: Plan) -> Iterator[Line]:
    """Yields batches and rows a second, the longest batch and the share of late feedback.

    A round that fails or hangs counts as nothing done.
    """
    peers = [name for name in SHARED if name in installed()]
    for explorers in EXPLORERS:
        capacity = plan.capacity(SMALL.capacity)
        rounds = [{name: _round(plan, name, explorers, "rows", capacity) for name in peers} for _ in _rounds(plan)]
        yield from _lines(f"{explorers}", rounds)
    for wording, (arrangement, capacity) in ARRANGEMENTS.items():
        rounds = [{OURS: _round(plan, OURS, 16, arrangement, plan.capacity(capacity))} for _ in _rounds(plan)]
        yield from _lines(wording, rounds)


def _rounds(plan: Plan) -> range:
    return range(plan.contest_rounds)


def _round(plan: Plan, peer: str, explorers: int, arrangement: str, capacity: int) -> dict[str, float]:
    options = {
        "peer": peer,
        "explorers": explorers,
        "arrangement": arrangement,
        "batch_size": BATCH_SIZE,
        "capacity": capacity,
        "seconds": plan.contest_seconds,
    }
    try:
        figures: dict[str, float] = run_module("benchmarks.overload", options, LIMIT + plan.contest_seconds)
    except ChildError:
        return NOTHING_DONE
    return figures


def _lines(explorers: str, rounds: list[dict[str, dict[str, float]]]) -> Iterator[Line]:
    for quantity, unit in (("batches", "/s"), ("rows", "/s"), ("worst", "ms"), ("stale", "%")):
        samples = {
            name: [figures[name][quantity] for figures in rounds]
            for name in rounds[0]
            if min(figures[name][quantity] for figures in rounds) >= 0
        }
        yield Line("overload", f"{explorers}: {quantity}", unit, samples, higher_is_better=unit == "/s")
