"""How close drawing a batch of Atari rows, or of wide ones, comes to a plain copy of as many bytes."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from benchmarks.copies import MICROSECONDS, PLACES, copies, draws_beside_copies, repeat
from benchmarks.line import OURS, Line
from benchmarks.machine import require_memory
from benchmarks.native import NativeTree
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.workload import ATARI, WIDE
from torchreplay.checking.timing import Candidate, interleave

BATCH_SIZE = 256
ONE, TWO = "one thread", "two threads"
SELECT, TREE = "index_select", "tree"


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
    yield from _measure_wide(plan)


def _measure_wide(plan: Plan) -> Iterator[Line]:
    """Yields the time of a draw of wide rows beside its least parts: the draw from the tree, and an `index_select` of
    as many values from places chosen anew each time. Then how close it comes to their sum.
    """
    capacity = plan.capacity(WIDE.capacity)
    require_memory(capacity * WIDE.row_bytes, "wide rows of one buffer")
    peer, tree = TorchreplayPeer(WIDE, capacity), NativeTree(capacity)
    columns = [peer.buffer.storage["obs"], peer.buffer.storage["next_obs"]]
    generator = torch.Generator().manual_seed(0)

    def select(n: int) -> None:
        for _ in range(n):
            _select(columns, torch.randint(capacity, (BATCH_SIZE,), generator=generator))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peer.fill()
        candidates = [
            Candidate(OURS, repeat(peer.sample, [BATCH_SIZE])),
            Candidate(SELECT, select),
            Candidate(TREE, tree.sample),
        ]
        seconds = interleave(candidates, plan.rounds, plan.seconds)
    finally:
        torch.set_num_threads(threads)
        tree.close()
        peer.close()
    micros = {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}
    yield Line("gather", f"sample {BATCH_SIZE}, wide rows", "us", micros)
    parts = zip(seconds[SELECT], seconds[TREE], seconds[OURS], strict=True)
    fractions = [(select + tree) / draw for select, tree, draw in parts]
    yield Line("gather", "wide rows, fraction of index_select and tree", "", {OURS: fractions}, higher_is_better=True)


def _select(columns: Sequence[torch.Tensor], index: torch.Tensor) -> list[torch.Tensor]:
    return [column.index_select(0, index) for column in columns]


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

    return [
        Candidate(OURS, repeat(peer.sample, [BATCH_SIZE])),
        *copies(columns, BATCH_SIZE),
        Candidate(SELECT, repeat(partial(_select, columns), slots)),
    ]
