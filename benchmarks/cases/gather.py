"""How close drawing a batch of Atari rows comes to a plain copy of as many bytes."""

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.copies import FRESH, PLACES, REUSED, copies, repeat
from benchmarks.line import OURS, Line
from benchmarks.machine import require_memory
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.timing import Candidate, interleave
from benchmarks.workload import ATARI

BATCH_SIZE = 256
MICROSECONDS = 1e6


def measure_gather(plan: Plan) -> Iterator[Line]:
    """Yields the time of a draw, of copies of the same bytes from the same memory, and their quotients.

    All of them run in one thread.
    """
    capacity = plan.capacity(ATARI.capacity)
    require_memory(capacity * ATARI.row_bytes, "Atari rows of one buffer")
    peer = TorchreplayPeer(ATARI, capacity)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peer.fill()
        seconds = interleave(_candidates(peer, capacity), plan)
    finally:
        torch.set_num_threads(threads)
        peer.close()
    samples = {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}
    yield Line("gather", f"sample {BATCH_SIZE}, {BATCH_SIZE * ATARI.row_bytes / 1e6:.1f} MB", "us", samples)
    for name in (REUSED, FRESH):
        fractions = [copy / draw for copy, draw in zip(seconds[name], seconds[OURS], strict=True)]
        yield Line("gather", f"fraction of {name}", "", {OURS: fractions}, higher_is_better=True)


def _candidates(peer: TorchreplayPeer, capacity: int) -> list[Candidate]:
    columns = [peer.buffer.storage["obs"], peer.buffer.storage["next_obs"]]
    generator = np.random.default_rng(0)
    slots = [torch.from_numpy(generator.integers(0, capacity, BATCH_SIZE)) for _ in range(PLACES)]

    def select(index: torch.Tensor) -> None:
        for column in columns:
            column.index_select(0, index)

    return [
        Candidate(OURS, repeat(peer.sample, [BATCH_SIZE])),
        *copies(columns, BATCH_SIZE),
        Candidate("index_select", repeat(select, slots)),
    ]
