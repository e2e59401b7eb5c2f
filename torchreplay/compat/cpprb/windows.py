"""The layout of `next_of` and `stack_compress`: observations and frames are stored once.

A transition's row holds its values and one frame: of the next observation for columns of `next_of`, else the newest of
the stack. The K rows before hold the other frames, K being the largest stack. So a transition is a window of K + 1
rows, which `torchreplay.Sequences` draws. An episode begins with K rows that hold the frames of its first stack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torchreplay as tr
from torchreplay.compat.cpprb.columns import Column, equal_rows, required
from torchreplay.compat.cpprb.layout import ORDINAL, TERMINATED, TRUNCATED, Layout, Stream, Tally, rows_with_spare


@dataclass(frozen=True, slots=True)
class Shared:
    """A column whose values share rows with those of the transitions before and after.

    Attributes:
        column: The column.
        frames: In its stack; 0 where it is none.
        ahead: Whether a row holds the next observation, `next_<name>`, rather than the transition's own.
    """

    column: Column
    frames: int
    ahead: bool

    @property
    def next_name(self) -> str:
        """The name of the next observation."""
        return f"next_{self.column.name}"

    def field(self) -> tr.Field:
        """Returns the field of one frame."""
        shape = self.column.shape[:-1] if self.frames else self.column.stored_shape
        return tr.Field(shape, self.column.dtype)

    def frame(self, value: NDArray[Any], place: int) -> NDArray[Any]:
        """Returns a frame of a value; -1 is the newest, and the oldest stands for those before it."""
        return value[..., max(place, -self.frames)] if self.frames else value

    def newest(self, row: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Returns the frame that the row of a transition holds."""
        return self.frame(row[self.next_name if self.ahead else self.column.name], -1)

    def follows(self, row: Mapping[str, NDArray[Any]], before: Mapping[str, NDArray[Any]]) -> bool:
        """Returns whether a transition goes on where the one before has ended."""
        now = row[self.column.name]
        if self.ahead:
            return np.array_equal(now, before[self.next_name])
        return np.array_equal(now[..., :-1], before[self.column.name][..., 1:])

    def part(self, window: NDArray[Any], end: int) -> NDArray[Any]:
        """Returns the values `[n, *shape]` whose newest frame lies in row `end` of the windows."""
        if not self.frames:
            return self.column.shown(window[:, end])
        return np.moveaxis(window[:, end + 1 - self.frames : end + 1], 1, -1)


class WindowStream(Stream):
    """Writes the rows of transitions that follow each other.

    Args:
        buffer: Where to.
        layout: How.
        tally: Counts.
    """

    def __init__(self, buffer: tr.ReplayBuffer, layout: WindowLayout, tally: Tally) -> None:
        self._buffer, self._layout, self._writer, self._tally = buffer, layout, buffer.writer(), tally
        self._before: dict[str, NDArray[Any]] | None = None  # the transition before
        self._keys: deque[int] = deque(maxlen=layout.depth + 1)

    def add(self, values: Mapping[str, Any], priorities: NDArray[Any] | None) -> tuple[int | None, int]:
        """Writes transitions. One that does not go on where the one before has ended begins an episode."""
        columns = self._layout.given
        arrays = equal_rows(columns, values, priorities)
        cast = {column.name: column.cast(arrays[column.name]) for column in columns}
        n = len(cast[columns[-1].name])
        anchors = [self._add_row({name: array[i].copy() for name, array in cast.items()}) for i in range(n)]
        if priorities is not None and anchors:
            self._buffer.update_priorities(np.array(anchors), priorities)
        return (self._tally.complete - n if n else None), n

    def end_episode(self) -> None:
        """Has the next transition begin an episode."""
        self._before = None

    def _add_row(self, row: dict[str, NDArray[Any]]) -> int:
        shared, before = self._layout.shared, self._before
        if before is None or not all(one.follows(row, before) for one in shared):
            self._begin(row)
        self._step(row, {one.column.field: one.newest(row) for one in shared})
        self._before = row
        self._tally.complete += 1
        return self._keys[0]

    def _begin(self, row: dict[str, NDArray[Any]]) -> None:
        """Writes the rows before an episode's first transition."""
        depth = self._layout.depth
        for place in range(-depth, 0):
            frames = {
                one.column.field: one.frame(row[one.column.name], place - (not one.ahead))
                if one.frames
                else row[one.column.name]
                for one in self._layout.shared
            }
            if place == -depth:
                self._keys.append(int(self._writer.reset(**frames)))
            else:
                self._step(row, frames)

    def _step(self, row: dict[str, NDArray[Any]], frames: dict[str, NDArray[Any]]) -> None:
        fields = {column.field: row[column.name] for column in self._layout.plain}
        own = {TERMINATED: False, TRUNCATED: False, ORDINAL: self._tally.complete}
        self._keys.append(int(self._writer.step(**frames, **fields, **own)))


