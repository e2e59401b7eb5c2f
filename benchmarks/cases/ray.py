"""On Ray: the shared buffer beside a replay buffer in an actor, and beside RLlib's prioritized one."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle, islice

import numpy as np
import torch

import torchreplay as tr
from benchmarks.child import run_module
from benchmarks.line import OURS, Line
from benchmarks.peers.rllib import EPISODE, RllibEpisodes
from benchmarks.plan import Plan
from benchmarks.workload import SMALL, td_errors
from torchreplay.checking.timing import Candidate, interleave

START = 120.0
"""Seconds that Ray may take to start and to end."""
SLOW_ROUNDS = 7
"""Rounds at most where a call takes a third of a second."""
BATCH_SIZE = 512
MILLISECONDS = 1e3
EQUALS = {"RAY_worker_niceness": "0"}
"""Otherwise whatever else runs on the machine comes before Ray's processes."""


def measure_ray(plan: Plan) -> Iterator[Line]:
    """Yields the lines for each peer that is installed."""
    if find_spec("ray") is None:
        return
    yield from _beside_an_actor(plan)
    yield _beside_plain_processes(plan)
    if find_spec("tree") is not None:
        yield from _beside_rllib(plan)


def _beside_an_actor(plan: Plan) -> Iterator[Line]:
    limit = START + 10 * plan.contest_rounds * plan.contest_seconds
    lines: dict[str, dict[str, list[float]]] = run_module("benchmarks.actor", _options(plan), limit)
    for name, samples in lines.items():
        yield Line("ray", name, "/s", samples, higher_is_better=True, note="the actor draws uniformly")


def _options(plan: Plan) -> dict[str, float]:
    return {
        "rounds": plan.contest_rounds,
        "seconds": plan.contest_seconds,
        "capacity": plan.capacity(SMALL.capacity),
    }


def _beside_plain_processes(plan: Plan) -> Line:
    limit = START + plan.contest_rounds * (START + 2 * plan.contest_seconds)
    samples: dict[str, list[float]] = run_module("benchmarks.pools", _options(plan), limit, EQUALS)
    return Line("ray", "rows, two explorers of a pool", "/s", samples, higher_is_better=True)


def _beside_rllib(plan: Plan) -> Iterator[Line]:
    capacity = plan.capacity(SMALL.capacity)
    theirs, ours = RllibEpisodes(capacity), _our_episodes(capacity)
    slow = replace(plan, rounds=min(plan.rounds, SLOW_ROUNDS))
    tds = [td_errors(BATCH_SIZE, seed) for seed in range(16)]

    def learn_theirs(n: int) -> None:
        for td in islice(cycle(tds), n):
            theirs.sample(BATCH_SIZE)
            theirs.update(td)

    def learn_ours(n: int) -> None:
        for td in islice(cycle(tds), n):
            ours.update_priorities(ours.sample(BATCH_SIZE), td)

    def add_theirs(n: int) -> None:
        for episode in theirs.episodes(n):
            theirs.add(episode)

    def add_ours(n: int) -> None:
        episode = _episode()
        for _ in range(n):
            ours.extend(**episode)

    for name, run_ours, run_theirs in (
        (f"sample + update {BATCH_SIZE} of {capacity:,}", learn_ours, learn_theirs),
        (f"an episode of {EPISODE} steps", add_ours, add_theirs),
    ):
        seconds = interleave([Candidate(OURS, run_ours), Candidate("RLlib", run_theirs)], slow.rounds, slow.seconds)
        yield Line("ray", name, "ms", {peer: [MILLISECONDS * s for s in values] for peer, values in seconds.items()})
    ours.close()


def _our_episodes(capacity: int) -> tr.ReplayBuffer:
    spec = {
        "obs": tr.Field(SMALL.shape),
        "action": tr.Field((), torch.int64),
        "reward": tr.Field(),
        "terminated": tr.Field((), torch.bool),
        "truncated": tr.Field((), torch.bool),
    }
    buffer = tr.ReplayBuffer(spec, capacity, view=tr.Transitions(), sampler=tr.Prioritized(), seed=0)
    episode = _episode()
    for _ in range(capacity // (EPISODE + 1) + 1):
        buffer.extend(**episode)
    return buffer


def _episode() -> dict[str, np.ndarray]:
    rows = SMALL.rows(EPISODE + 1)
    ends = np.arange(EPISODE) == EPISODE - 1
    return {
        "obs": rows["obs"],
        "action": rows["action"][:EPISODE],
        "reward": rows["reward"][:EPISODE],
        "terminated": ends,
        "truncated": np.zeros(EPISODE, bool),
    }
