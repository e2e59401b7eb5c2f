"""Linked rows: what steps cost, and what drawing n-step transitions, frame stacks and sequences costs."""

from collections.abc import Callable, Iterator
from itertools import cycle, islice

import numpy as np
import torch

import torchreplay as tr
from benchmarks.line import OURS, Line
from benchmarks.machine import require_memory
from benchmarks.peers.cpprb import CpprbPeer
from benchmarks.plan import Plan
from benchmarks.timing import Candidate, interleave
from benchmarks.workload import ATARI

MICROSECONDS = 1e6
EPISODE = 1000
FRAMES = tr.Field((84, 84), torch.uint8)
FLAGS = {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}
STACKED = tr.Transitions(n_step=3, gamma=0.99, stack={"obs": 4})
COPIES = "memcpy"


def measure_trajectories(plan: Plan) -> Iterator[Line]:
    """Yields the lines of steps and draws of small rows, and of Atari frames that are stored once."""
    small = tr.Field((4,))
    yield from _steps(filled(small, plan.capacity(100_000), tr.Transitions(n_step=3)), plan)
    for capacity in (100_000, 1_000_000):
        sequences = filled(small, plan.capacity(capacity), tr.Sequences(8))
        yield from _draws(f"32 sequences of 8 of {capacity:,}", {OURS: (sequences, 32)}, plan)
    capacity = plan.capacity(1_000_000)
    views: dict[str, tr.Transitions | tr.Rows] = {OURS: tr.Transitions(n_step=3), "Rows()": tr.Rows()}
    buffers = {name: (filled(small, capacity, view), 256) for name, view in views.items()}
    yield from _draws("256 3-step transitions of 1,000,000", buffers, plan)
    yield from _atari(plan)


def filled(obs: tr.Field, capacity: int, view: tr.Transitions | tr.Sequences | tr.Rows) -> tr.ReplayBuffer:
    """Returns a full buffer of episodes of 1,000 steps with random observations and priorities."""
    spec = {"obs": obs, "action": tr.Field((), torch.int64), "reward": tr.Field(), **FLAGS}
    buffer = tr.ReplayBuffer(spec, capacity, view=view, sampler=tr.Prioritized(), seed=0)
    generator = np.random.default_rng(0)
    steps = np.arange(EPISODE)
    values = {"action": steps, "reward": steps.astype(np.float32), "terminated": steps == EPISODE - 1}
    values["truncated"] = np.zeros(EPISODE, bool)
    for _ in range(capacity // EPISODE + 1):
        observations = generator.integers(0, 256, (EPISODE + 1, *obs.shape), dtype=np.uint8)
        if obs.dtype is not torch.uint8:
            observations = observations.astype(np.float32)
        if isinstance(view, tr.Rows):
            observations = observations[1:]
        buffer.extend(obs=observations, **values, priority=generator.exponential(1.0, EPISODE))
    len(buffer)
    return buffer


def _steps(buffer: tr.ReplayBuffer, plan: Plan) -> Iterator[Line]:
    """Yields the cost of `step`, beside that of `append` to a buffer whose rows are not linked."""
    obs = np.zeros(4, np.float32)
    rows = filled(tr.Field((4,)), buffer.capacity, tr.Rows())
    linked, single = buffer.writer(), rows.writer()
    linked.reset(obs=obs)

    def loop(call: Callable[..., object]) -> Callable[[int], None]:
        def run(n: int) -> None:
            for _ in range(n):
                call(obs=obs, action=1, reward=0.5, terminated=False, truncated=False)

        return run

    candidates = [Candidate(OURS, loop(linked.step)), Candidate("append", loop(single.append))]
    seconds = interleave(candidates, plan)
    yield Line("trajectories", "step", "us", {k: [v * MICROSECONDS for v in vs] for k, vs in seconds.items()})


def _draws(name: str, buffers: dict[str, tuple[tr.ReplayBuffer, int]], plan: Plan) -> Iterator[Line]:
    seconds = interleave([Candidate(peer, _sampling(*given)) for peer, given in buffers.items()], plan)
    yield Line("trajectories", name, "us", {k: [v * MICROSECONDS for v in vs] for k, vs in seconds.items()})


def _sampling(source: tr.ReplayBuffer | CpprbPeer, batch_size: int) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            source.sample(batch_size)

    return run


def _atari(plan: Plan) -> Iterator[Line]:
    """Yields bytes a transition, and the draw of 256 beside a copy of as many bytes and beside ready-made rows."""
    capacity = plan.capacity(ATARI.capacity)
    require_memory(capacity * ATARI.row_bytes * 9 // 8, "Atari frames, and ready-made rows of cpprb")
    buffer = filled(FRAMES, capacity, STACKED)
    yield Line("trajectories", "Atari, bytes a transition", "B", {OURS: [buffer.nbytes / capacity]})
    peer = CpprbPeer(ATARI, capacity)
    peer.fill()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        candidates = [
            Candidate(OURS, _sampling(buffer, 256)),
            Candidate("cpprb", _sampling(peer, 256)),
            Candidate(COPIES, _copies(buffer, capacity)),
        ]
        seconds = interleave(candidates, plan)
    finally:
        torch.set_num_threads(threads)
        peer.close()
    samples = {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}
    yield Line("trajectories", "Atari, 256 3-step stacks of 4", "us", samples)
    fractions = [copy / draw for copy, draw in zip(seconds[COPIES], seconds[OURS], strict=True)]
    yield Line("trajectories", "Atari, fraction of memcpy", "", {OURS: fractions}, higher_is_better=True)


def _copies(buffer: tr.ReplayBuffer, capacity: int) -> Callable[[int], None]:
    """Copies the bytes of a batch, `obs` and `next_obs`, from contiguous frames at random places of the buffer."""
    frames = buffer.storage["obs"].numpy()
    targets = [np.ones((256 * 4, 84, 84), np.uint8) for _ in range(2)]
    generator = np.random.default_rng(1)
    last = capacity - 256 * 4
    starts = cycle([int(start) for start in generator.integers(0, max(1, last), 128)])

    def run(n: int) -> None:
        for _ in range(n):
            for target, start in zip(targets, islice(starts, 2), strict=True):
                np.copyto(target[: capacity - start], frames[start : start + 256 * 4])

    return run
