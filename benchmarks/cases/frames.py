"""Atari frames that are stored once and stacked when they are drawn."""

from collections.abc import Iterator
from importlib.util import find_spec

import torchreplay as tr
from benchmarks.copies import copies, draws_beside_copies, repeat
from benchmarks.episodes import FRAMES, STACK, STACKED, linked_buffer
from benchmarks.line import OURS, Line
from benchmarks.machine import require_memory
from benchmarks.peers.registry import cpprb
from benchmarks.plan import Plan
from benchmarks.workload import ATARI
from torchreplay.checking.timing import Candidate

BATCH_SIZE = 256


def measure_frames(plan: Plan) -> Iterator[Line]:
    """Yields bytes a transition; the draw of stacks beside copies of as many bytes and beside ready-made rows.

    Both draws give 3-step transitions whose ``obs`` and ``next_obs`` are stacks of four frames. Everything runs in one
    thread.
    """
    capacity = plan.capacity(FRAMES.capacity)
    require_memory(capacity * ATARI.row_bytes * 9 // 8, "Atari frames, and ready-made rows of cpprb,")
    buffer = linked_buffer(FRAMES, capacity, STACKED)
    yield Line("trajectories", "frames, bytes a transition", "B", {OURS: [buffer.nbytes / capacity]})
    try:
        candidates = _candidates(buffer, capacity)
        draw, fraction = f"frames, sample {BATCH_SIZE}, 3-step", "frames, fraction"
        yield from draws_beside_copies("trajectories", draw, fraction, candidates, plan)
    finally:
        buffer.close()


def _candidates(buffer: tr.ReplayBuffer, capacity: int) -> list[Candidate]:
    frames = buffer.storage["obs"]
    candidates = [Candidate(OURS, repeat(buffer.sample, [BATCH_SIZE]))]
    if find_spec("cpprb"):
        peer = cpprb(ATARI, capacity)
        peer.fill()
        candidates.append(Candidate(peer.name, repeat(peer.sample, [BATCH_SIZE])))
    return [*candidates, *copies([frames, frames], STACK * BATCH_SIZE)]  # of obs and of next_obs
