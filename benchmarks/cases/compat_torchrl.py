"""TorchRL's `TensorDictReplayBuffer`, beside that of `torchreplay.compat.torchrl`."""

from collections.abc import Iterator
from typing import Any

import torch

import torchreplay as tr
from benchmarks.cases.compat import BATCH_SIZE, CAPACITY, Work, line
from benchmarks.line import OURS, Line
from benchmarks.peers.torchrl import ALPHA, BETA, prioritized, transitions, uniform
from benchmarks.plan import Plan
from benchmarks.workload import SMALL, td_errors
from torchreplay.compat import torchrl

PEER = "torchrl"
CHUNK = 50
"""Rows of a collector's batch."""


def measure_torchrl(plan: Plan) -> Iterator[Line]:
    """Yields the time of `extend`, `sample` and feedback."""
    size = plan.capacity(CAPACITY)
    ours = torchrl.TensorDictReplayBuffer(size, batch_size=BATCH_SIZE)
    yield from _measured("TorchRL", {OURS: ours, PEER: uniform(size, BATCH_SIZE)}, ("extend", "sample"), plan)
    ours = torchrl.TensorDictReplayBuffer(size, batch_size=BATCH_SIZE, sampler=tr.Prioritized(ALPHA, BETA))
    both = {OURS: ours, PEER: prioritized(size, BATCH_SIZE)}
    yield from _measured("TorchRL PER", both, ("extend", "sample", "update"), plan)


def _measured(title: str, buffers: dict[str, Any], works: tuple[str, ...], plan: Plan) -> Iterator[Line]:
    size = plan.capacity(CAPACITY)
    for buffer in buffers.values():
        for start in range(0, size, 1000):
            buffer.extend(transitions(SMALL.rows(min(1000, size - start))))
    names = {"extend": f"extend by {CHUNK}", "sample": f"sample {BATCH_SIZE}", "update": f"update {BATCH_SIZE}"}
    for work in works:
        programs = {name: _work(buffer, work) for name, buffer in buffers.items()}
        yield line(f"{title}: {names[work]}", programs, plan)


def _work(buffer: Any, name: str) -> Work:
    if name == "extend":
        rows = transitions(SMALL.rows(CHUNK))
        return lambda: buffer.extend(rows)
    if name == "sample":
        return lambda: buffer.sample()
    drawn = buffer.sample()
    drawn["td_error"] = torch.from_numpy(td_errors(BATCH_SIZE))
    return lambda: buffer.update_tensordict_priority(drawn)
