"""Interleaved timing: rounds alternate between the candidates."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

ATTEMPTS: Final = 5
"""Attempts at a round without preemption."""


@dataclass(frozen=True)
class Candidate:
    """One way to do the measured work.

    Attributes:
        name: Column of the table.
        run: Does the work `n` times in a loop of its own, so that no harness call lies between two repetitions.
        calls: Measured calls in one repetition of `run`.
    """

    name: str
    run: Callable[[int], None]
    calls: int = 1


def interleave(candidates: Sequence[Candidate], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Times the candidates in alternating rounds.

    The order within a round rotates, so that no candidate always follows the same other one. The garbage collector is
    off while a round is timed, as `timeit` does. A round in which the kernel took the processor away is repeated:
    it has timed somebody else's work.

    Args:
        candidates: What to time. Each is warmed up by the calibration of its number of repetitions.
        rounds: How many.
        seconds: Aimed length of one round of one candidate.

    Returns:
        For each candidate the seconds per call of each round, in the order of the rounds.
    """
    repetitions = [_calibrate(candidate, seconds) for candidate in candidates]
    samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for round_index in range(rounds):
        for k in range(len(candidates)):
            chosen = (round_index + k) % len(candidates)
            candidate, n = candidates[chosen], repetitions[chosen]
            samples[candidate.name].append(_undisturbed(candidate.run, n) / (n * candidate.calls))
    return samples


def _calibrate(candidate: Candidate, seconds: float) -> int:
    """Returns the repetitions that take about `seconds`, found by doubling."""
    n = 1
    while (elapsed := _timed(candidate.run, n)) < seconds / 4:
        n *= 2
    return max(1, round(n * seconds / min(elapsed, _timed(candidate.run, n))))


def _undisturbed(run: Callable[[int], None], n: int) -> float:
    """Returns the time of a round without preemption; of the quickest one when every attempt was disturbed."""
    best = float("inf")
    run(max(1, n // 2))  # the other candidates have filled the caches
    for _ in range(ATTEMPTS):
        before = _preemptions()
        best = min(best, elapsed := _timed(run, n))
        if _preemptions() == before:
            return elapsed
    return best


def _preemptions() -> int:
    """Returns how often the kernel has taken the processor from this thread; waits of its own do not count."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _timed(run: Callable[[int], None], n: int) -> float:
    enabled = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        run(n)
        return time.perf_counter() - start
    finally:
        if enabled:
            gc.enable()
