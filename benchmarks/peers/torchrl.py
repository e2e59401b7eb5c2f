"""TorchRL: prioritized replay of TensorDicts, with a compiled segment tree.

Wheels of torchrl are built for one release of torch. Beside another one its compiled module lacks functions of autograd
and is refused, though the tree calls none of them. So it is bound lazily here: a function is looked for when called.
"""

import logging
import os
import sys
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.peers import fill_chunks
from benchmarks.workload import Rows, Workload, td_errors

_flags = sys.getdlopenflags()
sys.setdlopenflags(os.RTLD_LAZY)
try:
    from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer
finally:
    sys.setdlopenflags(_flags)
logging.getLogger("torchrl").setLevel(logging.WARNING)  # it tells of each storage that it makes

ALPHA, BETA = 0.6, 0.4


def uniform(capacity: int, batch_size: int) -> Any:
    """Returns TorchRL's buffer with uniform draws."""
    storage = LazyTensorStorage(capacity)
    return TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=batch_size)


def prioritized(capacity: int, batch_size: int | None = None) -> Any:
    """Returns TorchRL's buffer with prioritized draws."""
    sampler = PrioritizedSampler(capacity, alpha=ALPHA, beta=BETA)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=batch_size)


def transitions(rows: Rows) -> TensorDict:
    """Returns rows as TorchRL's collectors give them."""
    columns = {name: torch.from_numpy(values) for name, values in rows.items()}
    following = {"observation": columns["next_obs"], "reward": columns["reward"][:, None]}
    following |= dict.fromkeys(("done", "terminated"), columns["done"][:, None])
    size = len(columns["reward"])
    return TensorDict({"observation": columns["obs"], "action": columns["action"], "next": following}, [size])


class TorchRLPeer:
    """``TensorDictReplayBuffer`` with a ``PrioritizedSampler``."""

    name = "torchrl"

    def __init__(self, workload: Workload, capacity: int) -> None:
        self._workload, self._capacity = workload, capacity
        self._buffer = prioritized(capacity)

    def fill(self) -> None:
        for rows, td in fill_chunks(self._workload, self._capacity):
            index = self._buffer.extend(transitions(rows))
            self._buffer.update_priority(index, torch.from_numpy(td))

    def append(self, *, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> None:
        following = {"observation": torch.as_tensor(next_obs), "reward": torch.as_tensor([reward])}
        following |= dict.fromkeys(("done", "terminated"), torch.as_tensor([done]))
        row = {"observation": torch.as_tensor(obs), "action": torch.as_tensor(action), "next": following}
        self._buffer.add(TensorDict(row, []))

    def extend(self, *, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> None:
        rows = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "done": done}
        self._buffer.extend(transitions(rows))

    def sample(self, n: int) -> TensorDict:
        return self._buffer.sample(n)

    def keep(self, n: int) -> TensorDict:
        return self._buffer.sample(n)

    def update(self, batch: TensorDict, td: Tensor) -> None:
        self._buffer.update_priority(batch["index"], td)

    def td(self, n: int, seed: int) -> Tensor:
        return torch.from_numpy(td_errors(n, seed))

    def close(self) -> None:
        del self._buffer
