"""Stable-Baselines3: the uniform NumPy buffer of a widely used library; it has no prioritized one."""

from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer

from benchmarks.peers import fill_chunks
from benchmarks.workload import Workload

LANES = 50
LANE_BUFFER_BYTES = 256 << 20
"""Enough that its writes miss the cache; the vector buffer exists for one line only."""


class StableBaselines3Peer:
    """``ReplayBuffer`` with one environment for ``append`` and ``sample``, and one with 50 for ``extend``."""

    name = "stable_baselines3"

    def __init__(self, workload: Workload, capacity: int) -> None:
        self._workload, self._capacity = workload, capacity
        self._buffer = self._make(capacity, num_envs=1)

    def fill(self) -> None:
        start = 0
        for rows, _ in fill_chunks(self._workload, self._capacity):
            stop = start + len(rows["reward"])
            self._buffer.observations[start:stop, 0] = rows["obs"]
            self._buffer.next_observations[start:stop, 0] = rows["next_obs"]
            self._buffer.actions[start:stop, 0, 0] = rows["action"]
            self._buffer.rewards[start:stop, 0] = rows["reward"]
            self._buffer.dones[start:stop, 0] = rows["done"]
            start = stop
        self._buffer.full = True

    def append(self, *, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> None:
        self._buffer.add(obs, next_obs, np.array([action]), np.array([reward]), np.array([done]), [{}])

    def extend(self, *, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> None:
        self._lanes.add(obs, next_obs, action, reward, done, self._infos)

    def sample(self, n: int) -> Any:
        return self._buffer.sample(n)

    def close(self) -> None:
        del self._buffer
        self.__dict__.pop("_lanes", None)

    @cached_property
    def _lanes(self) -> ReplayBuffer:
        buffer = self._make(min(self._capacity, LANE_BUFFER_BYTES // self._workload.row_bytes), num_envs=LANES)
        for column in (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards, buffer.dones):
            column[:] = 0  # a full buffer's pages are there already
        return buffer

    @cached_property
    def _infos(self) -> list[dict[str, Any]]:
        return [{} for _ in range(LANES)]

    def _make(self, capacity: int, num_envs: int) -> ReplayBuffer:
        shape, dtype = self._workload.shape, self._workload.dtype
        low, high = (0, 255) if np.issubdtype(dtype, np.integer) else (-np.inf, np.inf)
        space = gym.spaces.Box(low, high, shape, dtype)  # type: ignore[arg-type]
        return ReplayBuffer(capacity, space, gym.spaces.Discrete(4), device="cpu", n_envs=num_envs)
