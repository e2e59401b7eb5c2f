"""What must come back: the items of each view, computed from lists of rows in the plainest way."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, TypeAlias

import numpy as np

from torchreplay.checking.rollout import Row
from torchreplay.schema.batch_plan import names_of
from torchreplay.schema.hindsight import Hindsight
from torchreplay.schema.views import Sequences, Transitions, View

Array: TypeAlias = np.ndarray[Any, Any]
Stream: TypeAlias = list[Row]
Item: TypeAlias = dict[str, Any]
"""Arrays by entry; of a ragged field of which an item has several values, a list of them."""


def within(path: str, names: Iterable[str]) -> bool:
    """Whether the field at `path` is one of `names`, or lies below one."""
    return any(path == name or path.startswith(f"{name}/") for name in names)


def steps_after(stream: Stream, i: int, most: int) -> list[Row]:
    """Returns the rows that follow position i in its episode, `most` at most."""
    rows = stream[i + 1 : i + 1 + most]
    first = next((k for k, row in enumerate(rows) if row.step == 0), len(rows))
    return rows[:first]


class RowItems:
    """`Rows()`: every row."""

    computed: tuple[str, ...] = ()

    def anchors(self, stream: Stream) -> Iterable[int]:
        """Returns all positions."""
        return range(len(stream))

    def item(self, stream: Stream, i: int) -> Item:
        """Returns the row's values."""
        return stream[i].values


class TransitionItems:
    """`Transitions(...)`; `Hindsight(...)` before it relabels, with `n_step` 1 and only ended episodes."""

    computed: tuple[str, ...]

    def __init__(self, view: Transitions | Hindsight, ragged: Container[str]) -> None:
        self.ragged = ragged
        self.only_ended = isinstance(view, Hindsight)
        self.n_step = view.n_step if isinstance(view, Transitions) else 1
        self.gamma = view.gamma
        self.observation = names_of(view.observation)
        self.reward, self.terminated, self.truncated = view.reward, view.terminated, view.truncated
        self.stack = dict(view.stack or {}) if isinstance(view, Transitions) else {}
        self.discount = view.discount if isinstance(view, Transitions) else None
        self.computed = (self.reward, "discount")

    def anchors(self, stream: Stream) -> Iterable[int]:
        """Returns the positions with `n_step` steps after them, or the episode's end before that."""
        for i in range(len(stream)):
            steps = steps_after(stream, i, len(stream) if self.only_ended else self.n_step)
            if steps and (steps[-1].ends or (len(steps) == self.n_step and not self.only_ended)):
                yield i

    def item(self, stream: Stream, i: int) -> Item:
        """Returns the first step's values, the return, and the observation and flags at its end."""
        steps = steps_after(stream, i, self.n_step)
        item: Item = {}
        for path in stream[i].values:
            if within(path, self.observation):
                item[path] = self._frames(stream, i, path)
                item[f"next_{path}"] = self._frames(stream, i + len(steps), path)
            elif path != self.discount:
                item[path] = steps[0].values[path]
        discounts = [1.0]
        for row in steps:
            own = 1.0 if self.discount is None else float(row.values[self.discount])
            discounts.append(discounts[-1] * self.gamma * own)
        rewards = [row.values[self.reward].astype(np.float64) for row in steps]
        total = sum(discount * reward for discount, reward in zip(discounts, rewards, strict=False))
        item[self.reward] = np.asarray(total).astype(item[self.reward].dtype)
        last = steps[-1].values
        item[self.terminated], item[self.truncated] = last[self.terminated], last[self.truncated]
        going_on = 1.0 - float(last[self.terminated])
        item["discount"] = np.asarray(discounts[-1] * going_on, np.float32)
        return item

    def _frames(self, stream: Stream, i: int, path: str) -> Array | list[Array]:
        frames = next((n for name, n in self.stack.items() if within(path, [name])), None)
        if frames is None:
            return stream[i].values[path]
        first = i - stream[i].step
        values = [stream[max(first, j)].values[path] for j in range(i - frames + 1, i + 1)]
        return values if path in self.ragged else np.stack(values)


class SequenceItems:
    """`Sequences(...)`."""

    computed: tuple[str, ...] = ()

    def __init__(self, view: Sequences, ragged: Container[str]) -> None:
        self.ragged = ragged
        self.steps = view.burn_in + view.length
        self.least = view.burn_in + 1 if view.partial else self.steps
        self.stride = view.length if view.stride is None else view.stride
        self.across = view.across_episodes
        self.observation, self.initial = names_of(view.observation), names_of(view.initial)

    def anchors(self, stream: Stream) -> Iterable[int]:
        """Returns the positions of complete windows, and of windows that the episode's end cuts short."""
        if self.across:
            yield from range(len(stream) - self.steps)
            return
        for i, row in enumerate(stream):
            steps = steps_after(stream, i, self.steps)
            cut_short = len(steps) >= self.least and steps[-1].ends
            if row.step % self.stride == 0 and (len(steps) == self.steps or cut_short):
                yield i

    def item(self, stream: Stream, i: int) -> Item:
        """Returns the window's values, padded with zeros, and what is real in it."""
        rows = stream[i : i + 1 + self.steps] if self.across else [stream[i], *steps_after(stream, i, self.steps)]
        item: Item = {
            "mask": _padded([np.asarray(row.step > 0) for row in rows[1:]], self.steps),
            "is_first": _padded([np.asarray(row.step == 0) for row in rows[: self.steps]], self.steps),
        }
        for path in stream[i].values:
            values = [row.values[path] for row in rows]
            if within(path, self.initial) and not within(path, self.observation):
                item[path] = values[1]
                continue
            seen = within(path, self.observation)
            values, length = (values, self.steps + 1) if seen else (values[1:], self.steps)
            item[path] = _filled_up(values, length) if path in self.ragged else _padded(values, length)
        return item


class HindsightItems(TransitionItems):
    """`Hindsight(...)`: what is relabelled is left to `allowed_goals`."""

    def __init__(self, view: Hindsight, ragged: Container[str]) -> None:
        super().__init__(view, ragged)
        self.strategy = view.strategy
        self.achieved, self.desired = view.achieved, view.desired
        self.relabelled = [self.desired, f"next_{self.desired}", self.reward]
        if view.compute_terminated is not None:
            self.relabelled += [self.terminated, "discount"]

    def allowed_goals(self, stream: Stream, i: int) -> list[Array]:
        """Returns the goals that may replace the desired one of the item at position i."""
        later = steps_after(stream, i, len(stream))
        first = i - stream[i].step
        rows = {"future": later, "final": later[-1:], "episode": [*stream[first + 1 : i + 1], *later]}[self.strategy]
        return [row.values[self.achieved] for row in rows]


Items: TypeAlias = RowItems | TransitionItems | SequenceItems
"""How the rows of a stream make items."""


def items_of(view: View, ragged: Container[str]) -> Items:
    """Returns how `view` makes items; `ragged` are the fields whose values have any length."""
    if isinstance(view, Hindsight):
        return HindsightItems(view, ragged)
    if isinstance(view, Sequences):
        return SequenceItems(view, ragged)
    return TransitionItems(view, ragged) if isinstance(view, Transitions) else RowItems()


def _padded(values: list[Array], length: int) -> Array:
    return np.stack([*values, *[np.zeros_like(values[0])] * (length - len(values))])


def _filled_up(values: list[Array], length: int) -> list[Array]:
    """Returns so many values, the last ones of length 0."""
    return [*values, *[values[0][:0]] * (length - len(values))]
