"""The buffers of one process: `ReplayBuffer`, `PrioritizedReplayBuffer`, `ReverseReplayBuffer`, `create_buffer`."""

from __future__ import annotations

import operator
import threading
import warnings
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

import torchreplay as tr
from torchreplay.buffer.replay_buffer import draw
from torchreplay.compat.cpprb.columns import Column, columns_of, names_in
from torchreplay.compat.cpprb.layout import Layout, Stream, Tally
from torchreplay.compat.cpprb.nstep import NstepLayout
from torchreplay.compat.cpprb.origin import Origin
from torchreplay.compat.cpprb.rows import RowLayout, RowStream
from torchreplay.compat.cpprb.saving import load_columns, save_columns
from torchreplay.compat.cpprb.windows import WindowLayout
from torchreplay.compat.indexes import Indexes

Batch = dict[str, NDArray[Any]]


class ReplayBuffer:
    """Uniform replay of what `env_dict` names: cpprb's `ReplayBuffer` over a `torchreplay.ReplayBuffer`.

    Batches are dicts of NumPy arrays `[B, *shape]`, their memory is their own.

    Args:
        size: Transitions that fit.
        env_dict: Names to dicts with `"shape"` (default 1) and `"dtype"`.
        next_of: Name or names whose next values are drawn as `next_<name>` and share their memory.
        stack_compress: Name or names of stacks, the newest frame last on the last axis; each frame is stored once.
        default_dtype: Of columns that name none; None: float32.
        Nstep: `{"size": n, "rew": names, "gamma": 0.99, "next": names}` for n-step transitions; takes `done`.
        mmap_prefix: The buffer lies in the file `<mmap_prefix>.replay` and not in memory. One that is there goes.
        **unknown: Warned about, and ignored.

    Attributes:
        replay: The `torchreplay.ReplayBuffer` beneath.

    Raises:
        ValueError: A size, shape, dtype or number is out of range.
        KeyError: A name is not in `env_dict`.
        MemoryError: The machine has too little memory left.
    """

    replay: tr.ReplayBuffer

    def __init__(
        self,
        size: float,
        env_dict: dict[str, Any] | None = None,
        *,
        next_of: Any = None,
        stack_compress: Any = None,
        default_dtype: Any = None,
        Nstep: dict[str, Any] | None = None,  # noqa: N803  # cpprb's name
        mmap_prefix: str | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            warnings.warn(f"{type(self).__name__} has no arguments {sorted(unknown)}: they do nothing", stacklevel=2)
        columns = columns_of(env_dict, default_dtype)
        layout = layout_of(columns, names_in(next_of), names_in(stack_compress), Nstep)
        self._open(int(size), layout, tr.Uniform(), mmap_prefix)
        self._nstep = bool(Nstep)

    def _open(self, size: int, layout: Layout, sampler: Any, mmap_prefix: str | None) -> None:
        self._size, self._layout = size, layout
        path = None if mmap_prefix is None else Path(f"{mmap_prefix}.replay")
        if path is not None:
            path.unlink(missing_ok=True)
        # So that numpy.random.seed makes a program repeat itself, as it does with cpprb.
        seed = int(np.random.randint(0, 1 << 62))  # noqa: NPY002  # the generator that cpprb draws from
        self.replay = tr.ReplayBuffer(
            layout.spec(), layout.rows(size), sampler=sampler, view=layout.view(), path=path, seed=seed
        )
        self._origin = Origin()
        self._attach()

    def _attach(self) -> None:
        self._plain = isinstance(self._layout, RowLayout)
        self._begin()

    def _begin(self) -> None:
        """Has this process's episodes and counts begin."""
        self._local, self._tally, self._episode_len = threading.local(), Tally(), 0

    def _stream(self) -> Stream:
        """Returns what writes from this thread."""
        try:
            stream: Stream = self._local.stream
        except AttributeError:
            stream = self._local.stream = self._layout.stream(self.replay, self._tally)
        return stream

    # Writing

    def add(self, **values: Any) -> int | None:
        """Adds one transition, or several of the same number of rows.

        Args:
            **values: By column. What `env_dict` does not name is ignored.

        Returns:
            The index of the first one; None where no transition can be drawn yet, as with `Nstep`, and on other nodes
            of a Ray cluster.

        Raises:
            KeyError: A column is missing.
            ValueError: A shape does not fit, or columns have different numbers of rows. Nothing is added.
        """
        return self._add(values, None)

    def _add(self, values: dict[str, Any], priorities: Any) -> int | None:
        first, n = self._write(self._stream(), values, priorities)
        self._episode_len += n
        return None if first is None else (first - self._first_ordinal) % self._size

    def _write(self, stream: Stream, values: dict[str, Any], priorities: Any) -> tuple[int | None, int]:
        if stream.__class__ is RowStream and values.keys() == stream.names:
            with suppress(ValueError):  # several rows, or values that are not just those of the fields
                return stream.append(priority=priorities, **values), 1
        return stream.add(values, None if priorities is None else np.ravel(priorities))

    @property
    def _first_ordinal(self) -> int:
        """The ordinal, or key, that has index 0."""
        return self._origin.first if self._plain else 0

    def on_episode_end(self) -> None:
        """Ends the episode under way. Call it at each end: an episode may end without `done`."""
        self._stream().end_episode()
        self._episode_len = 0

    def clear(self) -> None:
        """Takes all transitions away, for every process; indexes start at 0 again."""
        self.replay.clear()
        following = self.replay.next_key
        others = self.replay.keys(rows=True)[:1].tolist()  # that other processes have begun to write meanwhile
        self._origin.move(min([following, *others]))
        self._episode_len = 0
        if not self._plain:
            self._begin()

    # Drawing

    def sample(self, batch_size: int) -> Batch:
        """Draws transitions uniformly, with replacement.

        Raises:
            ValueError: There is no transition, or `batch_size` is negative.
        """
        return self._layout.read(self._draw(batch_size, None))

    def _draw(self, batch_size: int, beta: float | None) -> tr.ReplayBatch:
        if batch_size.__class__ is not int:
            batch_size = operator.index(batch_size)
        if not self._count():
            raise ValueError("the buffer holds no transition that can be drawn: add some first")
        if batch_size == 0:
            return self.replay.gather(np.empty(0, np.int64))
        return draw(self.replay, batch_size, beta)

    def get_all_transitions(self, shuffle: bool = False) -> Batch:
        """Returns all transitions, in the order of their indexes or, where asked for, shuffled."""
        keys, slots = self._held()
        order = np.random.permutation(len(keys)) if shuffle else np.argsort(slots)  # noqa: NPY002  # as cpprb
        return self._layout.read(self.replay.gather(keys[order]))

    def _held(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the keys of the transitions held, oldest first, and their indexes. O(size)."""
        keys = self.replay.keys().numpy()[-self._size :]
        ordinals = keys - self._origin.first if self._plain else self._tally.complete - len(keys) + np.arange(len(keys))
        return keys, ordinals % self._size

    def _encode_sample(self, idx: Any) -> Batch:
        """Returns the transitions at given indexes: private in cpprb as well, and used by its users."""
        return self._layout.read(self.replay.gather(self._keys_at(idx), missing="raise"))

    def _keys_at(self, indexes: Any) -> NDArray[np.int64]:
        """Returns the keys of the rows that the indexes name.

        Indexes of a batch name the rows that were drawn. Plain numbers name the rows that are there now.

        Raises:
            TypeError: The indexes are no numbers.
            ValueError: One is out of range.
        """
        if isinstance(indexes, Indexes):
            drawn = indexes.intact_keys()
            if drawn is not None:
                return drawn
        given = np.ravel(np.asarray(indexes))
        if given.dtype.kind not in "biuf":
            raise TypeError(f"indexes are {indexes!r:.200}: expected numbers")
        slots = given.astype(np.int64)
        inside = (slots >= 0) & (slots < self._size)
        keys = self._newest(np.where(inside, slots, 0))
        bad = np.flatnonzero(~inside | (keys < 0))
        if len(bad):
            raise ValueError(f"index {given[bad[0]]} is out of range: 0 to {self.get_stored_size() - 1} are in use")
        return keys

    def _newest(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the keys of the rows that are in `slots` now; -1 where there is none."""
        if self._plain:
            written = self.replay.next_key - self._origin.first
            newest = slots + (written - 1 - slots) // self._size * self._size
            return np.where(newest < 0, -1, newest + self._origin.first)
        table = np.full(self._size, -1)
        keys, places = self._held()
        table[places] = keys
        return table[slots]

    # Figures

    def _count(self) -> int:
        return self.replay.next_key - self._origin.first if self._plain else self.replay.num_items

    def get_stored_size(self) -> int:
        """Returns how many transitions can be drawn."""
        return min(self._count(), self._size)

    def get_buffer_size(self) -> int:
        """Returns how many transitions fit."""
        return self._size

    def get_next_index(self) -> int:
        """Returns the index that the next transition gets."""
        return (self.replay.next_key - self._origin.first if self._plain else self._tally.complete) % self._size

    def get_current_episode_len(self) -> int:
        """Returns how many transitions this process has added to its episode under way."""
        return self._episode_len

    def is_Nstep(self) -> bool:  # noqa: N802  # cpprb's name
        """Returns whether transitions are n-step ones."""
        return self._nstep

    # Files

    def save_transitions(self, file: str | Path | IO[bytes], *, safe: bool = True) -> None:
        """Saves all transitions, without priorities; `replay.save` saves everything.

        Args:
            file: Its name, or a file that is open for writing.
            safe: Without effect: files are always of the kind that later versions can read, and hold no pickles.
        """
        save_columns(file, self.get_all_transitions(), self._nstep)

    def load_transitions(self, file: str | Path | IO[bytes]) -> None:
        """Adds the transitions of a file that `save_transitions` wrote, or cpprb's own.

        Raises:
            ValueError: It is no such file, or of n-step transitions and this buffer has none, or the other way round.
        """
        self._stream().add_finished(load_columns(file, self._nstep))

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        made_by_attach = ("_local", "_tally", "_plain", "_episode_len")
        return {name: value for name, value in vars(self).items() if name not in made_by_attach}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._attach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(deepcopy(self.__getstate__(), memo))
        return made

    def __reduce__(self) -> Any:
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} is not pickled, as in cpprb: MP{kind} is for several processes, and save_transitions for files"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_stored_size():,} of {self._size:,} transitions)"


class PrioritizedReplayBuffer(ReplayBuffer):
    """Prioritized replay: cpprb's `PrioritizedReplayBuffer` over a `torchreplay.ReplayBuffer`.

    Args:
        size: Transitions that fit.
        env_dict: As for `ReplayBuffer`.
        alpha: Exponent of the priorities.
        eps: What is added to each.
        check_for_update: Whether plain numbers as indexes leave alone what was added since the last `sample`. Indexes
            of a batch always name the rows that were drawn, and no others.
        **options: As for `ReplayBuffer`.
    """

    def __init__(
        self,
        size: float,
        env_dict: dict[str, Any] | None = None,
        *,
        alpha: float = 0.6,
        eps: float = 1e-4,
        check_for_update: bool = False,
        **options: Any,
    ) -> None:
        self._sampler = tr.Prioritized(alpha, eps=eps or float(np.finfo(np.float32).tiny), initial="max_seen")
        self._check, self._drawn_before = check_for_update, 0
        super().__init__(size, env_dict, **options)

    def _open(self, size: int, layout: Layout, sampler: Any, mmap_prefix: str | None) -> None:
        super()._open(size, layout, self._sampler, mmap_prefix)

    def add(self, *, priorities: Any = None, **values: Any) -> int | None:
        """Adds transitions, as `ReplayBuffer.add`.

        Args:
            priorities: One for each; None: the largest so far.
            **values: By column.

        Raises:
            ValueError: Besides, priorities are negative, NaN, infinite or not one for each.
        """
        if priorities is not None and not (priorities.__class__ is float and priorities >= 0):
            priorities = checked_priorities(priorities)
            if len(priorities) == 1:
                priorities = float(priorities[0])
        return self._add(values, priorities)

    def sample(self, batch_size: int, beta: float = 0.4) -> Batch:
        """Draws transitions by their priorities, with replacement.

        Returns:
            The columns, `weights` (float32 `[B]`, at most 1) and `indexes` (int64 `[B]`, which remember their rows).

        Raises:
            ValueError: There is no transition, or an argument is negative.
        """
        self._drawn_before = self.replay.next_key
        batch = self._draw(batch_size, beta)
        found = self._layout.read(batch)
        slots = (self._layout.ordinals(batch) - self._first_ordinal) % self._size
        found["weights"] = batch["weight"].numpy()
        found["indexes"] = Indexes.of(slots, batch["key"].numpy())
        return found

    def update_priorities(self, indexes: Any, priorities: Any) -> None:
        """Gives transitions new priorities.

        Args:
            indexes: Those of a batch: rows that were overwritten since are left out. Or plain numbers: what is there.
            priorities: As many.

        Raises:
            TypeError: One of them is None.
            ValueError: An index is out of range, a priority is negative, NaN or infinite, or there are not as many of
                them. Nothing is done.
        """
        if priorities is None or indexes is None:
            raise TypeError("indexes and priorities must not be None")
        checked, keys = checked_priorities(priorities), self._keys_at(indexes)
        if len(checked) != len(keys):
            raise ValueError(f"there are {len(checked)} priorities for {len(keys)} indexes: expected one each")
        if self._check and not isinstance(indexes, Indexes):
            old = keys < self._drawn_before
            keys, checked = keys[old], checked[old]
        if len(keys):
            self.replay.update_priorities(keys, checked)

    def get_max_priority(self) -> float:
        """Returns the largest priority so far; 1 at first, and after `clear`."""
        return float(self.replay.stats().priority_max)


class ReverseReplayBuffer(ReplayBuffer):
    """Draws in reverse order of time: cpprb's `ReverseReplayBuffer` over `torchreplay.Reverse`.

    Args:
        size: Transitions that fit.
        env_dict: As for `ReplayBuffer`.
        stride: Transitions between two of a batch.
        **options: As for `ReplayBuffer`.
    """

    def __init__(
        self, size: float, env_dict: dict[str, Any] | None = None, *, stride: int = 300, **options: Any
    ) -> None:
        super().__init__(size, env_dict, **options)
        self._reverse = tr.Reverse(self.replay, stride)

    def sample(self, batch_size: int) -> Batch:
        """Draws the next transitions.

        Raises:
            IndexError: There is no transition.
        """
        if not self._count():
            raise IndexError("the buffer holds no transition that can be drawn: add some first")
        return self._layout.read(self._reverse.sample(batch_size))

    def clear(self) -> None:
        """Does what `ReplayBuffer.clear` does; the next batch starts at the newest transition."""
        super().clear()
        self._reverse = tr.Reverse(self.replay, self._reverse.stride)


def checked_priorities(priorities: Any) -> NDArray[np.float32]:
    """Returns priorities as float32 `[n]`.

    Raises:
        ValueError: One is negative or NaN, or infinite.
    """
    checked = np.ravel(np.asarray(priorities, np.float32))
    if len(checked) and not (checked.min() >= 0 and checked.max() < np.inf):
        first = int(np.argmin((checked >= 0) & (checked < np.inf)))
        raise ValueError(f"priority {checked[first]} at place {first}: expected finite numbers >= 0; nothing is done")
    return checked


def layout_of(
    columns: tuple[Column, ...],
    next_of: tuple[str, ...],
    stack_compress: tuple[str, ...],
    Nstep: dict[str, Any] | None,  # noqa: N803  # cpprb's name
) -> Layout:
    """Returns how transitions lie in rows."""
    if Nstep:
        known = {column.name: column for column in columns}
        ahead = [Column(f"next_{name}", known[name].shape, known[name].dtype) for name in next_of]
        return NstepLayout((*(c for c in ahead if c.name not in known), *columns), Nstep)
    stacks = tuple(c.name for c in columns if c.name in stack_compress and c.shape != (1,))
    if next_of or stacks or set(stack_compress) - {column.name for column in columns}:
        return WindowLayout(columns, next_of, stacks or stack_compress)
    return RowLayout(columns)


def create_buffer(
    size: float, env_dict: dict[str, Any] | None = None, *, prioritized: bool = False, **options: Any
) -> ReplayBuffer:
    """Returns a `PrioritizedReplayBuffer` or a `ReplayBuffer`."""
    return (PrioritizedReplayBuffer if prioritized else ReplayBuffer)(size, env_dict, **options)
