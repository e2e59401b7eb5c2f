"""Tianshou's prioritized buffers: `PrioritizedReplayBuffer`, `PrioritizedVectorReplayBuffer`."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tianshou.data import PrioritizedReplayBuffer as TianshouPrioritizedReplayBuffer
from tianshou.data import ReplayBuffer as TianshouReplayBuffer
from tianshou.data import ReplayBufferManager

from torchreplay.compat.indexes import Indexes
from torchreplay.compat.tianshou.buffers import SharedReplayBuffer, rows_for
from torchreplay.schema.samplers import Prioritized, Sampler, value_of
from torchreplay.validation import as_numbers, checked_int

EPS = float(np.finfo(np.float32).eps)
"""What Tianshou adds to a priority."""


class PrioritizedReplayBuffer(SharedReplayBuffer, TianshouPrioritizedReplayBuffer):
    """Tianshou's `PrioritizedReplayBuffer` over a torchreplay buffer, for one environment.

    Args:
        size: As for `SharedReplayBuffer`.
        alpha: Exponent of the priorities.
        beta: Exponent of the weights, which `set_beta` changes.
        weight_norm: Whether weights are divided by the largest one of the batch; else by that of the buffer.
        **options: As for `SharedReplayBuffer`.
    """

    def __init__(self, size: int, alpha: float, beta: float, weight_norm: bool = True, **options: Any) -> None:
        self._alpha, self._weight_norm, self._beta_now = alpha, weight_norm, _Beta(beta)
        self._sampler()  # which checks them
        super().__init__(size, **options)
        self.options.update(alpha=alpha, beta=beta)

    def _sampler(self) -> Sampler:
        return Prioritized(self._alpha, self._beta_now, EPS, initial="max_seen")

    def _batch_of(self, drawn: Any, index: NDArray[Any]) -> Any:
        batch = super()._batch_of(drawn, index)
        weight = drawn["weight"].numpy()
        vars(batch)["weight"] = weight / weight.max() if self._weight_norm else weight
        return batch

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            index = self.sample_indices(0) if index == slice(None) else np.arange(self._size)[index]
        if not np.ndim(index):
            row = TianshouReplayBuffer.__getitem__(self, index)
            row.weight = np.float32(1) if self._weight_norm else self.get_weight(index)
            return row
        return self._batch_of(self._rows_at(index), np.asarray(index))

    def _rows_at(self, index: Any) -> Any:
        assert self.replay is not None
        return self.replay.gather(self._keys_at(index), missing="raise")

    def set_beta(self, beta: float) -> None:
        """Changes the exponent of the weights.

        Raises:
            ValueError: It is negative or not finite.
        """
        self._beta_now.value = value_of(beta, 0)

    def get_weight(self, index: Any) -> Any:
        """Returns the weights of rows, `[n]`, relative to the largest of the buffer."""
        weights = self._rows_at(index)["weight"].numpy()
        return weights if np.ndim(index) else weights[0]

    def update_weight(self, index: NDArray[Any], new_weight: NDArray[Any] | torch.Tensor | float) -> None:
        """Feeds TD errors back; those of rows that were overwritten since the draw are dropped.

        Args:
            index: What `sample` returned, or indexes of rows that are there now, `[n]`.
            new_weight: TD errors, `[n]` or `[n, 1]`, on any device, or one for all; their absolute values are taken.

        Raises:
            ValueError: There are not as many as indexes, or some are NaN or infinite; nothing is applied.
            IndexError: There is no row at an index.
        """
        assert self.replay is not None
        keys = index.intact_keys() if isinstance(index, Indexes) else None
        if keys is None:
            keys = self._keys_at(index)
        td = as_numbers("new_weight", new_weight, "numbers").detach()
        self.replay.update_priorities(keys, td.reshape(-1) if td.dim() else td.expand(len(keys)))

    def init_weight(self, index: Any) -> NoReturn:
        """Refuses: new rows have the largest priority so far by themselves."""
        raise NotImplementedError("new rows have the largest priority so far: use update_weight() for others")


class PrioritizedVectorReplayBuffer(PrioritizedReplayBuffer, ReplayBufferManager):
    """Tianshou's `PrioritizedVectorReplayBuffer`: prioritized replay of several environments in one memory.

    Args:
        total_size: As for `SharedVectorReplayBuffer`.
        buffer_num: Environments.
        **options: As for `PrioritizedReplayBuffer`: `alpha`, `beta`, ...
    """

    def __init__(self, total_size: int, buffer_num: int, **options: Any) -> None:
        self.buffer_num = self._num_envs = checked_int("buffer_num", buffer_num, 1)
        super().__init__(rows_for(total_size, buffer_num), **options)


class _Beta:
    """A schedule that somebody sets."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, step: int) -> float:
        return self.value
