"""Explorers or learners killed at random instants: ``python -m benchmarks.kills --peer NAME``, a process of its own.

In every trial a process writes a new buffer, or draws from it, in a loop, and is killed. Then two others try to go on:
an explorer that appends, and a learner that samples and feeds back. One that does not end in time hangs. It prints one
JSON object with the hangs of both.
"""

import argparse
import itertools
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawValue
from typing import Any

from benchmarks.peers import PrioritizedPeer, SharedPeer
from benchmarks.peers.registry import SHARED
from benchmarks.workload import SMALL

CAPACITY = 4096
BATCH_SIZE = 64
POOL = 64
CALLS = 3
"""Calls after which one that goes on is believed to be able to."""
EARLIEST, LATEST = 0.005, 0.03
"""Seconds of work before the kill."""
VICTIMS = ("explorer", "learner")

Work = Callable[[SharedPeer, Iterable[int], Any], None]
"""Makes a call for each number, and sets the shared counter to the number of those made."""


@dataclass(frozen=True)
class Kills:
    """Settings: the buffer, the kind and number of kills, and the seconds after which a survivor hangs."""

    peer: str
    victim: str
    trials: int
    limit: float
    seed: int


def run(kills: Kills) -> dict[str, int]:
    """Returns how often another explorer and a learner hung."""
    chance = random.Random(kills.seed)
    counts: Counter[str] = Counter()
    for _ in range(kills.trials):
        peer = SHARED[kills.peer](SMALL, CAPACITY)
        peer.fill()
        _kill_at_work(WORK[kills.victim], peer, chance.uniform(EARLIEST, LATEST))
        for name in VICTIMS:
            counts[name] += hangs(WORK[name], peer, kills.limit)
        peer.close()
    return {name: counts[name] for name in VICTIMS}


def _explore(peer: SharedPeer, calls: Iterable[int], done: Any) -> None:
    append, _ = peer.writers()
    rows = SMALL.single_rows(POOL)
    for call in calls:
        obs, action, reward, next_obs, last = rows[call % POOL]
        append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=last)
        done.value = call + 1


def _learn(peer: PrioritizedPeer, calls: Iterable[int], done: Any) -> None:
    td = peer.td(BATCH_SIZE, 0)
    for call in calls:
        peer.update(peer.sample(BATCH_SIZE), td)
        done.value = call + 1


WORK: Mapping[str, Work] = {"explorer": _explore, "learner": _learn}


def _kill_at_work(work: Work, peer: SharedPeer, seconds: float) -> None:
    victim, done = _start(work, peer, itertools.count())
    while not done.value and victim.is_alive():
        time.sleep(0.001)
    if not victim.is_alive():
        raise RuntimeError(f"{work.__name__} failed before it could be killed")
    time.sleep(seconds)
    victim.kill()
    victim.join()


def hangs(work: Work, peer: SharedPeer, limit: float) -> bool:
    """Returns whether a process that makes a few calls does not end in time.

    Raises:
        RuntimeError: It ended before it had made them.
    """
    survivor, done = _start(work, peer, range(CALLS))
    survivor.join(timeout=limit)
    if survivor.is_alive():
        survivor.kill()
        survivor.join()
        return True
    if done.value != CALLS:
        raise RuntimeError(f"{work.__name__} failed after {done.value} calls: that is no hang")
    return False


def _start(work: Work, peer: SharedPeer, calls: Iterable[int]) -> tuple[BaseProcess, Any]:
    done = RawValue("q", 0)
    process = get_context("fork").Process(target=_run_and_leave, args=(work, peer, calls, done), daemon=True)
    process.start()
    return process, done


def _run_and_leave(work: Work, peer: SharedPeer, calls: Iterable[int], done: Any) -> None:
    """Ends without finalisers: a peer's own could wait for the dead, and it is the calls that are asked about."""
    try:
        work(peer, calls, done)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _parse(arguments: Sequence[str] | None = None) -> Kills:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--peer", required=True, choices=list(SHARED))
    parser.add_argument("--victim", choices=VICTIMS, default="explorer")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--limit", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    return Kills(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    print(json.dumps(run(_parse())))
