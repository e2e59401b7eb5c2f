"""Waits that can always say what they wait for, and that end when nobody is left to end them."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from .errors import ReplayTimeout, Stopped, WouldBlockForever

if TYPE_CHECKING:
    from ._C import Segment

SLICE_NS = 50_000_000
"""Waits look around this often: for signals, deadlines, deaths, and rows whose wake-up got lost."""

RETURN_GRACE = 5.0
"""Seconds for which a learner believes that writers who are gone may come back: restarts take this long."""

STALL_LIMIT = 60.0
"""Seconds after which a writer that finds every slot held by stopped writers gives up."""


class Wait:
    """One wait: its start, its deadline, and the reasons to give it up."""

    def __init__(self, segment: Segment, timeout: float | None) -> None:
        if timeout is not None and not timeout >= 0:
            raise ValueError(
                f"timeout is {timeout!r}: expected seconds >= 0, or None to wait as long as someone may write"
            )
        self._segment = segment
        self._timeout = None if timeout == math.inf else timeout
        self._start = time.monotonic()

    def slice_ns(self) -> int:
        """Returns how long to sleep now.

        Raises:
            Stopped: The buffer was stopped.
        """
        if self._segment.stopped:
            raise Stopped("the replay buffer was stopped")
        if self._timeout is None:
            return SLICE_NS
        left = self._timeout - (time.monotonic() - self._start)
        return max(0, min(SLICE_NS, int(left * 1e9)))

    @property
    def expired(self) -> bool:
        """Whether the timeout is over."""
        return self._timeout is not None and time.monotonic() - self._start >= self._timeout

    def check_rows(self, inserted: int, needed: int, drawable: int) -> None:
        """Gives up a wait for rows that nobody will write, or that took too long.

        Raises:
            WouldBlockForever: No writer is left.
            ReplayTimeout: The deadline has passed.
        """
        census = self._segment.census(threading.active_count() > 1)
        numbers = (
            f"{inserted:,} items were inserted, {needed:,} are needed and {drawable:,} can be drawn; "
            f"{census['writers']} writers are alive, the last write was {_ago(census['since_write'])}"
        )
        if not census["others_writing"] and not census["supervisors"]:
            if not census["shared"]:
                raise WouldBlockForever(
                    f"sample() would wait for ever: {numbers}, no other thread holds a writer and the buffer was never "
                    f"handed to another process. Write more rows first, or start the explorers before drawing"
                )
            if census["since_departure"] >= RETURN_GRACE and not self._waited_less_than(RETURN_GRACE):
                raise WouldBlockForever(
                    f"sample() would wait for ever: {numbers}, and the last of them left "
                    f"{census['since_departure']:.0f} s ago. Start explorers again, or lower the limiter's min_size"
                )
        if self.expired:
            raise ReplayTimeout(f"no batch within {self._timeout} s: {numbers}")

    def _waited_less_than(self, seconds: float) -> bool:
        return time.monotonic() - self._start < seconds

    def check_room(self) -> None:
        """Gives up a wait for a learner that cannot come.

        Raises:
            WouldBlockForever: No process and no other thread can draw.
        """
        census = self._segment.census(True)
        if not census["owners"] and not census["learners"]:
            raise WouldBlockForever(
                "append() would wait for ever: the limiter says that the learner is behind, the process that made the "
                "buffer is gone or has closed it, and no other process draws"
            )
        alone = not census["shared"] and threading.active_count() == 1
        if alone and not census["others_learning"]:
            raise WouldBlockForever(
                "append() would wait for ever: the limiter says that the learner is behind, and there is no other "
                "thread and no other process to draw. Draw more batches between appends, or use MinSize"
            )


def _ago(seconds: float) -> str:
    return "never" if seconds < 0 else f"{seconds:.1f} s ago"
