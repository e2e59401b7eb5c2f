"""Tianshou's buffers of one environment and of several: `SharedReplayBuffer`, `SharedVectorReplayBuffer`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import h5py
import numpy as np
from numpy.typing import NDArray
from tianshou.data import Batch, ReplayBufferManager
from tianshou.data import ReplayBuffer as TianshouReplayBuffer
from tianshou.data.utils.converter import to_hdf5

from torchreplay.buffer.replay_buffer import ReplayBuffer, draw
from torchreplay.compat.indexes import Indexes
from torchreplay.compat.tianshou.episodes import EpisodeLinks, EpisodeReturn
from torchreplay.compat.tianshou.rows import RowForm, as_batch, spec_of
from torchreplay.schema.samplers import Sampler, Uniform
from torchreplay.schema.spec import Spec
from torchreplay.validation import checked_int


class SharedReplayBuffer(TianshouReplayBuffer):
    """Tianshou's `ReplayBuffer` over a torchreplay buffer, for one environment.

    An index is the place of a row. `rew`, `done` and the other arrays `[maxsize, ...]` are the shared memory itself.
    One process adds rows. Others may draw from `replay`, watch it and save it.

    Pickling, copying and saving it to HDF5 stores the experience.

    Args:
        size: Rows that fit.
        stack_num: Frames that are stacked when a batch is made.
        ignore_obs_next: `obs_next` is not stored, but the `obs` of the row that follows.
        save_only_last_obs: Of stacked observations only the newest frame is stored.
        sample_avail: With `stack_num`, only rows with that many rows before them are drawn.
        random_seed: Of the draws.
        keep: Entries of `info` and `policy` that are stored, such as `("info/lives", "policy/hidden_state")`. What
            is not named is not stored.
        **ignored: As Tianshou does, arguments of its other buffers.

    Attributes:
        replay: The `torchreplay.ReplayBuffer` beneath; None before the first `add`, which shows what a row is.

    Raises:
        ValueError: A number is out of range.
    """

    replay: ReplayBuffer | None
    _num_envs = 1

    def __init__(
        self,
        size: int,
        stack_num: int = 1,
        ignore_obs_next: bool = False,
        save_only_last_obs: bool = False,
        sample_avail: bool = False,
        random_seed: int = 42,
        *,
        keep: Sequence[str] = (),
        **ignored: Any,
    ) -> None:
        size, stack_num = checked_int("size", size, 1), checked_int("stack_num", stack_num, 1)
        TianshouReplayBuffer.__init__(
            self, size, stack_num, ignore_obs_next, save_only_last_obs, sample_avail, random_seed
        )
        self._seed, self._form = random_seed, RowForm(not ignore_obs_next, save_only_last_obs, keep)
        self._spec: Spec = {}
        self.replay = None
        self._begin()
        self._forget_returns()

    def _begin(self) -> None:
        """Has no row be there, and no episode be under way."""
        self._insertion_idx = self._size = 0
        self._links = EpisodeLinks(self.maxsize, self._num_envs)
        self.last_index = np.zeros(self._num_envs, np.int64)

    def _forget_returns(self) -> None:
        self._episodes = [EpisodeReturn() for _ in range(self._num_envs)]

    def _sampler(self) -> Sampler:
        return Uniform()

    def _open(self) -> ReplayBuffer:
        """Makes the memory for rows of the spec."""
        made = self.replay = ReplayBuffer(self._spec, self.maxsize, sampler=self._sampler(), seed=self._seed)
        self._attach(made)
        return made

    def _attach(self, replay: ReplayBuffer) -> None:
        self._writer = replay.writer()
        self._meta = as_batch(replay.storage)

    # Writing

    def add(
        self, batch: Any, buffer_ids: NDArray[Any] | list[int] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Adds a step.

        Args:
            batch: `obs`, `act`, `rew`, `terminated`, `truncated`, and `obs_next` unless it is ignored. With
                `buffer_ids`, or several environments, each has a leading dimension of environments.
            buffer_ids: The environments that the steps are of.

        Returns:
            The rows' indexes; the returns and the lengths of episodes that end here, 0 for others; the indexes at which
            the episodes have begun. Each `[n]`.

        Raises:
            ValueError: An entry is missing, of another shape, or does not cast to its field; nothing is added.
            RuntimeError: Another process has written into the memory.
        """
        envs, rows = self._envs_of(buffer_ids), self._form.rows(batch)
        one_row = buffer_ids is None and self._num_envs == 1
        rew, done = rows["rew"], rows["done"]
        expected = () if one_row else (len(envs),)
        if done.shape != expected:
            raise ValueError(f"the flags have shape {done.shape} for {len(envs)} environments: expected {expected}")
        if self.replay is None:
            self._spec = spec_of(rows, 0 if one_row else 1)
            self._open()
        if one_row:
            return self._count([self._writer.append(**rows)], envs, [rew], [bool(done)])
        return self._count(self._writer.extend(**rows).tolist(), envs, rew, done.tolist())

    def _envs_of(self, buffer_ids: NDArray[Any] | list[int] | None) -> list[int]:
        envs = list(range(self._num_envs)) if buffer_ids is None else np.asarray(buffer_ids, np.int64).tolist()
        if not envs or min(envs) < 0 or max(envs) >= self._num_envs:
            raise ValueError(f"buffer_ids are {buffer_ids}: expected numbers from 0 to {self._num_envs - 1}")
        return envs

    def _count(
        self, keys: list[int], envs: list[int], rew: Any, done: list[bool]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Links new rows to those before them, and returns what `add` does."""
        if keys[0] % self.maxsize != self._insertion_idx:
            raise RuntimeError(
                "another process has written into this buffer: only add() may, as rows follow each other"
            )
        figures = []
        for key, env, reward, ended in zip(keys, envs, rew, done, strict=True):
            index = self.last_index[env] = self._links.add(key, env, ended)
            figures.append((index, *self._episodes[env].step(index, reward, ended)))
        self._insertion_idx = (keys[-1] + 1) % self.maxsize
        self._size = min(self._size + len(keys), self.maxsize)
        indexes, returns, lengths, starts = zip(*figures, strict=True)
        return np.array(indexes), np.array(returns), np.array(lengths), np.array(starts)

    def update(self, buffer: TianshouReplayBuffer) -> NDArray[Any]:
        """Adds the rows of another buffer of one environment, oldest first, and returns their indexes.

        Raises:
            NotImplementedError: This one is of several environments, as in Tianshou.
        """
        if self._num_envs > 1:
            raise NotImplementedError("a buffer of several environments takes no rows of another one: add() them")
        stack_num, buffer.stack_num = buffer.stack_num, 1
        try:
            added = [self.add(buffer[i])[0] for i in buffer.sample_indices(0)]
        finally:
            buffer.stack_num = stack_num
        return np.concatenate(added) if added else np.empty(0, np.int64)

    def reset(self, keep_statistics: bool = False) -> None:
        """Begins anew in memory of its own, with rows of the same fields. Other processes keep what was there."""
        self._begin()
        if not keep_statistics:
            self._forget_returns()
        if self.replay is not None:
            self.replay.close()
            self._open()

    # Drawing

    def sample(self, batch_size: int | None) -> tuple[Any, NDArray[Any]]:
        """Draws a batch with replacement; 0: everything, oldest first; None: everything, shuffled.

        Returns:
            The batch, and its rows' indexes, which remember the rows that were drawn.

        Raises:
            ValueError: There is nothing to draw.
        """
        if not batch_size or batch_size < 0 or self._avoids_short_stacks:
            indexes = self.sample_indices(batch_size)
            return self[indexes], indexes
        drawn = self._draw(batch_size)
        indexes = self._indexes_of(drawn)
        return self._batch_of(drawn, indexes), indexes

    @property
    def _avoids_short_stacks(self) -> bool:
        return self._sample_avail and self.stack_num > 1

    def _draw(self, batch_size: int) -> Any:
        if not self._size:
            raise ValueError("the buffer is empty: add some rows before you sample")
        assert self.replay is not None
        return draw(self.replay, batch_size)

    def _indexes_of(self, drawn: Any) -> Indexes:
        keys = drawn["key"].numpy()
        return Indexes.of(keys % self.maxsize, keys)

    def _batch_of(self, drawn: Any, index: NDArray[Any]) -> Any:
        """Returns rows as Tianshou's batch: stacked, with the observations that follow, and with what hooks added."""
        batch = as_batch({"obs_next": {}, "info": {}, "policy": {}} | {name: drawn[name] for name in self._spec})
        if self.stack_num > 1 and self._save_obs_next and "obs_next" in drawn:
            batch.obs_next = self.get(index, "obs_next")
        elif not self._save_obs_next:
            batch.obs_next = self.get(self.next(index), "obs")
        if self.stack_num > 1:
            batch.obs = self.get(index, "obs")
        for name in self._added_by_hooks():
            batch[name] = self._meta[name][index]
        return batch

    def _added_by_hooks(self) -> list[str]:
        there = self._meta.get_keys()
        return [] if len(there) == len(self._spec) else [name for name in there if name not in self._spec]

    def sample_indices(self, batch_size: int | None) -> NDArray[Any]:
        """Draws indexes only, as `sample` does; none where `batch_size` is negative."""
        if batch_size is None:
            return self._random_state.permutation(self.sample_indices(0))
        if batch_size <= 0 or self._avoids_short_stacks:
            return TianshouReplayBuffer.sample_indices(self, batch_size)
        return self._indexes_of(self._draw(batch_size))

    # Neighbours

    def __len__(self) -> int:
        """Returns the number of rows held."""
        return self._size

    def prev(self, index: int | NDArray[Any]) -> Any:
        """Returns the indexes of the rows before, in the same episode; a first row's is its own."""
        return self._links.before[index]

    def next(self, index: int | NDArray[Any]) -> Any:
        """Returns the indexes of the rows after, in the same episode; a last row's is its own."""
        return self._links.after[index]

    def unfinished_index(self) -> NDArray[Any]:
        """Returns the indexes of the newest rows of episodes under way, in the order of the environments."""
        return self._links.under_way(self._oldest_key)

    @property
    def _oldest_key(self) -> int:
        return 0 if self.replay is None else self.replay.next_key - self._size

    @property
    def subbuffer_edges(self) -> NDArray[Any]:
        """The whole buffer: environments share it."""
        return np.array([0, self.maxsize])

    def get_buffer_indices(self, start: int, stop: int) -> NDArray[Any]:
        """Returns the indexes of the rows from `start` to the one at `stop - 1`, which are of one environment.

        Raises:
            ValueError: The row at `stop - 1` does not come after that at `start` in one episode.
        """
        if self._num_envs == 1:
            return TianshouReplayBuffer.get_buffer_indices(self, start, stop)
        return self._links.between(start, stop - 1)

    def _keys_at(self, index: Any) -> NDArray[np.int64]:
        """Returns the keys of the rows that are at indexes now.

        Raises:
            IndexError: There is no row.
        """
        given = np.atleast_1d(np.asarray(index, np.int64))
        if len(given) and not 0 <= given.min() <= given.max() < self._size:  # they fill from 0 on
            bad = given[(given < 0) | (given >= self._size)][0]
            raise IndexError(f"index {bad} is out of range: there are {self._size} rows")
        oldest: int = self._oldest_key
        return oldest + (given - oldest) % self.maxsize

    # Files and copies

    def __getstate__(self) -> dict[str, Any]:
        """Returns the experience itself, never a handle to memory that will be gone."""
        state = self.__dict__.copy()
        meta = state.pop("_meta")
        for name in ("replay", "_writer"):
            state.pop(name, None)
        state["_extra"] = {name: meta[name] for name in self._added_by_hooks()}
        if self.replay is not None:
            file = io.BytesIO()
            self.replay.save(file)
            state["_saved"] = np.frombuffer(file.getvalue(), np.uint8)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved, extra = state.pop("_saved", None), state.pop("_extra")
        self.__dict__.update(state, replay=None, _meta=Batch())
        if saved is not None:
            self.replay = ReplayBuffer.load(io.BytesIO(saved.tobytes()), sampler=self._sampler())
            self._attach(self.replay)
        for name, value in extra.items():
            self._meta[name] = value

    def save_hdf5(self, path: str, compression: str | None = None) -> None:
        """Saves everything into an HDF5 file, which `load_hdf5` reads."""
        with h5py.File(path, "w") as file:
            to_hdf5(self.__getstate__(), file, compression=compression)

    @classmethod
    def from_data(cls, obs: Any, act: Any, rew: Any, terminated: Any, truncated: Any, done: Any, obs_next: Any) -> Self:
        """Returns a buffer that is filled with these columns, each `[n, ...]`.

        Raises:
            ValueError: Their lengths differ, or are 0.
        """
        columns = {"obs": obs, "act": act, "rew": rew, "terminated": terminated}
        columns |= {"truncated": truncated, "obs_next": obs_next}
        if {len(column) for column in columns.values()} != {len(done)}:
            raise ValueError(f"the columns have {sorted({len(c) for c in columns.values()})} rows: expected as many")
        made = cls(len(done))
        for i in range(len(done)):
            made.add(Batch({name: column[i] for name, column in columns.items()}))
        return made

    def set_batch(self, batch: Any) -> NoReturn:
        """Refuses: the rows lie in shared memory."""
        raise NotImplementedError("rows lie in shared memory, which no other batch can take the place of: add() them")

    def dropnull(self) -> NoReturn:
        """Refuses: rows stay where they are."""
        raise NotImplementedError("rows stay where they are: leave those with NaN out when you add()")


class SharedVectorReplayBuffer(SharedReplayBuffer, ReplayBufferManager):
    """Tianshou's `VectorReplayBuffer`: the rows of several environments in one memory.

    Environments share the places. So an index says nothing about the environment, and the oldest rows of all are
    overwritten first.

    Args:
        total_size: Rows that fit, those of all environments together; rounded up to a multiple of `buffer_num`.
        buffer_num: Environments.
        **options: As for `SharedReplayBuffer`.
    """

    def __init__(self, total_size: int, buffer_num: int, **options: Any) -> None:
        self.buffer_num = self._num_envs = checked_int("buffer_num", buffer_num, 1)
        super().__init__(rows_for(total_size, buffer_num), **options)


def rows_for(total_size: int, buffer_num: int) -> int:
    """Returns `total_size`, rounded up to a multiple of `buffer_num`."""
    return -(-checked_int("total_size", total_size, 1) // buffer_num) * buffer_num
