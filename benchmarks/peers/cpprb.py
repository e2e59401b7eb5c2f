"""cpprb: prioritized replay in C++, single-process and over ``multiprocessing`` shared memory."""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import cpprb  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import fill_chunks
from benchmarks.workload import Workload, td_errors


class CpprbPeer:
    """``cpprb.PrioritizedReplayBuffer``, or with ``shared`` its ``MPPrioritizedReplayBuffer`` under fork.

    With ``n_step`` above 1 it turns the rows of an episode into n-step transitions when they are written.
    """

    name = "cpprb"
    prioritized = True

    def __init__(self, workload: Workload, capacity: int, shared: bool = False, n_step: int = 1) -> None:
        self._workload, self._capacity, self._n_step = workload, capacity, n_step
        env = {
            "obs": {"shape": workload.shape, "dtype": workload.dtype},
            "action": {"dtype": np.int64},
            "reward": {"dtype": np.float32},
            "next_obs": {"shape": workload.shape, "dtype": workload.dtype},
            "done": {"dtype": np.bool_},
        }
        if shared:
            self._buffer = cpprb.MPPrioritizedReplayBuffer(capacity, env, alpha=0.6, eps=1e-6, ctx=get_context("fork"))
        else:
            steps = (
                {"Nstep": {"size": n_step, "gamma": 0.99, "rew": "reward", "next": "next_obs"}} if n_step > 1 else {}
            )
            self._buffer = cpprb.PrioritizedReplayBuffer(capacity, env, alpha=0.6, eps=1e-6, **steps)
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

    def writers(self) -> tuple[Callable[..., object], Callable[..., object]]:
        return self._buffer.add, self._buffer.add

    def close(self) -> None:
        del self._buffer, self.append, self.extend
