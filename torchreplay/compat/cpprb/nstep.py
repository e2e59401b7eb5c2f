"""The layout of `Nstep`: rows hold single steps, and `torchreplay.Transitions` sums when it draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import torchreplay as tr
from torchreplay.compat.cpprb.columns import Column, equal_rows, names_in, required
from torchreplay.compat.cpprb.layout import ORDINAL, TERMINATED, TRUNCATED, Layout, Stream, Tally, rows_with_spare

REWARDS = "summed rewards"
"""The field of all rewards side by side: a view sums one field."""

NOTHING = "nothing observed"
"""The field that stands for the next values where `Nstep` names none: a view needs an observation."""


class NstepStream(Stream):
    """Writes the steps of episodes.

    Args:
        buffer: Where to.
        layout: How.
        tally: Counts.
    """

    def __init__(self, buffer: tr.ReplayBuffer, layout: NstepLayout, tally: Tally) -> None:
        self._buffer, self._layout, self._writer, self._tally = buffer, layout, buffer.writer(), tally
        self._key: int | None = None  # of the row before, within an episode
        self._open: deque[tuple[int, float | None]] = deque()  # transitions that lack steps, and their priorities

    def add(self, values: Mapping[str, Any], priorities: NDArray[Any] | None) -> tuple[int | None, int]:
        """Writes steps. A transition can be drawn when its last step is there, or the episode's end."""
        rows = self._layout.as_fields(values, priorities)
        n, before = len(rows[TERMINATED]), self._tally.complete
        complete = []
        for i in range(n):
            self._step({name: array[i] for name, array in rows.items()}, None if priorities is None else priorities[i])
            complete += self._complete(self._layout.steps)
        self._settle(complete)
        return (before if complete else None), n

    def add_finished(self, values: Mapping[str, Any]) -> None:
        """Writes transitions whose rewards are sums already: each as an episode of its own."""
        self.end_episode()
        rows = self._layout.as_fields(values, None)
        for i in range(len(rows[TERMINATED])):
            self._step({name: array[i] for name, array in rows.items()}, None)
            self._end()

    def end_episode(self) -> None:
        """Ends the episode by truncation: the transitions that lack steps end with the last one there is."""
        self._settle(self._end())

    def _step(self, fields: dict[str, Any], priority: float | None) -> None:
        if self._key is None:
            self._key = int(self._writer.reset(**self._layout.before_the_first()))
        self._open.append((self._key, priority))
        self._key = int(self._writer.step(**fields, **{ORDINAL: self._tally.begun}))
        self._tally.begun += 1
        if fields[TERMINATED]:
            self._key = None

    def _complete(self, steps: int) -> list[tuple[int, float | None]]:
        """Takes out the transitions that have all of their steps, or whose episode has ended."""
        least = steps if self._key is not None else 1
        complete = [self._open.popleft() for _ in range(len(self._open) - least + 1)]
        self._tally.complete += len(complete)
        return complete

    def _end(self) -> list[tuple[int, float | None]]:
        if self._key is not None:
            self._writer.end_episode()
            self._key = None
        return self._complete(1)

    def _settle(self, complete: list[tuple[int, float | None]]) -> None:
        """Gives transitions the priorities that they were added with."""
        given = [(key, priority) for key, priority in complete if priority is not None]
        if given:
            keys, priorities = zip(*given, strict=True)
            self._buffer.update_priorities(np.array(keys), np.array(priorities, np.float32))


