"""Writing linked rows: steps, steps of several environments, whole episodes, and taking them in."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torchreplay as tr
from benchmarks.episodes import EPISODE, block, linked_buffer
from benchmarks.line import OURS, Line
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.workload import SMALL
from torchreplay.checking.timing import Candidate, interleave

MICROSECONDS, NANOSECONDS = 1e6, 1e9
POOL = 64
LANES = (8, 64)
FIELDS = ("obs", "action", "reward", "terminated", "truncated")
UNLINKED = "Rows()"

Writes = Callable[..., object]


def measure_steps(plan: Plan) -> Iterator[Line]:
    """Yields the time of a row, written in different ways, beside rows that are not linked."""
    capacity = plan.capacity(SMALL.capacity)
    linked = linked_buffer(SMALL, capacity, tr.Transitions(n_step=3))
    peer = TorchreplayPeer(SMALL, capacity)
    peer.fill()
    try:
        candidates = [_steps(linked.writer()), _appends(peer.append)]
        yield Line(
            "trajectories", "step", "us", _scaled(interleave(candidates, plan.rounds, plan.seconds), MICROSECONDS)
        )
        for num_envs in LANES:
            seconds = interleave([_lane_steps(linked.writer(num_envs=num_envs), num_envs)], plan.rounds, plan.seconds)
            yield Line("trajectories", f"step of {num_envs} environments, a row", "us", _scaled(seconds, MICROSECONDS))
        yield from _episodes(linked, peer.buffer, plan)
    finally:
        linked.close()
        peer.close()


def _steps(writer: tr.Writer) -> Candidate:
    """Episodes of 64 steps, with values as an environment gives them; the reset rows are counted as well."""
    rows = SMALL.single_rows(POOL)
    episode = [(obs, action, reward, k == POOL - 1) for k, (obs, action, reward, _, _) in enumerate(rows)]
    first, reset, step = episode[0][0], writer.reset, writer.step

    def run(n: int) -> None:
        for _ in range(n):
            reset(obs=first)
            for obs, action, reward, ended in episode:
                step(obs=obs, action=action, reward=reward, terminated=ended, truncated=False)

    return Candidate(OURS, run, calls=POOL + 1)


def _appends(append: Writes) -> Candidate:
    rows = SMALL.single_rows(POOL)

    def run(n: int) -> None:
        for _ in range(n):
            for obs, action, reward, next_obs, done in rows:
                append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

    return Candidate(UNLINKED, run, calls=POOL)


def _lane_steps(writer: tr.Writer, num_envs: int) -> Candidate:
    """Steps of a vector environment that resets itself in the step after an end."""
    rows = block(SMALL, POOL, (num_envs,))
    rows["reward"][0] = 0.0  # the step after an end
    steps = [tuple(rows[name][k].copy() for name in FIELDS) for k in range(POOL)]
    writer.reset(obs=rows["obs"][-1])
    step = writer.step

    def run(n: int) -> None:
        for obs, action, reward, terminated, truncated in islice(cycle(steps), n):
            step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)

    return Candidate(OURS, run, calls=num_envs)


def _episodes(linked: tr.ReplayBuffer, single: tr.ReplayBuffer, plan: Plan) -> Iterator[Line]:
    """``extend`` by as many rows as an episode of 1,000 steps, and what it costs to take them in afterwards."""
    writes = {OURS: (linked, block(SMALL, EPISODE)), UNLINKED: (single, SMALL.rows(EPISODE + 1))}
    candidates = [
        Candidate(name + suffix, _extends(buffer, rows, absorb), calls=EPISODE + 1)
        for name, (buffer, rows) in writes.items()
        for suffix, absorb in (("", False), (" and len", True))
    ]
    seconds = _scaled(interleave(candidates, plan.rounds, plan.seconds), NANOSECONDS)
    written = {name: seconds[name] for name in writes}
    yield Line("trajectories", f"extend by {EPISODE:,} steps, a row", "ns", written)
    taken_in = {
        name: [both - only for both, only in zip(seconds[f"{name} and len"], seconds[name], strict=True)]
        for name in writes
    }
    yield Line("trajectories", "taking in, a row", "ns", taken_in)


def _extends(buffer: tr.ReplayBuffer, rows: Mapping[str, Any], absorb: bool) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            buffer.extend(**rows)
            if absorb:
                len(buffer)

    return run


def _scaled(seconds: Mapping[str, Sequence[float]], unit: float) -> dict[str, list[float]]:
    return {name: [value * unit for value in values] for name, values in seconds.items()}
