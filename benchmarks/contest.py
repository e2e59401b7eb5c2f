"""One round of explorers against a learner: ``python -m benchmarks.contest --peer NAME ...``, a process of its own.

It prints one JSON object. The caller gives it a time limit and kills the whole group when it is exceeded, because a
peer may block for ever.
"""

import argparse
import ctypes
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

from benchmarks.peers import PrioritizedPeer, SharedPeer
from benchmarks.peers.registry import SHARED
from benchmarks.workload import SMALL

POOL = 64
"""Prepared rows or chunks an explorer cycles through, and rows between two looks at the clock and the counter."""
CACHE_LINE = 8
"""int64 counters apart, so that explorers do not share a cache line for the harness's sake."""
WARM_UP = 0.5


@dataclass(frozen=True)
class Contest:
    """Settings of a round: explorers, rows a call (1: ``append``), batch size, capacity and measured seconds."""

    peer: str
    explorers: int
    chunk: int
    batch_size: int
    capacity: int
    seconds: float


def run(contest: Contest) -> dict[str, float]:
    """Runs explorers flat out beside a learner that samples and feeds back in a loop.

    Returns:
        ``batches`` and ``rows`` per second over the same seconds.
    """
    peer = SHARED[contest.peer](SMALL, contest.capacity)
    peer.fill()
    written, finish = RawArray(ctypes.c_int64, contest.explorers * CACHE_LINE), RawValue(ctypes.c_bool, False)
    fork = get_context("fork")
    explorers = [
        fork.Process(target=_explore, args=(peer, contest.chunk, k, written, finish), daemon=True)
        for k in range(contest.explorers)
    ]
    for explorer in explorers:
        explorer.start()
    try:
        return _learn(peer, contest, written)
    finally:
        finish.value = True
        for explorer in explorers:
            explorer.join(timeout=5)
            if explorer.is_alive():
                explorer.kill()


def _learn(peer: PrioritizedPeer, contest: Contest, written: Any) -> dict[str, float]:
    """Samples and updates until the time is over, after a warm-up in which every explorer has begun to write."""
    tds = [peer.td(contest.batch_size, seed) for seed in range(POOL)]
    _loop(peer, contest.batch_size, tds, lambda: not all(written[::CACHE_LINE]))
    warm = time.perf_counter() + WARM_UP
    _loop(peer, contest.batch_size, tds, lambda: time.perf_counter() < warm)
    rows, start = sum(written), time.perf_counter()
    batches = _loop(peer, contest.batch_size, tds, lambda: time.perf_counter() < start + contest.seconds)
    seconds = time.perf_counter() - start
    return {"batches": batches / seconds, "rows": (sum(written) - rows) / seconds}


def _loop(peer: PrioritizedPeer, batch_size: int, tds: Sequence[Any], unfinished: Callable[[], bool]) -> int:
    batches = 0
    while unfinished():
        peer.update(peer.sample(batch_size), tds[batches % POOL])
        batches += 1
    return batches


def _explore(peer: SharedPeer, chunk: int, index: int, written: Any, finish: Any) -> None:
    """Writes until it is stopped; counts the rows where the learner can see them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    append, extend = peer.writers()
    if chunk == 1:
        rows = SMALL.single_rows(POOL, seed=index)
        while not finish.value:
            for obs, action, reward, next_obs, done in rows:
                append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)
            written[index * CACHE_LINE] += POOL
        return
    chunks = [SMALL.rows(chunk, seed) for seed in range(POOL)]
    while not finish.value:
        for rows_of_chunk in chunks:
            extend(**rows_of_chunk)
            written[index * CACHE_LINE] += chunk


def _parse() -> Contest:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contest", description=__doc__)
    parser.add_argument("--peer", required=True, choices=list(SHARED))
    parser.add_argument("--explorers", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--capacity", type=int, default=SMALL.capacity)
    parser.add_argument("--seconds", type=float, default=2.0)
    return Contest(**vars(parser.parse_args()))


if __name__ == "__main__":
    print(json.dumps(run(_parse())))
