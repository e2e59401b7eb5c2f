"""Replay buffers in shared memory for Tianshou's collectors and off-policy trainers.

Tested with tianshou 2.0.1. `docs/coming_from_tianshou.md` says what to change in a program, and what differs.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from tianshou.data import Batch, ReplayBufferManager
from tianshou.data import PrioritizedReplayBuffer as TianshouPrioritizedReplayBuffer
from tianshou.data import ReplayBuffer as TianshouReplayBuffer
from tianshou.data.utils.converter import to_hdf5

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.compat.indexes import Indexes
from torchreplay.schema.samplers import Prioritized, Sampler, Uniform, value_of
from torchreplay.schema.spec import Field, Spec
from torchreplay.validation import checked_int

REQUIRED = ("obs", "act", "rew", "terminated", "truncated")
"""What Tianshou's `add` asks for, beside `done`, which it computes."""
NEVER = -1
"""The key of the row before, where no episode is under way."""
EPS = float(np.finfo(np.float32).eps)
"""What Tianshou adds to a priority."""


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
        self._seed, self._keep = random_seed, tuple(tuple(name.split("/")) for name in keep)
        self._spec: Spec = {}
        self.replay = None
        self._begin()
        self._forget_returns()

    def _begin(self) -> None:
        """Has no row be there, and no episode be under way."""
        self._insertion_idx = self._size = 0
        self._before, self._after = np.arange(self.maxsize), np.arange(self.maxsize)
        self.last_index = np.zeros(self._num_envs, np.int64)
        self._newest = [NEVER] * self._num_envs  # keys of the rows that the next ones follow on

    def _forget_returns(self) -> None:
        self._episodes = [_Episode() for _ in range(self._num_envs)]

    def _sampler(self) -> Sampler:
        return Uniform()

    def _open(self) -> ReplayBuffer:
        """Makes the memory for rows of the spec."""
        made = self.replay = ReplayBuffer(self._spec, self.maxsize, sampler=self._sampler(), seed=self._seed)
        self._attach(made)
        return made

    def _attach(self, replay: ReplayBuffer) -> None:
        self._writer = replay.writer()
        self._meta = _as_batch(replay.storage)

    # Writing

    def add(
        self, batch: Any, buffer_ids: NDArray[Any] | list[int] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Adds a step.

        Args:
            batch: `obs`, `act`, `rew`, `terminated`, `truncated` and, unless it is ignored, `obs_next`: each with a
                leading dimension of environments where `buffer_ids` is given, or the buffer has several.
            buffer_ids: The environments that the steps are of.

        Returns:
            The rows' indexes; the returns and the lengths of episodes that end here, 0 for others; the indexes at which
            the episodes have begun. Each `[n]`.

        Raises:
            ValueError: An entry is missing, of another shape, or does not cast to its field; nothing is added.
            RuntimeError: Another process has written into the memory.
        """
        envs, rows = self._envs_of(buffer_ids), self._rows_of(batch)
        one_row = buffer_ids is None and self._num_envs == 1
        rew, done = rows["rew"], rows["done"]
        if not one_row and (done.ndim != 1 or len(done) != len(envs)):
            raise ValueError(f"the flags have shape {done.shape} for {len(envs)} environments: expected one for each")
        if self.replay is None:
            self._spec = _spec_of(rows, 0 if one_row else 1)
            self._open()
        if one_row:
            return self._count([self._writer.append(**rows)], envs, [rew], [bool(done)])
        return self._count(self._writer.extend(**rows).tolist(), envs, rew, done.tolist())

    def _envs_of(self, buffer_ids: NDArray[Any] | list[int] | None) -> list[int]:
        envs = list(range(self._num_envs)) if buffer_ids is None else np.asarray(buffer_ids, np.int64).tolist()
        if not envs or min(envs) < 0 or max(envs) >= self._num_envs:
            raise ValueError(f"buffer_ids are {buffer_ids}: expected numbers from 0 to {self._num_envs - 1}")
        return envs

    def _rows_of(self, batch: Any) -> dict[str, Any]:
        """Returns the fields of the rows, and their flags as bools."""
        there = batch.get_keys()
        missing = [name for name in REQUIRED if name not in there]
        if missing:
            raise ValueError(f"the batch has no {missing[0]!r}: expected {', '.join(REQUIRED)}")
        observations = ("obs", "obs_next") if self._save_obs_next and "obs_next" in there else ("obs",)
        rows = {name: _plain(batch[name]) for name in observations}
        if self._save_only_last_obs:
            rows = {name: self._last_frame(value, np.ndim(batch.rew)) for name, value in rows.items()}
        rows |= {"act": _plain(batch.act), "rew": np.asarray(batch.rew)}
        for flag in ("terminated", "truncated"):
            rows[flag] = np.asarray(batch[flag], bool)
        rows["done"] = rows["terminated"] | rows["truncated"]
        for group, *path in self._keep:
            _put(rows.setdefault(group, {}), path, _entry(batch, (group, *path)))
        return rows

    def _last_frame(self, value: Any, leading: int) -> Any:
        if isinstance(value, dict):
            return {name: self._last_frame(part, leading) for name, part in value.items()}
        return value[:, -1] if leading else value[-1]

    def _count(
        self, keys: list[int], envs: list[int], rew: Any, done: list[bool]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Links new rows to those before them, and returns what `add` does."""
        if keys[0] % self.maxsize != self._insertion_idx:
            raise RuntimeError(
                "another process has written into this buffer: only add() may, as rows follow each other"
            )
        size, figures = self.maxsize, []
        for key, env, reward, ended in zip(keys, envs, rew, done, strict=True):
            index = self.last_index[env] = key % size
            newest = self._newest[env]
            self._link(index, newest % size if newest > max(key - size, NEVER) else index)
            self._newest[env] = NEVER if ended else key
            figures.append((index, *self._episodes[env].step(index, reward, ended)))
        self._insertion_idx = (keys[-1] + 1) % size
        self._size = min(self._size + len(keys), size)
        indexes, returns, lengths, starts = zip(*figures, strict=True)
        return np.array(indexes), np.array(returns), np.array(lengths), np.array(starts)

    def _link(self, index: int, before: int) -> None:
        """Has a row follow on the one at `before`, which is its own index where an episode begins."""
        orphan = self._after[index]  # followed on the row that is overwritten
        self._before[orphan] = orphan
        self._after[index] = index
        self._before[index] = before
        self._after[before] = index

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
        return self.replay.sample(batch_size)

    def _indexes_of(self, drawn: Any) -> Indexes:
        keys = drawn["key"].numpy()
        return Indexes.of(keys % self.maxsize, keys)

    def _batch_of(self, drawn: Any, index: NDArray[Any]) -> Any:
        """Returns rows as Tianshou's batch: stacked, with the observations that follow, and with what hooks added."""
        batch = _as_batch({"obs_next": {}, "info": {}, "policy": {}} | {name: drawn[name] for name in self._spec})
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
        return self._before[index]

    def next(self, index: int | NDArray[Any]) -> Any:
        """Returns the indexes of the rows after, in the same episode; a last row's is its own."""
        return self._after[index]

    def unfinished_index(self) -> NDArray[Any]:
        """Returns the indexes of the newest rows of episodes under way, in the order of the environments."""
        oldest = max(self._oldest_key, 0)
        return np.array([key % self.maxsize for key in self._newest if key >= oldest], np.int64)

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
        found = [stop - 1]
        while found[-1] != start:
            before = int(self._before[found[-1]])
            if before == found[-1]:
                raise ValueError(f"the row at {stop - 1} does not come after the one at {start} in one episode")
            found.append(before)
        return np.array(found[::-1])

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
        super().__init__(_rows_for(total_size, buffer_num), **options)


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
        return Prioritized(self._alpha, self._beta_now, EPS)

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

    def update_weight(self, index: NDArray[Any], new_weight: NDArray[Any] | torch.Tensor) -> None:
        """Feeds TD errors back; those of rows that were overwritten since the draw are dropped.

        Args:
            index: What `sample` returned, or indexes of rows that are there now, `[n]`.
            new_weight: TD errors, `[n]` or `[n, 1]`, on any device; their absolute values are taken.

        Raises:
            ValueError: There are not as many as indexes, or some are NaN or infinite; nothing is applied.
            IndexError: There is no row at an index.
        """
        assert self.replay is not None
        keys = index.intact_keys() if isinstance(index, Indexes) else None
        if keys is None:
            keys = self._keys_at(index)
        self.replay.update_priorities(keys, torch.as_tensor(new_weight).detach().reshape(-1))

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
        super().__init__(_rows_for(total_size, buffer_num), **options)


class _Episode:
    """The return and the length of an episode under way."""

    def __init__(self) -> None:
        self._start, self._length, self._return = 0, 0, 0.0

    def step(self, index: int, reward: Any, ended: bool) -> tuple[Any, int, int]:
        """Counts a step at `index`; returns the return and the length, 0 unless it ends, and where it has begun."""
        if not self._length:
            self._start = index
        self._length, self._return = self._length + 1, self._return + reward
        if not ended:
            return self._return * 0, 0, self._start
        found = self._return, self._length, self._start
        self._length, self._return = 0, 0.0
        return found


class _Beta:
    """A schedule that somebody sets."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, step: int) -> float:
        return self.value


def _rows_for(total_size: int, buffer_num: int) -> int:
    """Returns `total_size`, rounded up to a multiple of `buffer_num`."""
    return -(-checked_int("total_size", total_size, 1) // buffer_num) * buffer_num


def _plain(value: Any) -> Any:
    """Returns nested dicts for nested batches, and arrays or tensors as they are."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value
    if isinstance(value, (Batch, dict)):
        return {name: _plain(part) for name, part in value.items()}
    return np.asarray(value)


def _as_batch(fields: dict[str, Any]) -> Any:
    """Returns tensors as a batch of arrays over the same memory."""
    made = Batch()
    vars(made).update(  # as Tianshou does: its constructor looks at each value for microseconds
        {name: _as_batch(value) if isinstance(value, dict) else value.numpy() for name, value in fields.items()}
    )
    return made


def _spec_of(rows: dict[str, Any], leading: int) -> Spec:
    """Returns the spec of rows with so many leading dimensions; rewards are float64, as in Tianshou."""

    def field(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: field(part) for name, part in value.items()}
        return Field(tuple(value.shape[leading:]), value.dtype)

    spec = {name: field(value) for name, value in rows.items()}
    return spec | {"rew": Field(spec["rew"].shape, torch.float64)}


def _entry(batch: Any, path: tuple[str, ...]) -> Any:
    """Returns an entry of nested batches; raises ValueError where there is none."""
    value = batch
    for name in path:
        if not isinstance(value, (Batch, dict)) or name not in value:
            raise ValueError(f"the batch has no {'/'.join(path)!r}, which keep= names: it must come with every step")
        value = value[name]
    return _plain(value)


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
