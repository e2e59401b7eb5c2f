"""Tianshou's buffers, beside those of `torchreplay.compat.tianshou`."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tianshou.data
from tianshou.data import Batch

from benchmarks.cases.compat import BATCH_SIZE, CAPACITY, line
from benchmarks.line import OURS, Line
from benchmarks.plan import Plan
from benchmarks.workload import SMALL, td_errors
from torchreplay.compat import tianshou as adapter

PEER = "tianshou"
PRIORITIES: Mapping[str, Any] = {"alpha": 0.6, "beta": 0.4}
N_STEP = 3


def measure_tianshou(plan: Plan) -> Iterator[Line]:
    """Yields the time of a step's `add`, of `sample`, of the walk to n-step targets, and of feedback."""
    size = plan.capacity(CAPACITY)
    uniform: dict[int, dict[str, Any]] = {
        1: {OURS: adapter.SharedReplayBuffer(size), PEER: tianshou.data.ReplayBuffer(size)},
        8: {OURS: adapter.SharedVectorReplayBuffer(size, 8), PEER: tianshou.data.VectorReplayBuffer(size, 8)},
    }
    prioritized: dict[int, dict[str, Any]] = {
        1: {
            OURS: adapter.PrioritizedReplayBuffer(size, **PRIORITIES),
            PEER: tianshou.data.PrioritizedReplayBuffer(size, **PRIORITIES),
        },
        8: {
            OURS: adapter.PrioritizedVectorReplayBuffer(size, 8, **PRIORITIES),
            PEER: tianshou.data.PrioritizedVectorReplayBuffer(size, 8, **PRIORITIES),
        },
    }
    for title, kinds in (("", uniform), (" PER", prioritized)):
        for n_envs, buffers in kinds.items():
            yield from _measured(f"Tianshou{title}, {n_envs} env{'s' * (n_envs > 1)}", buffers, n_envs, plan)


def _measured(title: str, buffers: Mapping[str, Any], n_envs: int, plan: Plan) -> Iterator[Line]:
    programs = {name: _Program(buffer, n_envs) for name, buffer in buffers.items()}
    works = {"add": "add", "sample": f"sample {BATCH_SIZE}", "targets": "targets"}
    if "PER" in title:
        works["update"] = f"update {BATCH_SIZE}"
    for work, name in works.items():
        yield line(f"{title}: {name}", {who: getattr(program, work) for who, program in programs.items()}, plan)


class _Program:
    """What a collector and a learner do with a full buffer."""

    def __init__(self, buffer: Any, n_envs: int) -> None:
        self._buffer = buffer
        rows = SMALL.rows(n_envs)
        done = np.zeros(n_envs, bool)
        step: dict[str, Any] = {
            "obs": rows["obs"],
            "act": rows["action"],
            "rew": rows["reward"],
            "obs_next": rows["next_obs"],
        }
        self._step = Batch(**step, terminated=done, truncated=done, info=Batch(), policy=Batch())
        self._envs = np.arange(n_envs)
        for _ in range(buffer.maxsize // n_envs):
            self.add()
        self._td = td_errors(BATCH_SIZE)
        self._indices = buffer.sample(BATCH_SIZE)[1]

    def add(self) -> None:
        self._buffer.add(self._step, buffer_ids=self._envs)

    def sample(self) -> None:
        self._buffer.sample(BATCH_SIZE)

    def targets(self) -> None:
        """Finds the rows that the targets of a batch are computed from, and draws the last ones' observations."""
        indices = self._indices
        for _ in range(N_STEP - 1):
            indices = self._buffer.next(indices)
        self._buffer.unfinished_index()
        _ = self._buffer[indices].obs_next

    def update(self) -> None:
        self._buffer.update_weight(self._indices, self._td)
