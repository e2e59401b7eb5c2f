"""The key at which cpprb's indexes start again, for every process."""

from __future__ import annotations

import torchreplay as tr


class Origin:
    """The key of the first row since the buffer was cleared last.

    torchreplay's keys go on when a buffer is cleared, cpprb's indexes begin at 0. Each clear writes a row into a buffer
    of one row, which pickles and forks as the buffer of the transitions does. To look whether there is a newer one
    takes one atomic read.
    """

    def __init__(self) -> None:
        self._clears = tr.ReplayBuffer({"first": tr.Field((), "int64")}, 1)
        self._seen = self._first = 0

    @property
    def first(self) -> int:
        """The key."""
        clears = self._clears.next_key
        if clears != self._seen:
            newest = self._clears.gather([clears - 1])["first"]
            if len(newest):  # otherwise another clear comes in this very moment
                self._seen, self._first = clears, int(newest[0])
        return self._first

    def move(self, key: int) -> None:
        """Has indexes start again at the row `key`."""
        self._clears.extend(first=[key])
