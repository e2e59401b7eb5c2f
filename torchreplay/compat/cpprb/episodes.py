"""`SelectiveReplayBuffer`: episodes that can be looked at and deleted one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from torchreplay.compat.cpprb.buffers import Batch
from torchreplay.compat.cpprb.columns import Column, equal_rows


class SelectiveReplayBuffer:
    """Holds episodes in the memory of this process, in float64, until it is full; then it takes no more.

    It is no ring and shares nothing, because any episode can be deleted. cpprb has it from its early versions.

    Args:
        episode_len: Transitions of an episode, at most.
        obs_dim: Numbers in an observation.
        act_dim: Numbers in an action.
        Nepisodes: Episodes that fit; of shorter ones, more.
        rew_dim: Numbers in a reward.
        obs_shape: Shape of an observation, instead of `obs_dim`.
        is_discrete_action: Whether an action is one integer; cpprb's fails with NumPy 1.24 and later.
    """

    def __init__(
        self,
        episode_len: int,
        obs_dim: int = 1,
        act_dim: int = 1,
        *,
        Nepisodes: int = 10,  # noqa: N803  # cpprb's name
        rew_dim: int = 1,
        obs_shape: Iterable[int] | None = None,
        is_discrete_action: bool = False,
    ) -> None:
        self._size = int(episode_len) * int(Nepisodes)
        shape = (int(obs_dim),) if obs_shape is None else tuple(obs_shape)
        number = np.dtype(float)
        act = Column("act", (1,), np.dtype(int)) if is_discrete_action else Column("act", (int(act_dim),), number)
        plain = {"rew": (int(rew_dim),), "next_obs": shape, "done": (1,)}
        self._columns = (Column("obs", shape, number), act, *(Column(name, of, number) for name, of in plain.items()))
        self._obs_shape, self._act_dim, self._rew_dim = shape if obs_shape is not None else None, act_dim, rew_dim
        self.clear()

    def clear(self) -> None:
        """Takes all episodes away."""
        self._episodes: list[Batch] = []
        self._ended = True

    def add(self, obs: Any, act: Any, rew: Any, next_obs: Any, done: Any) -> int:
        """Adds transitions as far as there is room; each `done` ends an episode.

        Returns:
            The index of the first one.
        """
        given = {"obs": obs, "act": act, "rew": rew, "next_obs": next_obs, "done": done}
        rows = equal_rows(self._columns, given, None)
        first = self.get_stored_size()
        room = self._size - first
        columns = {c.name: c.shown(rows[c.name][:room].astype(c.dtype)) for c in self._columns}
        ends = np.flatnonzero(columns["done"]) + 1
        for start, end in zip([0, *ends], [*ends, len(columns["done"])], strict=True):
            if start < end:
                self._add_part({name: values[start:end] for name, values in columns.items()})
        return first

    def _add_part(self, part: Batch) -> None:
        if self._ended:
            self._episodes.append(part)
        else:
            before = self._episodes[-1]
            self._episodes[-1] = {name: np.concatenate([before[name], part[name]]) for name in part}
        self._ended = bool(part["done"][-1, 0])

    def get_episode(self, i: int) -> Batch:
        """Returns the i-th episode; an empty one where there is none."""
        if not 0 <= i < len(self._episodes):
            return {c.name: np.empty((0, *c.shape), c.dtype) for c in self._columns}
        return {name: values.copy() for name, values in self._episodes[i].items()}

    def delete_episode(self, i: int) -> int:
        """Deletes the i-th episode, and returns how many transitions it had."""
        if not 0 <= i < len(self._episodes):
            return 0
        self._ended = self._ended or i == len(self._episodes) - 1
        return len(self._episodes.pop(i)["done"])

    def sample(self, batch_size: int) -> Batch:
        """Draws transitions uniformly, with replacement.

        Raises:
            ValueError: There is none.
        """
        return self._encode_sample(np.random.randint(0, self.get_stored_size(), batch_size))  # noqa: NPY002  # as cpprb

    def _encode_sample(self, idx: Any) -> Batch:
        return {c.name: np.concatenate([e[c.name] for e in self._episodes])[idx] for c in self._columns}

    def get_stored_size(self) -> int:
        """Returns how many transitions there are."""
        return sum(len(episode["done"]) for episode in self._episodes)

    def get_next_index(self) -> int:
        """Returns the index that the next transition gets."""
        return self.get_stored_size()

    def get_buffer_size(self) -> int:
        """Returns how many transitions fit."""
        return self._size

    def get_stored_episode_size(self) -> int:
        """Returns how many episodes there are, the one under way included."""
        return len(self._episodes)

    def get_obs_shape(self) -> tuple[int, ...] | None:
        """Returns the shape of an observation, where one was given."""
        return self._obs_shape

    def get_obs_dim(self) -> int:
        """Returns how many numbers an observation has."""
        return int(np.prod(self._columns[0].shape))

    def get_act_dim(self) -> int:
        """Returns how many numbers an action has."""
        return self._act_dim

    def get_rew_dim(self) -> int:
        """Returns how many numbers a reward has."""
        return self._rew_dim
