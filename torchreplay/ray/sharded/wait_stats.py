"""`WaitStats`: how long learners have waited for rows, as they report it to the coordinator."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

WINDOW: Final = 10.0
"""Seconds: waits of late are those of the running window and the one before, as in a `ReplayBuffer`."""


class Told(NamedTuple):
    """What a learner has said.

    Attributes:
        seconds: For which it has waited, in all.
        at: When it said something last.
    """

    seconds: float = 0.0
    at: float = 0.0


class WaitStats:
    """Totals that learners report. A report may be lost, or be overtaken."""

    def __init__(self) -> None:
        self._made = time.monotonic()
        self._told: dict[int, Told] = {}  # by learner
        self._windows: dict[int, float] = {}  # by number: seconds of all learners

    def hear(self, stream: int, seconds: float) -> None:
        """Takes in what a learner has said.

        Args:
            stream: Its number.
            seconds: For which it has waited, in all.
        """
        now = time.monotonic()
        before = self._told.get(stream, Told()).seconds
        window = int(now // WINDOW)
        self._windows = {number: waited for number, waited in self._windows.items() if number >= window - 1}
        self._windows[window] = self._windows.get(window, 0.0) + max(0.0, seconds - before)
        self._told[stream] = Told(max(seconds, before), now)

    @property
    def total(self) -> float:
        """Seconds, of all learners."""
        return sum(told.seconds for told in self._told.values())

    @property
    def share(self) -> float:
        """Share of the last 10 to 20 seconds that a learner which has said something in them has waited, on average."""
        now = time.monotonic()
        window = int(now // WINDOW)
        since = max(self._made, (window - 1) * WINDOW)
        waited = sum(seconds for number, seconds in self._windows.items() if number >= window - 1)
        learners = sum(told.at >= since for told in self._told.values())
        return min(1.0, waited / max(now - since, 1e-9) / max(1, learners))
