"""Explorers that outrun a learner: ``python -m benchmarks.overload --peer NAME ...``, a process of its own.

It prints one JSON object. The caller gives it a time limit and kills the whole group when it is exceeded.
"""

import argparse
import ctypes
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

import torchreplay as tr
from benchmarks.contest import CACHE_LINE, POOL, WARM_UP
from benchmarks.episodes import block, linked_buffer
from benchmarks.line import OURS
from benchmarks.peers.registry import SHARED
from benchmarks.peers.torchreplay import row_spec
from benchmarks.workload import SMALL, td_errors

CHUNK = 50
"""Rows a call."""
LANES = 10
"""Environments of a vector writer, and of an episode block: five steps make a chunk."""
SMALL_RING = 10_000

Write = Callable[[], object]
"""Writes one chunk."""


@dataclass(frozen=True)
class Overload:
    """Settings of a round."""

    peer: str
    explorers: int
    arrangement: str
    batch_size: int
    capacity: int
    seconds: float


class RowsTarget:
    """Explorers call ``extend`` with rows by themselves."""

    def __init__(self, overload: Overload) -> None:
        self.peer = SHARED[overload.peer](SMALL, overload.capacity)
        self.peer.fill()
        self.sample, self.update = self.peer.sample, self.peer.update

    def writer(self, seed: int) -> Write:
        _, extend = self.peer.writers()
        rows = SMALL.rows(CHUNK, seed)
        return lambda: extend(**rows)

    def stats(self) -> Any:
        return self.peer.buffer.stats() if self.peer.name == OURS else None  # type: ignore[attr-defined]


class BufferTarget:
    """A torchreplay buffer of another kind."""

    def __init__(self, buffer: tr.ReplayBuffer, make_writer: Callable[[tr.ReplayBuffer, int], Write]) -> None:
        self.buffer, self._make_writer = buffer, make_writer
        self.sample, self.update, self.stats = buffer.sample, buffer.update_priorities, buffer.stats

    def writer(self, seed: int) -> Write:
        return self._make_writer(self.buffer, seed)


def _extend_rows(buffer: tr.ReplayBuffer, seed: int) -> Write:
    rows = SMALL.rows(CHUNK, seed)
    return lambda: buffer.extend(**rows)


def _extend_episodes(buffer: tr.ReplayBuffer, seed: int) -> Write:
    episode = block(SMALL, CHUNK - 1, seed=seed)
    return lambda: buffer.extend(**episode)


def _step_vector(buffer: tr.ReplayBuffer, seed: int) -> Write:
    writer = buffer.writer(num_envs=LANES)
    steps = block(SMALL, CHUNK // LANES, (LANES,), seed)
    writer.reset(obs=steps["obs"][0])
    going_on = steps["truncated"][0]
    obs, action, reward = steps["obs"][0], steps["action"][0], steps["reward"][0]

    def write() -> None:
        for _ in range(CHUNK // LANES):
            writer.step(obs=obs, action=action, reward=reward, terminated=going_on, truncated=going_on)

    return write


def _ratio_target(overload: Overload) -> BufferTarget:
    limiter = tr.SamplesPerInsert(0.01, min_size=1000)
    sampler = tr.Prioritized(alpha=0.6, beta=0.4)
    buffer = tr.ReplayBuffer(row_spec(SMALL), overload.capacity, sampler=sampler, limiter=limiter, seed=0)
    return BufferTarget(buffer, _extend_rows)


def _linked_target(overload: Overload, write: Callable[[tr.ReplayBuffer, int], Write]) -> BufferTarget:
    return BufferTarget(linked_buffer(SMALL, overload.capacity, tr.Transitions(n_step=3)), write)


ARRANGEMENTS: dict[str, Callable[[Overload], Any]] = {
    "rows": RowsTarget,
    "two learners": RowsTarget,
    "ratio": _ratio_target,
    "episodes": lambda overload: _linked_target(overload, _extend_episodes),
    "vector": lambda overload: _linked_target(overload, _step_vector),
}


def run(overload: Overload) -> dict[str, float]:
    """Runs explorers flat out beside a learner that samples and feeds back in a loop.

    Returns:
        ``batches`` and ``rows`` per second; ``worst``, the longest sample and feedback in ms; ``stale``, the percentage
        of TD errors that came too late, -1 where it is not known.
    """
    target = ARRANGEMENTS[overload.arrangement](overload)
    written, finish = RawArray(ctypes.c_int64, overload.explorers * CACHE_LINE), RawValue(ctypes.c_bool, False)
    fork = get_context("fork")
    children = [
        fork.Process(target=_explore, args=(target, k, written, finish), daemon=True) for k in range(overload.explorers)
    ]
    if overload.arrangement == "two learners":
        children.append(fork.Process(target=_learn_until, args=(target, overload, lambda: finish.value), daemon=True))
    for child in children:
        child.start()
    try:
        return _measure(target, overload, written)
    finally:
        finish.value = True
        deadline = time.perf_counter() + 2
        for child in children:
            child.join(timeout=max(0.0, deadline - time.perf_counter()))
            if child.is_alive():  # it waits for the limiter, and nobody draws any more
                child.kill()


def _measure(target: Any, overload: Overload, written: Any) -> dict[str, float]:
    warm_at = time.perf_counter() + 10 * WARM_UP
    _learn_until(target, overload, lambda: all(written[::CACHE_LINE]) or time.perf_counter() >= warm_at)
    warm = time.perf_counter() + WARM_UP
    _learn_until(target, overload, lambda: time.perf_counter() >= warm)
    before, rows, start = target.stats(), sum(written), time.perf_counter()
    times = _learn_until(target, overload, lambda: time.perf_counter() >= start + overload.seconds)
    seconds = time.perf_counter() - start
    return {
        "batches": len(times) / seconds,
        "rows": (sum(written) - rows) / seconds,
        "worst": max(times) * 1e3,
        "stale": _stale_percentage(before, target.stats()),
    }


def _stale_percentage(before: Any, after: Any) -> float:
    if before is None:
        return -1.0
    stale: int = after.stale_updates - before.stale_updates
    updated: int = after.updated - before.updated
    return 100 * stale / max(1, stale + updated)


def _learn_until(target: Any, overload: Overload, over: Callable[[], bool]) -> list[float]:
    """Samples and feeds back; returns how long each batch took, in seconds."""
    tds = [td_errors(overload.batch_size, seed) for seed in range(POOL)]
    times: list[float] = []
    while not over():
        start = time.perf_counter()
        target.update(target.sample(overload.batch_size), tds[len(times) % POOL])
        times.append(time.perf_counter() - start)
    return times


def _explore(target: Any, index: int, written: Any, finish: Any) -> None:
    """Writes until it is stopped; counts the rows where the learner can see them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write = target.writer(index)
    while not finish.value:
        write()
        written[index * CACHE_LINE] += CHUNK


def _parse() -> Overload:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--peer", default=OURS, choices=list(SHARED))
    parser.add_argument("--explorers", type=int, default=16)
    parser.add_argument("--arrangement", default="rows", choices=list(ARRANGEMENTS))
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--capacity", type=int, default=SMALL.capacity)
    parser.add_argument("--seconds", type=float, default=2.0)
    return Overload(**vars(parser.parse_args()))


if __name__ == "__main__":
    print(json.dumps(run(_parse())))
