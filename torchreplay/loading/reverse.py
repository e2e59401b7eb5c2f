"""Reverse Experience Replay: the newest items first, then step by step backwards in time."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchreplay.buffer.base import MAX_BATCH
from torchreplay.buffer.replay_buffer import ReplayBuffer, local_sampler
from torchreplay.errors import Stopped
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import called
from torchreplay.validation import checked_instance, checked_int

CHUNK = 1 << 14  # slots looked at together: what stays in the cache


class Reverse:
    """Draws items in reverse order of time (Rotinov 2019, https://arxiv.org/abs/1910.08780), not at random.

    A batch has an item and those `stride`, 2 `stride`, ... items before it. The first batch starts at the newest item,
    each further one an item earlier than the last. So a reward travels backwards through an episode. New items do not
    move it. Where the start is 2 `stride` items or more behind the newest, it returns to the newest.

    Items count, not rows: those that can be drawn, in the order of their keys. A reset row under `Transitions`, or a
    row within a window of `Sequences`, is passed over. A batch is always full: after the oldest item it goes on from
    the newest. So a buffer of fewer than `batch_size * stride` items repeats some. The paper asks for a stride that is
    no multiple of the episodes' length, lest a batch holds the same moment of many episodes.

    An object of its own has a place of its own: several learners each make one. Draws are not counted and not limited
    by the buffer's limiter. Under `Hindsight` items come as they were lived: nothing is relabelled.

    Args:
        buffer: Where from; with any sampler, which this ignores, and any view.
        stride: Items between two of a batch.

    Raises:
        ValueError: `stride` is below 1.
        TypeError: `buffer` is no `ReplayBuffer`.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=1000)
        >>> keys = buffer.extend(obs=torch.zeros(1000, 3))
        >>> reverse = tr.Reverse(buffer, stride=300)
    """

    def __init__(self, buffer: ReplayBuffer, stride: int = 300) -> None:
        self.buffer = checked_instance("buffer", buffer, ReplayBuffer, "a torchreplay.ReplayBuffer")
        self.stride = checked_int("stride", stride, 1, 1 << 31)
        self._last: int | None = None

    def sample(self, batch_size: int) -> ReplayBatch:
        """Returns the next batch, newest item first. O(batch_size * stride), a scan of as many leaves.

        Args:
            batch_size: Number of items, B.

        Returns:
            What `buffer.gather` returns; only items overwritten in this very moment are missing.

        Raises:
            ValueError: `batch_size` is below 1 or too large.
            RuntimeError: No item can be drawn yet. It does not wait as `buffer.sample` does.
            Stopped: The buffer was stopped.

        Example:
            >>> reverse.sample(4)["key"]
            tensor([999, 699, 399,  99])
            >>> reverse.sample(4)["key"]
            tensor([998, 698, 398,  98])
        """
        batch_size = checked_int("batch_size", batch_size, 1, MAX_BATCH)
        if self.buffer.stopped:
            raise Stopped(f"{called(self.buffer.name)} was stopped")
        keys = self._newest((batch_size + 1) * self.stride)
        if not len(keys):
            raise RuntimeError("no item can be drawn yet: expected one at least; buffer.sample() waits for it")
        start = 0 if self._last is None else int(np.count_nonzero(keys >= self._last))
        if start >= min(2 * self.stride, len(keys)):
            start = 0
        self._last = int(keys[start])
        places = start + self.stride * np.arange(batch_size)
        return self.buffer.gather(keys[places % len(keys)])

    def _newest(self, n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The keys of the newest n items that can be drawn, newest first; fewer where there are fewer."""
        segment = local_sampler(self.buffer).segment
        end = segment.stats()["rows_written"]
        oldest = max(0, end - self.buffer.capacity)
        leaves, keys1 = segment.column(-1).numpy(), segment.column(-2).numpy()
        found = [np.empty(0, np.int64)]
        width = min(n, CHUNK)
        while n > 0 and end > oldest:
            start = max(oldest, end - width)
            held = _slots(keys1, start, end) == np.arange(start + 1, end + 1)
            drawable = np.flatnonzero((_slots(leaves, start, end) > 0) & held)
            found.append(start + drawable[::-1])
            n -= len(drawable)
            end, width = start, min(2 * width, CHUNK)
        keys = np.concatenate(found)
        return keys[: len(keys) + min(n, 0)]

    def __repr__(self) -> str:
        return f"Reverse({self.buffer!r}, stride={self.stride})"


def _slots(column: np.ndarray[Any, Any], start: int, end: int) -> np.ndarray[Any, Any]:
    """The part of a ring's column that belongs to the keys from `start` to `end`."""
    first = start % len(column)
    part = column[first : first + end - start]
    rest = end - start - len(part)
    return np.concatenate((part, column[:rest])) if rest else part