class NstepLayout(Layout):
    """Rows hold single steps, from which n-step transitions are made when they are drawn.

    Args:
        columns: What `env_dict` names; `done` among them.
        Nstep: cpprb's dict: `size`, `gamma`, `rew`, `next`.

    Attributes:
        steps: n.

    Raises:
        KeyError: `size` or `done` is missing, or a name is not in `env_dict`.
    """

    def __init__(self, columns: Sequence[Column], Nstep: Mapping[str, Any]) -> None:  # noqa: N803  # cpprb's name
        self.columns = columns
        self.steps = int(Nstep["size"])
        self._gamma = float(Nstep.get("gamma", 0.99))
        self._rewards = tuple(required(columns, names_in(Nstep.get("rew")), "Nstep['rew']").values())
        self._next = tuple(required(columns, names_in(Nstep.get("next")), "Nstep['next']").values())
        self._done = required(columns, ["done"], "Nstep")["done"]
        ends = np.cumsum([0, *(int(np.prod(column.shape)) for column in self._rewards)]).tolist()
        self._parts = [slice(*pair) for pair in pairwise(ends)]  # of each column within the field of rewards
        others = {column.name for column in (*self._rewards, *self._next, self._done)}
        self._plain = tuple(column for column in columns if column.name not in others)

    def spec(self) -> dict[str, tr.Field]:
        """Returns the fields of a step."""
        wide = any(column.dtype.itemsize > np.dtype(np.float32).itemsize for column in self._rewards)
        width = self._parts[-1].stop if self._parts else 1
        observed = {column.field: column.as_field() for column in self._next}
        return {
            **{column.field: column.as_field() for column in self._plain},
            **(observed or {NOTHING: tr.Field((), bool)}),
            REWARDS: tr.Field(width, torch.float64 if wide else torch.float32),
            TERMINATED: tr.Field((), bool),
            TRUNCATED: tr.Field((), bool),
            ORDINAL: tr.Field((), "int64"),
        }

    def view(self) -> tr.Transitions:
        """Returns n-step transitions."""
        observation = tuple(column.field for column in self._next) or NOTHING
        return tr.Transitions(self.steps, self._gamma, observation, REWARDS, TERMINATED, TRUNCATED)

    def rows(self, size: int) -> int:
        """Returns how many rows hold `size` transitions, and the steps that complete none yet."""
        return rows_with_spare(size, 1) + self.steps

    def as_fields(self, values: Mapping[str, Any], priorities: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        """Returns what was given by field, `[n, ...]`, in the fields' dtypes."""
        rows = equal_rows(self.columns, values, priorities)
        n = len(rows[self._done.name])
        fields = {c.field: rows[c.name].astype(c.dtype, copy=False) for c in (*self._plain, *self._next)}
        if not self._next:
            fields[NOTHING] = np.zeros(n, bool)
        rewards = [rows[column.name].reshape(n, -1).astype(np.float64) for column in self._rewards]
        fields[REWARDS] = np.concatenate(rewards or [np.zeros((n, 1))], axis=1)
        fields[TERMINATED] = rows[self._done.name].reshape(n) != 0
        fields[TRUNCATED] = np.zeros(n, bool)
        return fields

    def before_the_first(self) -> dict[str, Any]:
        """Returns what stands in the row before an episode's first step: it is the next value of no step."""
        if not self._next:
            return {NOTHING: False}
        return {column.field: np.zeros(column.stored_shape, column.dtype) for column in self._next}

    def read(self, batch: tr.ReplayBatch) -> dict[str, NDArray[Any]]:
        """Returns the columns: rewards summed, next values and `done` of the last step summed."""
        found = {column.name: column.shown(batch[column.field].numpy()) for column in self._plain}
        found |= {column.name: column.shown(batch[f"next_{column.field}"].numpy()) for column in self._next}
        rewards = batch[REWARDS].numpy()
        for column, part in zip(self._rewards, self._parts, strict=True):
            found[column.name] = rewards[:, part].reshape(-1, *column.shape).astype(column.dtype, copy=False)
        found[self._done.name] = self._done.shown(batch[TERMINATED].numpy().astype(self._done.dtype))
        return {column.name: found[column.name] for column in self.columns}

    def ordinals(self, batch: tr.ReplayBatch) -> NDArray[np.int64]:
        """Returns the ordinals of the transitions."""
        return batch[ORDINAL].numpy()  # type: ignore[no-any-return]

    def stream(self, buffer: tr.ReplayBuffer, tally: Tally) -> NstepStream:
        """Returns what writes to `buffer` from one thread, and counts in `tally`."""
        return NstepStream(buffer, self, tally)
