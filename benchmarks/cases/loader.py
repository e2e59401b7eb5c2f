"""What iterating a buffer through ``DataLoader`` costs beyond ``DataLoader`` itself, and what a learner waits for."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import torchreplay as tr
from benchmarks.cases.feedback import measure_feedback
from benchmarks.line import OURS, Line
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.workload import SMALL
from torchreplay.checking.timing import Candidate, interleave

BATCH_SIZE = 256
MICROSECONDS = 1e6
NO_OP, DIRECT, INLINE = "no-op dataset", "buffer.sample", "prefetch=0"
STEP = 1e-3
"""Seconds of a learner's step."""
STEPS = 0.0, 1e-4, 1e-3
"""Those of learners that feed back, in seconds."""
RATIO = 8.0
"""Items drawn for each row that the explorer beside the learner writes."""


class _Repeat(IterableDataset[Any]):
    """Gives the same batch for ever: what is left is torch's own cost."""

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch


def measure_loader(plan: Plan) -> Iterator[Line]:
    """Yields the time of a batch through ``DataLoader``, what of it is torchreplay's, and how long a learner waits."""
    peer = TorchreplayPeer(SMALL, plan.capacity(SMALL.capacity))
    try:
        peer.fill()
        yield from _overheads(peer, plan)
        yield from _turns(peer, plan)
        yield from _waiting(peer, plan)
        if find_spec("pytorch_lightning") is not None:
            yield measure_feedback(peer, plan)
    finally:
        peer.close()


def _overheads(peer: TorchreplayPeer, plan: Plan) -> Iterator[Line]:
    """Yields the time of a batch through ``DataLoader``, and what of it is torchreplay's.

    No iteration is left behind: while there is a second one, learners of the buffer apply their feedback themselves.
    """
    datasets = {
        OURS: tr.ReplayDataset(peer.buffer, BATCH_SIZE),
        INLINE: tr.ReplayDataset(peer.buffer, BATCH_SIZE, prefetch=0),
        NO_OP: _Repeat(peer.sample(BATCH_SIZE)),
    }
    for step, beside in ((0.0, ""), (STEP, f", steps of {STEP * 1e3:g} ms")):
        candidates = [Candidate(name, _iteration(dataset, step)) for name, dataset in datasets.items()]
        if not step:
            candidates.append(Candidate(DIRECT, _sampling(peer)))
        micros = _besides(step, interleave(candidates, plan.rounds, plan.seconds))
        yield Line("loader", f"batch of {BATCH_SIZE} through DataLoader{beside}", "us", micros)
        overhead = {
            name: [ours - torchs for ours, torchs in zip(micros[name], micros[NO_OP], strict=True)]
            for name in (OURS, INLINE)
        }
        yield Line("loader", f"overhead over a no-op dataset{beside}", "us", overhead)


def _besides(step: float, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Returns what each takes per batch beside a step of so many seconds, in microseconds."""
    return {name: [(value - step) * MICROSECONDS for value in values] for name, values in seconds.items()}


def _turns(peer: TorchreplayPeer, plan: Plan) -> Iterator[Line]:
    """Yields what a learner pays in each step for its batch and for feeding back, with steps of several lengths."""
    for step in STEPS:
        candidates = [
            Candidate(OURS, _turn(iter(tr.ReplayDataset(peer.buffer, BATCH_SIZE)).__next__, peer, step)),
            Candidate(INLINE, _turn(iter(tr.ReplayDataset(peer.buffer, BATCH_SIZE, prefetch=0)).__next__, peer, step)),
            Candidate(DIRECT, _turn(lambda: peer.buffer.sample(BATCH_SIZE), peer, step)),
        ]
        micros = _besides(step, interleave(candidates, plan.rounds, plan.seconds))
        yield Line("loader", f"batch and feedback, steps of {step * 1e3:g} ms", "us", micros)


def _turn(draw: Callable[[], tr.ReplayBatch], peer: TorchreplayPeer, step: float) -> Callable[[int], None]:
    td = torch.rand(BATCH_SIZE)

    def run(n: int) -> None:
        for _ in range(n):
            batch = draw()
            _work(time.perf_counter() + step)
            peer.buffer.update_priorities(batch, td)

    return run


def _waiting(peer: TorchreplayPeer, plan: Plan) -> Iterator[Line]:
    """Yields the shares of its time that a learner asks, and waits, for batches, while an explorer writes."""
    asks: dict[str, list[float]] = {OURS: [], INLINE: []}
    waits: dict[str, list[float]] = {OURS: [], INLINE: []}
    with _explorer(peer):
        for _ in range(plan.contest_rounds):
            for name, prefetch in ((OURS, 2), (INLINE, 0)):
                dataset = tr.ReplayDataset(peer.buffer, BATCH_SIZE, prefetch=prefetch)
                asked, waited = _shares(dataset, plan.contest_seconds)
                asks[name].append(100 * asked)
                waits[name].append(100 * waited)
    beside = f"steps of {STEP * 1e3:g} ms, an explorer writes"
    yield Line("loader", f"asks for batches, {beside}", "%", asks)
    yield Line("loader", f"waits: asks when none is ready, {beside}", "%", waits)


def _shares(dataset: tr.ReplayDataset, seconds: float) -> tuple[float, float]:
    """Returns the share of the time that a learner asks for batches, and that in which none was ready."""
    batches = iter(dataset)
    next(batches)
    asked, waited, start = 0.0, 0.0, time.perf_counter()
    while (before := time.perf_counter()) < start + seconds:
        ready = dataset.ready
        asking = time.perf_counter()
        next(batches)
        given = time.perf_counter()
        asked += given - asking
        waited += 0.0 if ready else given - before
        _work(given + STEP)
    whole = time.perf_counter() - start
    return asked / whole, waited / whole


@contextmanager
def _explorer(peer: TorchreplayPeer) -> Iterator[None]:
    """Writes rows in another process, as fast as the limiter admits."""
    before, peer.buffer.limiter = peer.buffer.limiter, tr.SamplesPerInsert(RATIO)
    process = multiprocessing.get_context("fork").Process(target=_explore, args=(peer,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
        peer.buffer.limiter = before


def _explore(peer: TorchreplayPeer) -> None:
    append, _ = peer.writers()
    rows = SMALL.single_rows(64)
    while True:
        for obs, action, reward, next_obs, done in rows:
            append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)


def _iteration(dataset: IterableDataset[Any], step: float) -> Callable[[int], None]:
    batches = iter(DataLoader(dataset, batch_size=None))

    def run(n: int) -> None:
        for _ in range(n):
            next(batches)

    def run_with_steps(n: int) -> None:
        for _ in range(n):
            next(batches)
            _work(time.perf_counter() + step)

    return run_with_steps if step else run


def _work(until: float) -> None:
    """Computes until a moment, as a learner does in its step."""
    while time.perf_counter() < until:
        pass


def _sampling(peer: TorchreplayPeer) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            peer.sample(BATCH_SIZE)

    return run
