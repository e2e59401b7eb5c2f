"""How close drawing a batch of Atari rows comes to a plain copy of as many bytes."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from benchmarks.line import OURS, Line
from benchmarks.machine import require_memory
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.timing import Candidate, interleave
from benchmarks.workload import ATARI

BATCH_SIZE = 256
MICROSECONDS = 1e6
FRESH, REUSED = "memcpy, fresh", "memcpy, reused"


def measure_gather(plan: Plan) -> Iterator[Line]:
    """Yields the time of a draw, of copies of the same bytes from the same memory, and their quotients.

    The copies are single-threaded like each thread of the draw, and read contiguous rows of the buffer itself at random
    places. One writes to memory of its own that it reuses, the other allocates its destination like a draw whose
    batches the caller may keep.
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
    arrays = [column.numpy() for column in columns]
    generator = np.random.default_rng(0)
    starts = [int(start) for start in generator.integers(0, capacity - BATCH_SIZE, 64)]
    slots = [torch.from_numpy(generator.integers(0, capacity, BATCH_SIZE)) for _ in range(64)]
    reused = [np.ones_like(array[:BATCH_SIZE]) for array in arrays]

    def copy_reused(start: int) -> None:
        for array, target in zip(arrays, reused, strict=True):
            np.copyto(target, array[start : start + BATCH_SIZE])

    def copy_fresh(start: int) -> None:
        batch = [torch.empty_like(column[:BATCH_SIZE]).numpy() for column in columns]  # alive together, as in a draw
        for array, target in zip(arrays, batch, strict=True):
            np.copyto(target, array[start : start + BATCH_SIZE])

    def select(index: torch.Tensor) -> None:
        for column in columns:
            column.index_select(0, index)

    return [
        Candidate(OURS, _loop(lambda _: peer.sample(BATCH_SIZE), starts)),
        Candidate(REUSED, _loop(copy_reused, starts)),
        Candidate(FRESH, _loop(copy_fresh, starts)),
        Candidate("index_select", _loop(select, slots)),
    ]


def _loop(work: Callable[[Any], object], arguments: Sequence[Any]) -> Callable[[int], None]:
    # Every round goes on where the one before ended: a copy of the same rows again would find them in the caches.
    endless = cycle(arguments)

    def run(n: int) -> None:
        for argument in islice(endless, n):
            work(argument)

    return run
