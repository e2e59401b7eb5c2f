"""Tianshou: prioritized replay in NumPy with a Numba segment tree."""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tianshou.data import Batch, PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer

from benchmarks.peers import fill_chunks
from benchmarks.workload import Rows, Workload, td_errors

LANES = 50
LANE_BUFFER_BYTES = 256 << 20
"""Enough that its writes miss the cache; the vector buffer exists for one line only."""


class TianshouPeer:
    """``PrioritizedReplayBuffer`` for ``append`` and ``sample``, and the vector one of 50 for ``extend``."""

    name = "tianshou"

    def __init__(self, workload: Workload, capacity: int) -> None:
        self._workload, self._capacity = workload, capacity
        self._buffer = PrioritizedReplayBuffer(capacity, alpha=0.6, beta=0.4)

    def fill(self) -> None:
        """Fills the arrays directly: row by row, a million rows would take a minute."""
        columns: Rows = {}
        priorities = []
        start = 0
        for rows, td in fill_chunks(self._workload, self._capacity):
            if not columns:
                columns = {k: np.empty((self._capacity, *v.shape[1:]), v.dtype) for k, v in rows.items()}
            for name, values in rows.items():
                columns[name][start : start + len(values)] = values
            start += len(td)
            priorities.append(td)
        self._buffer.set_batch(_batch(**columns, truncated=np.zeros(self._capacity, bool), done_too=True))
        self._buffer._size = self._capacity
        self._buffer.update_weight(np.arange(self._capacity), np.concatenate(priorities))

    def append(self, *, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> None:
        self._buffer.add(_batch(obs, action, reward, next_obs, done, truncated=False))

    def extend(self, *, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> None:
        self._lanes.add(_batch(obs, action, reward, next_obs, done, truncated=self._untruncated))

    def sample(self, n: int) -> Any:
        return self._buffer.sample(n)

    def keep(self, n: int) -> Any:
        return self._buffer.sample(n)

    def update(self, batch: Any, td: Any) -> None:
        self._buffer.update_weight(batch[1], td)

    def td(self, n: int, seed: int) -> NDArray[np.float32]:
        return td_errors(n, seed)

    def close(self) -> None:
        del self._buffer
        self.__dict__.pop("_lanes", None)

    @cached_property
    def _lanes(self) -> PrioritizedVectorReplayBuffer:
        capacity = min(self._capacity, LANE_BUFFER_BYTES // self._workload.row_bytes)
        buffer = PrioritizedVectorReplayBuffer(capacity, LANES, alpha=0.6, beta=0.4)
        rows: dict[str, Any] = dict(self._workload.rows(LANES))
        buffer.add(_batch(**rows, truncated=self._untruncated))  # allocates the arrays
        for name in ("obs", "obs_next", "act", "rew", "terminated", "truncated", "done"):
            buffer._meta[name][:] = 0  # a full buffer's pages are there already
        return buffer

    @cached_property
    def _untruncated(self) -> NDArray[np.bool_]:
        return np.zeros(LANES, bool)


def _batch(obs: Any, action: Any, reward: Any, next_obs: Any, done: Any, truncated: Any, done_too: bool = False) -> Any:
    """Returns the row or rows under Tianshou's names; ``done_too`` adds what ``add`` would have added."""
    extra = {"done": done} if done_too else {}
    return Batch(
        obs=obs, act=action, rew=reward, terminated=done, truncated=truncated, obs_next=next_obs, info={}, **extra
    )
