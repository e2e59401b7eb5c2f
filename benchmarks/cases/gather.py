"""How close drawing a batch of Atari rows comes to a plain copy of as many bytes."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.copies import MICROSECONDS, PLACES, copies, draws_beside_copies, repeat
from benchmarks.line import OURS, Line
from benchmarks.machine import require_memory
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.workload import ATARI
from torchreplay.checking.timing import Candidate, interleave

BATCH_SIZE = 256
ONE, TWO = "one thread", "two threads"


def measure_gather(plan: Plan) -> Iterator[Line]:
    """Yields the time of a draw, of copies of the same bytes from the same memory, and their quotients, all in one
    thread; and the times of a draw and of such copies by two threads: what the memory has left for a second one.
    """
    capacity = plan.capacity(ATARI.capacity)
    require_memory(capacity * ATARI.row_bytes, "Atari rows of one buffer")
    peer = TorchreplayPeer(ATARI, capacity)
    try:
        peer.fill()
        candidates = _candidates(peer, capacity)
        draw = f"sample {BATCH_SIZE}, {BATCH_SIZE * ATARI.row_bytes / 1e6:.1f} MB"
        yield from draws_beside_copies("gather", draw, "fraction", candidates, plan)
        with ThreadPoolExecutor(2) as pool:
            by_threads = [
                Candidate(OURS, _sampling(peer, threads=2)),
                Candidate(ONE, _sampling(peer, threads=1)),
                Candidate(f"memcpy, {TWO}", _copies(peer, pool, threads=2)),
                Candidate(f"memcpy, {ONE}", _copies(peer, pool, threads=1)),
            ]
            seconds = interleave(by_threads, plan.rounds, plan.seconds)
        micros = {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}
        yield Line("gather", f"sample {BATCH_SIZE}, two threads", "us", micros)
    finally:
        peer.close()


def _sampling(peer: TorchreplayPeer, threads: int) -> Callable[[int], None]:
    def run(n: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for _ in range(n):
            peer.sample(BATCH_SIZE)
        torch.set_num_threads(before)

    return run


def _copies(peer: TorchreplayPeer, pool: ThreadPoolExecutor, threads: int) -> Callable[[int], None]:
    """Copies as many bytes as a draw, from random places, a part of them in each thread, which wait for each other at
    the end of a round only: what the memory gives at best.
    """
    columns = [peer.buffer.storage["obs"], peer.buffer.storage["next_obs"]]
    loops = [copies(columns, BATCH_SIZE // threads)[0].run for _ in range(threads)]

    def run(n: int) -> None:
        list(pool.map(lambda loop: loop(n), loops))

    return run


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
