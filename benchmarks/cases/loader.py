"""What iterating a buffer through ``DataLoader`` costs beyond ``DataLoader`` itself."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

import torchreplay as tr
from benchmarks.line import OURS, Line
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.timing import Candidate, interleave
from benchmarks.workload import SMALL

BATCH_SIZE = 256
MICROSECONDS = 1e6
NO_OP, DIRECT = "no-op dataset", "buffer.sample"


class _Repeat(IterableDataset[Any]):
    """Gives the same batch for ever: what is left is torch's own cost."""

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch


def measure_loader(plan: Plan) -> Iterator[Line]:
    """Yields the time of a batch through ``DataLoader`` and what of it is torchreplay's."""
    peer = TorchreplayPeer(SMALL, plan.capacity(SMALL.capacity))
    try:
        peer.fill()
        datasets = {OURS: tr.ReplayDataset(peer.buffer, batch_size=BATCH_SIZE), NO_OP: _Repeat(peer.sample(BATCH_SIZE))}
        candidates = [Candidate(name, _iteration(dataset)) for name, dataset in datasets.items()]
        seconds = interleave([*candidates, Candidate(DIRECT, _draws(peer))], plan)
    finally:
        peer.close()
    samples = {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}
    yield Line("loader", f"batch of {BATCH_SIZE} through DataLoader", "us", samples)
    overhead = [ours - torchs for ours, torchs in zip(samples[OURS], samples[NO_OP], strict=True)]
    yield Line("loader", "overhead over a no-op dataset", "us", {OURS: overhead})


def _iteration(dataset: IterableDataset[Any]) -> Callable[[int], None]:
    batches = iter(DataLoader(dataset, batch_size=None))

    def run(n: int) -> None:
        for _ in range(n):
            next(batches)

    return run


def _draws(peer: TorchreplayPeer) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            peer.sample(BATCH_SIZE)

    return run
