"""Which rows of a ring follow each other, and what the episodes under way have returned so far."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

NEVER: Final = -1
"""The key of the row before, where no episode is under way."""


class EpisodeLinks:
    """The rows before and after each row of a ring, in the same episode; where there is none, the row itself.

    Args:
        size: Places of the ring.
        num_envs: Environments. Each has one episode under way.

    Attributes:
        before: Place of the row before, int64 `[size]`.
        after: Place of the row after, int64 `[size]`.
    """

    def __init__(self, size: int, num_envs: int) -> None:
        self._size = size
        self.before, self.after = np.arange(size), np.arange(size)
        self._newest = [NEVER] * num_envs  # keys of the rows that the next ones follow on

    def add(self, key: int, env: int, ended: bool) -> int:
        """Has a new row follow on the environment's newest one, and returns its place.

        Args:
            key: Of the row. It overwrites the one in its place.
            env: Whose step it is.
            ended: Whether its episode ends there.
        """
        place, newest = key % self._size, self._newest[env]
        before = newest % self._size if newest > max(key - self._size, NEVER) else place
        orphan = self.after[place]  # followed on the row that is gone
        self.before[orphan] = orphan
        self.after[place] = place
        self.before[place] = before
        self.after[before] = place
        self._newest[env] = NEVER if ended else key
        return place

    def under_way(self, oldest: int) -> NDArray[np.int64]:
        """Returns the places of the newest rows of episodes under way, by environment; of rows from key `oldest` on."""
        return np.array([key % self._size for key in self._newest if key >= max(oldest, 0)], np.int64)

    def between(self, first: int, last: int) -> NDArray[np.int64]:
        """Returns the places of the rows from one to another of the same episode.

        Raises:
            ValueError: `last` does not come after `first` in one episode.
        """
        found = [last]
        while found[-1] != first:
            before = int(self.before[found[-1]])
            if before == found[-1]:
                raise ValueError(f"the row at {last} does not come after the one at {first} in one episode")
            found.append(before)
        return np.array(found[::-1])


class EpisodeReturn:
    """The return and the length of an episode under way."""

    def __init__(self) -> None:
        self._start, self._length, self._return = 0, 0, 0.0

    def step(self, place: int, reward: Any, ended: bool) -> tuple[Any, int, int]:
        """Counts a step; returns the return and the length, 0 unless the episode ends, and the place of its start."""
        if not self._length:
            self._start = place
        self._length, self._return = self._length + 1, self._return + reward
        if not ended:
            return self._return * 0, 0, self._start
        found = self._return, self._length, self._start
        self._length, self._return = 0, 0.0
        return found
