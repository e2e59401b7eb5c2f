"""Rows of any length: rollouts from one process to another, and values of few bytes."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import torchreplay as tr
from benchmarks.child import ChildError, run_module
from benchmarks.line import OURS, Line
from benchmarks.plan import Plan
from torchreplay.checking.timing import Candidate, interleave

ROLLOUTS = 256
PEERS = {OURS: "torchreplay", "Ray actor": "ray", "multiprocessing.Queue": "", "TransferQueue": "transfer_queue"}
"""What carries the rollouts, and the package that it needs."""
EQUALS = {"RAY_worker_niceness": "0"}
LIMIT = 180.0
GIGABYTE = 1e9
SMALL_CAPACITY, SMALL_ROWS, MOST_BYTES = 100_000, 256, 64
FIXED = "fixed rows of 64 bytes"

Figures = dict[str, float | None]


def measure_ragged(plan: Plan) -> Iterator[Line]:
    """Yields the lines of rollouts, and then those of small values."""
    rounds = [{name: _round(plan, name) for name in _installed()} for _ in range(plan.contest_rounds)]
    yield _line(rounds, "memory", "memory, in payloads", "", 1, higher_is_better=False)
    for what in ("put", "get"):
        yield _line(rounds, what, f"rollouts: {what}", "GB/s", GIGABYTE)
    yield _line(rounds, "together", "rollouts: put and get", "GB/s", GIGABYTE)
    ours = [figures[OURS] for figures in rounds]
    shares = [2 * _rate(one, "together") / (_rate(one, "memcpy") or 1) for one in ours]  # each byte is copied twice
    yield Line("ragged", "... of two copies by memcpy", "", {OURS: shares}, higher_is_better=True)
    yield from _small(plan)


def _installed() -> list[str]:
    return [name for name, package in PEERS.items() if not package or find_spec(package)]


def _round(plan: Plan, peer: str) -> Figures:
    options = {"peer": peer, "rollouts": ROLLOUTS, "seconds": plan.contest_seconds}
    try:
        figures: Figures = run_module("benchmarks.ragged_traffic", options, LIMIT + plan.contest_seconds, EQUALS)
    except ChildError:
        return {}
    return figures


def _line(
    rounds: list[dict[str, Figures]], what: str, name: str, unit: str, divisor: float, higher_is_better: bool = True
) -> Line:
    """Leaves candidates out that have no such figure. A round that failed has done nothing."""
    failed = 0 if higher_is_better else None
    samples = {
        peer: [_rate(figures[peer], what) / divisor for figures in rounds]
        for peer in rounds[0]
        if not any(figures[peer].get(what, failed) is None for figures in rounds)
    }
    return Line("ragged", name, unit, samples, higher_is_better)


def _rate(figures: Figures, what: str) -> float:
    return figures.get(what) or 0.0


def _small(plan: Plan) -> Iterator[Line]:
    """Values of 0 to 64 bytes, beside rows of one field of 64 bytes, in a buffer that has no pages at all."""
    capacity = plan.capacity(SMALL_CAPACITY)
    lengths = np.random.default_rng(0).integers(0, MOST_BYTES + 1, SMALL_ROWS)
    values, fixed = np.ones(lengths.sum(), np.uint8), np.ones((SMALL_ROWS, MOST_BYTES), np.uint8)
    ends = np.cumsum(lengths).tolist()
    sources = {
        OURS: Source(
            tr.ReplayBuffer({"x": tr.Ragged(torch.uint8)}, capacity, ragged_bytes=capacity * MOST_BYTES),
            (values, lengths),
            [values[a:b] for a, b in pairwise([0, *ends])],
        ),
        FIXED: Source(tr.ReplayBuffer({"x": tr.Field(MOST_BYTES, torch.uint8)}, capacity), fixed, list(fixed)),
    }
    for source in sources.values():
        source.extend(capacity // SMALL_ROWS + 1)
        source.sample(1)
    for what, work in WORKS.items():
        candidates = [Candidate(name, partial(work, source)) for name, source in sources.items()]
        seconds = interleave(candidates, plan.rounds, plan.seconds)
        rates = {name: [SMALL_ROWS / value for value in times] for name, times in seconds.items()}
        yield Line("ragged", f"0 to {MOST_BYTES} bytes: {what}", "rows/s", rates, higher_is_better=True)
    held = {name: [source.buffer.nbytes / capacity] for name, source in sources.items()}
    yield Line("ragged", f"0 to {MOST_BYTES} bytes: reserved a row", "bytes", held)
    for source in sources.values():
        source.buffer.close()


class Source:
    """A buffer with what is written into it, 256 rows at a time.

    Args:
        buffer: It has one field, `x`.
        rows: For `extend`.
        singles: The same, for `append`.
    """

    def __init__(self, buffer: tr.ReplayBuffer, rows: Any, singles: list[Any]) -> None:
        self.buffer, self._rows, self._singles = buffer, rows, singles
        self._writer = buffer.writer()

    def append(self, n: int) -> None:
        """Appends all rows `n` times."""
        for _ in range(n):
            for value in self._singles:
                self._writer.append(x=value)

    def extend(self, n: int) -> None:
        """Writes them at once `n` times."""
        for _ in range(n):
            self._writer.extend(x=self._rows)

    def sample(self, n: int) -> None:
        """Draws as many rows `n` times."""
        for _ in range(n):
            self.buffer.sample(SMALL_ROWS)


WORKS: dict[str, Callable[[Source, int], None]] = {
    "append": Source.append,
    f"extend by {SMALL_ROWS}": Source.extend,
    f"sample {SMALL_ROWS}": Source.sample,
}
