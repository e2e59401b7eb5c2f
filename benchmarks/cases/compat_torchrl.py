"""TorchRL's `TensorDictReplayBuffer`, beside that of `torchreplay.compat.torchrl`."""

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer

import torchreplay as tr
from benchmarks.cases.compat import BATCH_SIZE, CAPACITY, Work, line
from benchmarks.line import OURS, Line
from benchmarks.plan import Plan
from benchmarks.workload import SMALL, td_errors
from torchreplay.compat import torchrl

PEER = "torchrl"
ALPHA, BETA = 0.6, 0.4
CHUNK = 50
"""Rows of a collector's batch."""


def measure_torchrl(plan: Plan) -> Iterator[Line]:
    """Yields the time of `extend` and `sample`, and of feedback where TorchRL's priority tree loads."""
    size = plan.capacity(CAPACITY)
    uniform = TensorDictReplayBuffer(storage=LazyTensorStorage(size), sampler=RandomSampler(), batch_size=BATCH_SIZE)
    ours = torchrl.TensorDictReplayBuffer(size, batch_size=BATCH_SIZE)
    yield from _measured("TorchRL", {OURS: ours, PEER: uniform}, ("extend", "sample"), plan)
    own = _prioritized(size)
    buffers = {OURS: torchrl.TensorDictReplayBuffer(size, batch_size=BATCH_SIZE, sampler=tr.Prioritized(ALPHA, BETA))}
    note = "" if own else f"{PEER}: its priority tree does not load beside torch {torch.__version__}"
    both = buffers | ({PEER: own} if own else {})
    yield from _measured("TorchRL PER", both, ("extend", "sample", "update"), plan, note)


def _prioritized(size: int) -> Any:
    """Returns TorchRL's prioritized buffer; None where its compiled tree does not load."""
    try:
        sampler = PrioritizedSampler(size, alpha=ALPHA, beta=BETA)
    except RuntimeError:
        return None
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=BATCH_SIZE)


def _measured(
    title: str, buffers: dict[str, Any], works: tuple[str, ...], plan: Plan, note: str = ""
) -> Iterator[Line]:
    size = plan.capacity(CAPACITY)
    for buffer in buffers.values():
        for start in range(0, size, 1000):
            buffer.extend(_transitions(min(1000, size - start)))
    names = {"extend": f"extend by {CHUNK}", "sample": f"sample {BATCH_SIZE}", "update": f"update {BATCH_SIZE}"}
    for work in works:
        programs = {name: _work(buffer, work) for name, buffer in buffers.items()}
        yield line(f"{title}: {names[work]}", programs, plan, note)


def _work(buffer: Any, name: str) -> Work:
    if name == "extend":
        rows = _transitions(CHUNK)
        return lambda: buffer.extend(rows)
    if name == "sample":
        return lambda: buffer.sample()
    drawn = buffer.sample()
    drawn["td_error"] = torch.from_numpy(td_errors(BATCH_SIZE))
    return lambda: buffer.update_tensordict_priority(drawn)


def _transitions(n: int) -> TensorDict:
    """Returns rows as TorchRL's collectors give them."""
    rows = {name: torch.from_numpy(values) for name, values in SMALL.rows(n).items()}
    following = {"observation": rows["next_obs"], "reward": rows["reward"][:, None]}
    following |= dict.fromkeys(("done", "terminated"), rows["done"][:, None])
    return TensorDict({"observation": rows["obs"], "action": rows["action"], "next": following}, [n])
