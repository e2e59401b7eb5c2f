"""torchreplay itself, through its public calls."""

from collections.abc import Callable
from typing import Any

import torch

import torchreplay as tr
from benchmarks.line import OURS
from benchmarks.peers import fill_chunks
from benchmarks.workload import Workload, td_errors
from torchreplay.schema.samplers import Sampler

PRIORITIZED = tr.Prioritized(alpha=0.6, beta=0.4)


class TorchreplayPeer:
    """``torchreplay.ReplayBuffer`` with ``Rows``; it is always shared.

    Args:
        workload: What its rows are.
        capacity: Of the buffer.
        sampler: How it draws.
        name: Of the peer.
    """

    def __init__(self, workload: Workload, capacity: int, sampler: Sampler = PRIORITIZED, name: str = OURS) -> None:
        self._workload, self._capacity, self.name = workload, capacity, name
        self.buffer = tr.ReplayBuffer(row_spec(workload), capacity=capacity, sampler=sampler, seed=0)
        self.append, self.extend = self.writers()
        self.sample = self.buffer.sample
        self.keep = self.buffer.sample
        self.update = self.buffer.update_priorities

    def fill(self) -> None:
        for rows, td in fill_chunks(self._workload, self._capacity):
            self.buffer.extend(**rows, priority=td)

    def td(self, n: int, seed: int) -> torch.Tensor:
        return torch.from_numpy(td_errors(n, seed))

    def writers(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return self.buffer.writer().append, self.buffer.extend

    def close(self) -> None:
        self.buffer.close()
        del self.append, self.extend, self.sample, self.keep, self.update


def row_spec(workload: Workload) -> dict[str, tr.Field]:
    """Returns the spec of a workload's rows."""
    dtype = torch.from_numpy(workload.rows(1)["obs"]).dtype
    return {
        "obs": tr.Field(workload.shape, dtype),
        "action": tr.Field((), torch.int64),
        "reward": tr.Field(),
        "next_obs": tr.Field(workload.shape, dtype),
        "done": tr.Field((), torch.bool),
    }