class WindowLayout(Layout):
    """Frames and observations are stored once.

    Args:
        columns: What `env_dict` names.
        next_of: Names of columns whose next values are drawn as `next_<name>`, and lie in the next row.
        stack_compress: Names of columns that are stacks, the newest frame last on the last axis.

    Attributes:
        given: What is added.
        shared: Columns that share rows.
        plain: The others.
        depth: Rows before that of a transition which belong to it.
    """

    def __init__(self, columns: Sequence[Column], next_of: Sequence[str], stack_compress: Sequence[str]) -> None:
        following = required(columns, next_of, "next_of")
        stacks = required(columns, stack_compress, "stack_compress")
        names = {**following, **stacks}
        self.shared = tuple(
            Shared(column, column.shape[-1] if name in stacks else 0, name in following)
            for name, column in names.items()
        )
        ahead = [Column(one.next_name, one.column.shape, one.column.dtype) for one in self.shared if one.ahead]
        again = {column.name for column in ahead}
        self.plain = tuple(c for c in columns if c.name not in names and c.name not in again)
        self.columns = (*(column for column in columns if column.name not in again), *ahead)
        self.given = (*ahead, *(column for column in columns if column.name not in again))
        self.depth = max([1, *(one.frames for one in self.shared)])

    def spec(self) -> dict[str, tr.Field]:
        """Returns the fields of a row, and the flags that linked rows have."""
        frames = {one.column.field: one.field() for one in self.shared}
        own = {TERMINATED: tr.Field((), bool), TRUNCATED: tr.Field((), bool), ORDINAL: tr.Field((), "int64")}
        return frames | {column.field: column.as_field() for column in self.plain} | own

    def view(self) -> tr.Sequences:
        """Returns windows of one step, before which as many rows come as the stacks need."""
        observation = tuple(one.column.field for one in self.shared)
        return tr.Sequences(1, 1, self.depth - 1, observation=observation, terminated=TERMINATED, truncated=TRUNCATED)

    def rows(self, size: int) -> int:
        """Returns how many rows hold `size` transitions."""
        return rows_with_spare(size, self.depth)

    def read(self, batch: tr.ReplayBatch) -> dict[str, NDArray[Any]]:
        """Returns the columns."""
        found = {column.name: column.shown(batch[column.field][:, -1].numpy()) for column in self.plain}
        for one in self.shared:
            window = batch[one.column.field].numpy()
            if one.ahead:
                found[one.next_name] = one.part(window, self.depth)
            found[one.column.name] = one.part(window, self.depth - one.ahead)
        return {column.name: found[column.name] for column in self.columns}

    def ordinals(self, batch: tr.ReplayBatch) -> NDArray[np.int64]:
        """Returns the ordinals of the transitions."""
        return batch[ORDINAL][:, -1].numpy()  # type: ignore[no-any-return]

    def stream(self, buffer: tr.ReplayBuffer, tally: Tally) -> WindowStream:
        """Returns what writes to `buffer` from one thread, and counts in `tally`."""
        return WindowStream(buffer, self, tally)
