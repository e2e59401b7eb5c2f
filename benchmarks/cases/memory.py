"""Resident memory a row, each buffer in a fresh process."""

from collections.abc import Iterator

from benchmarks.child import run_module
from benchmarks.episodes import FRAMES
from benchmarks.line import OURS, Line
from benchmarks.peers.registry import installed
from benchmarks.plan import Plan
from benchmarks.workload import ATARI, SMALL, Workload

CAPACITIES = ((SMALL, 1_000_000), (ATARI, 8_192))
LIMIT = 120.0
PROMPT_RELEASE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Freed arrays go back to the system at once, so that resident memory is what the buffer holds."""


def measure_memory(plan: Plan) -> Iterator[Line]:
    """Yields bytes a row; one sample, as memory has no noise worth rounds."""
    for workload, full in CAPACITIES:
        samples = {peer: _footprint(peer, workload, plan.capacity(full)) for peer in installed()}
        yield Line("memory", f"{workload.name}, {workload.row_bytes:,} of values", "B/row", samples)
    samples = {OURS: _footprint(OURS, FRAMES, plan.capacity(FRAMES.capacity))}
    yield Line("memory", "frames, stored once", "B/row", samples)


def _footprint(peer: str, workload: Workload, capacity: int) -> list[float]:
    options = {"peer": peer, "workload": workload.name, "capacity": capacity}
    return [float(run_module("benchmarks.footprint", options, LIMIT, PROMPT_RELEASE))]
