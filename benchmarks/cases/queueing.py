"""Queues: items a second from two producers to one consumer, and how long a draw takes."""

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count

import numpy as np
import torch

import torchreplay as tr
from benchmarks.child import ChildError, run_module
from benchmarks.line import OURS, Line
from benchmarks.plan import Plan
from torchreplay.checking.timing import Candidate, interleave

PRODUCERS, SIZES = 2, {"1 KB": 1024, "140 KB": 140 * 1024}
PEERS = {OURS: "torchreplay", "multiprocessing.Queue": "", "faster_fifo": "faster_fifo", "echo": "echo"}
PEERS |= {"echo inside": "echo", "ray.util.queue": "ray", "Ray actor": "ray"}
"""What carries the items, and the package that it needs."""
LIMIT = 60.0
BATCH_SIZE = 256
CAPACITY = 1_000_000
REPLAY = "prioritized, with update"
MICROSECONDS = 1e6
MEGABYTE = 1e6


def measure_queue(plan: Plan) -> Iterator[Line]:
    """Yields items a second, the share of memcpy that they are, and the times of draws from a full buffer."""
    for wording, item_bytes in SIZES.items():
        rounds = [{name: _round(plan, name, item_bytes) for name in _installed()} for _ in range(plan.contest_rounds)]
        samples = {name: [figures[name] for figures in rounds] for name in rounds[0]}
        yield Line("queue", f"items of {wording}", "/s", samples, higher_is_better=True)
        if item_bytes > 1 << 16:
            shares = [items * item_bytes / _memcpy(item_bytes) for items in samples[OURS]]
            yield Line("queue", "... of memcpy", "", {OURS: shares}, higher_is_better=True)
    yield from _draws(plan)


def _installed() -> list[str]:
    return [name for name, package in PEERS.items() if not package or find_spec(package)]


def _round(plan: Plan, peer: str, item_bytes: int) -> float:
    options = {"peer": peer, "item_bytes": item_bytes, "producers": PRODUCERS, "seconds": plan.contest_seconds}
    try:
        return float(run_module("benchmarks.queue_traffic", options, LIMIT + plan.contest_seconds)["items"])
    except ChildError as error:
        print(f"queue: a round of {peer} failed and counts as 0: {error}", file=sys.stderr)
        return 0.0


def _memcpy(item_bytes: int) -> float:
    """Bytes a second that a copy of 64 items takes, from memory that is in no cache."""
    source, target = np.empty((512, item_bytes), np.uint8), np.empty((64, item_bytes), np.uint8)
    source.fill(1)  # memory that nobody has written is the system's one page of zeros, which is in every cache
    places = count()

    def copy(n: int) -> None:
        for _ in range(n):
            first = next(places) % 8 * 64
            np.copyto(target, source[first : first + 64])

    seconds = interleave([Candidate("copy", copy)], 21, 0.005)["copy"]
    return target.nbytes / float(np.median(seconds))


def _draws(plan: Plan) -> Iterator[Line]:
    """A queue that holds almost all that fits, beside a prioritized buffer that is full."""
    capacity = plan.capacity(CAPACITY)
    rows = {"x": torch.rand(4096, 8)}
    samplers: dict[str, tr.Fifo | tr.Prioritized] = {OURS: tr.Fifo(), REPLAY: tr.Prioritized()}
    buffers = {name: tr.ReplayBuffer({"x": tr.Field(8)}, capacity, sampler=own) for name, own in samplers.items()}
    for buffer in buffers.values():
        for _ in range(capacity // 4096):
            buffer.extend(**rows)
    few = tr.ReplayBuffer({"x": tr.Field(8)}, capacity, sampler=tr.Fifo())
    few.extend(**rows)
    td = torch.rand(BATCH_SIZE)

    def take(queue: tr.ReplayBuffer) -> Callable[[int], None]:
        def run(n: int) -> None:
            for _ in range(n):
                queue.sample(BATCH_SIZE)
                queue.release()  # it holds as many as before

        return run

    def replay(n: int) -> None:
        for _ in range(n):
            batch = buffers[REPLAY].sample(BATCH_SIZE)
            buffers[REPLAY].update_priorities(batch, td)

    candidates = [Candidate(OURS, take(buffers[OURS])), Candidate(REPLAY, replay), Candidate("4,096 items", take(few))]
    seconds = interleave(candidates, plan.rounds, plan.seconds)
    micros = {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}
    yield Line("queue", f"sample {BATCH_SIZE} of {capacity:,} and give it back", "us", micros)
    for buffer in (*buffers.values(), few):
        buffer.close()
