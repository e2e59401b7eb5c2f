"""A learner on a CUDA device: how fast batches get there, whether its steps wait, and what replay costs it."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

import torchreplay as tr
from benchmarks.learner import Step, q_learning
from benchmarks.line import OURS, Line
from benchmarks.machine import require_memory
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.workload import ATARI, SMALL, WIDE, Workload
from torchreplay.buffer.base import Pin
from torchreplay.checking.timing import Candidate, interleave
from torchreplay.cuda.copies import DeviceCopies

BATCH_SIZE = 256
BATCH_BYTES = BATCH_SIZE * ATARI.row_bytes
DEVICE = torch.device("cuda")
PINNED, PAGEABLE = "page-locked, one copy", "pageable, one copy"
FIXED, WAITING = "a fixed batch", "td.cpu() each step"
RING = "torchreplay, pin=ring"
SECONDS = 0.1
"""Of a round: what the host queues and does not wait for has to be a small part of it."""
LARGE = 8192
"""Units of a hidden layer that keep the device busy for longer than the host needs for a step."""
PROFILED = 50
REGION = "the steps"
BUSY = "wide, busy device"


def measure_gpu(plan: Plan) -> Iterator[Line]:
    """Yields the rate of copies to the device, the waits in a step, and steps a second beside those on a fixed batch.

    Without a device there is one line, which says that one is needed.
    """
    if not torch.cuda.is_available():
        yield Line("gpu", "needs a CUDA device", "", {})
        return
    plan = replace(plan, seconds=SECONDS, rounds=max(plan.rounds // 3, 3))
    yield Line("gpu", f"on {torch.cuda.get_device_name()}, torch for CUDA {torch.version.cuda}", "", {})
    yield from _copies(plan)
    for workload in (SMALL, WIDE, ATARI):
        yield from _steps(workload.name, workload, q_learning(workload, DEVICE), plan)
    yield from _steps(BUSY, WIDE, q_learning(WIDE, DEVICE, LARGE), plan)


def _copies(plan: Plan) -> Iterator[Line]:
    copies = DeviceCopies(DEVICE)
    ours, pinned = copies.memory(BATCH_BYTES), torch.empty(BATCH_BYTES, dtype=torch.uint8, pin_memory=True)
    pageable, there = torch.zeros(BATCH_BYTES, dtype=torch.uint8), torch.empty(BATCH_BYTES, dtype=torch.uint8).cuda()

    def repeat(copy: Callable[[], Any]) -> Callable[[int], None]:
        def run(n: int) -> None:
            for _ in range(n):
                copy()
            torch.cuda.synchronize()

        return run

    candidates = [
        Candidate(OURS, repeat(lambda: copies.start(ours).take())),
        Candidate(PINNED, repeat(lambda: there.copy_(pinned, non_blocking=True))),
        Candidate(PAGEABLE, repeat(lambda: there.copy_(pageable, non_blocking=True))),
    ]
    rates = _inverse(interleave(candidates, plan.rounds, plan.seconds), BATCH_BYTES / 1e9)
    name = f"host to device, {BATCH_BYTES / 1e6:.1f} MB"
    yield Line("gpu", name, "GB/s", rates, higher_is_better=True)
    fractions = [ours / best for ours, best in zip(rates[OURS], rates[PINNED], strict=True)]
    yield Line("gpu", "host to device, fraction", "", {OURS: fractions}, higher_is_better=True)


def _steps(name: str, workload: Workload, train: Step, plan: Plan) -> Iterator[Line]:
    capacity = plan.capacity(workload.capacity)
    require_memory(capacity * workload.row_bytes, f"{workload.name} rows of one buffer")
    peer = TorchreplayPeer(workload, capacity)
    try:
        peer.fill()
        pins: dict[str, Pin] = {OURS: "staging", RING: "ring"}
        replayed = {
            way: learner(train, tr.ReplayDataset(peer.buffer, BATCH_SIZE, device=DEVICE, pin=pin), peer.update)
            for way, pin in pins.items()
        }
        fixed = learner(train, itertools.repeat(peer.sample(BATCH_SIZE).to(DEVICE)))
        steps = replayed | {FIXED: fixed}
        rates = _inverse(
            interleave([Candidate(way, _synchronized(run)) for way, run in steps.items()], plan.rounds, plan.seconds)
        )
        yield Line("gpu", f"{name}: learner steps", "/s", rates, higher_is_better=True)
        fractions = {
            way: [ours / theirs for ours, theirs in zip(rates[way], rates[FIXED], strict=True)] for way in replayed
        }
        yield Line("gpu", f"{name}: steps, fraction", "", fractions, higher_is_better=True)
        waiting = learner(lambda batch: train(batch).cpu(), itertools.repeat(peer.sample(BATCH_SIZE).to(DEVICE)))
        waits = {way: [_waits(run)] for way, run in (replayed | {WAITING: waiting}).items()}
        yield Line("gpu", f"{name}: waits a step", "", waits, note="in the profiler: calls of CUDA that wait")
        peer.buffer.flush()
    finally:
        peer.close()


def learner(step: Step, batches: Iterable[Any], update: Callable[[Any, torch.Tensor], None] | None = None) -> Any:
    """Returns a function of n that takes n steps on as many batches, each with feedback if there is an ``update``."""
    endless = iter(batches)

    def run(n: int) -> None:
        for batch in itertools.islice(endless, n):
            td = step(batch)
            if update is not None:
                update(batch, td)

    return run


def _synchronized(run: Callable[[int], None]) -> Callable[[int], None]:
    def run_to_the_end(n: int) -> None:
        run(n)
        torch.cuda.synchronize()

    return run_to_the_end


def _waits(run: Callable[[int], None]) -> float:
    """Returns the calls of CUDA that wait, a step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function(REGION):
            run(PROFILED)
        torch.cuda.synchronize()  # or the profiler would end during the work
    return waits_within(profiler.events(), REGION) / PROFILED


def waits_within(events: Iterable[Any], region: str) -> int:
    """Returns how many of a profiler's events are waits of the host for a device, and began within a region."""
    events = list(events)
    regions = [e.time_range for e in events if e.name == region and e.device_type.name == "CPU"]
    return sum(
        any(within.start <= event.time_range.start <= within.end for within in regions)
        for event in events
        if "Synchronize" in event.name or event.name == "cudaMemcpy"
    )


def _inverse(seconds: dict[str, list[float]], amount: float = 1.0) -> dict[str, list[float]]:
    return {name: [amount / value for value in values] for name, values in seconds.items()}
