"""cpprb: prioritized replay in C++, single-process and over ``multiprocessing`` shared memory."""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import cpprb
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import fill_chunks
from benchmarks.workload import Workload, td_errors


class CpprbPeer:
    """``cpprb.PrioritizedReplayBuffer``.

    With ``n_step`` above 1 it turns the rows of an episode into n-step transitions when they are written.
    """

    name = "cpprb"

    def __init__(self, workload: Workload, capacity: int, n_step: int = 1) -> None:
        self._workload, self._capacity, self._n_step = workload, capacity, n_step
        self._buffer = self._make(
            {
                "obs": {"shape": workload.shape, "dtype": workload.dtype},
                "action": {"dtype": np.int64},
                "reward": {"dtype": np.float32},
                "next_obs": {"shape": workload.shape, "dtype": workload.dtype},
                "done": {"dtype": np.bool_},
            }
        )
        self.append: Callable[..., object] = self._buffer.add
        self.extend: Callable[..., object] = self._buffer.add

    def fill(self) -> None:
        for rows, td in fill_chunks(self._workload, self._capacity):
            self._buffer.add(priorities=td, **rows)
            if self._n_step > 1:
                self._buffer.on_episode_end()

    def sample(self, n: int) -> Any:
        return self._buffer.sample(n)

    def keep(self, n: int) -> Any:
        """Copies the batch: cpprb's weights and indexes are views of memory that the next ``sample`` overwrites."""
        return {name: np.array(values) for name, values in self._buffer.sample(n).items()}

    def update(self, batch: Any, td: Any) -> None:
        self._buffer.update_priorities(batch["indexes"], td)

    def td(self, n: int, seed: int) -> NDArray[np.float32]:
        return td_errors(n, seed)

    def close(self) -> None:
        del self._buffer, self.append, self.extend

    def _make(self, env: dict[str, Any]) -> Any:
        steps = {"size": self._n_step, "gamma": 0.99, "rew": "reward", "next": "next_obs"}
        n_step = {"Nstep": steps} if self._n_step > 1 else {}
        return cpprb.PrioritizedReplayBuffer(self._capacity, env, alpha=0.6, eps=1e-6, **n_step)


class SharedCpprbPeer(CpprbPeer):
    """``cpprb.MPPrioritizedReplayBuffer`` under fork."""

    def __init__(self, workload: Workload, capacity: int) -> None:
        super().__init__(workload, capacity)

    def writers(self) -> tuple[Callable[..., object], Callable[..., object]]:
        return self._buffer.add, self._buffer.add

    def _make(self, env: dict[str, Any]) -> Any:
        fork = get_context("fork")
        return cpprb.MPPrioritizedReplayBuffer(self._capacity, env, alpha=0.6, eps=1e-6, ctx=fork)
