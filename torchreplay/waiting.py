"""Waits that can always say what they wait for, and that end when nobody is left to end them."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from .arguments import as_float
from .errors import ReplayTimeout, Stopped, WouldBlockForever

if TYPE_CHECKING:
    from ._C import Census, Segment

logger = logging.getLogger("torchreplay")

SLICE_NS = 50_000_000
"""Waits look around this often: for signals, deadlines, deaths, and rows whose wake-up got lost."""

RETURN_GRACE = 5.0
"""Seconds for which a learner believes that writers who are gone may come back: restarts take this long."""

STARTUP_GRACE = 120.0
"""Seconds for which a learner waits for the first writer of a buffer that was handed to other processes."""

LOG_EVERY = 10.0
"""Seconds between two warnings of one long wait."""

STALL_LIMIT = 60.0
"""Seconds after which a writer that finds every slot held by stopped writers gives up."""


class Wait:
    """One wait: its start, its deadline, and the reasons to give it up."""

    def __init__(self, segment: Segment, timeout: float | None) -> None:
        if timeout is not None and not as_float("timeout", timeout) >= 0:
            raise ValueError(f"timeout is {timeout!r}: expected seconds >= 0, or None for as long as someone may write")
        self._segment = segment
        self._timeout = None if timeout == math.inf else timeout
        self._log_at = LOG_EVERY
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
        """Gives up a wait for rows that nobody will write, or that took too long; a long one is logged.

        Raises:
            WouldBlockForever: No writer is left.
            ReplayTimeout: The deadline has passed.
        """
        census = self._segment.census(threading.active_count() > 1)
        figures = (
            f"{inserted:,} items were inserted, {needed:,} are needed and {drawable:,} can be drawn; writers alive: "
            f"{census['writers']}, last write: {_ago(census['since_write'])}"
        )
        if not census["others_writing"] and not census["supervisors"]:
            self._check_writers(census, figures)
        waited = time.monotonic() - self._start
        if self.expired:
            raise ReplayTimeout(f"no batch within {self._timeout} s: {figures}")
        if waited >= self._log_at:
            self._log_at += LOG_EVERY
            logger.warning("waiting for rows since %.0f s: %s", waited, figures)

    def _check_writers(self, census: Census, figures: str) -> None:
        waited, gone = time.monotonic() - self._start, census["since_departure"]
        if not census["shared"]:
            reason = "no other thread holds a writer and the buffer was never handed to another process"
        elif gone >= 0 and min(gone, waited) >= RETURN_GRACE:
            reason = f"the last writer or learner left {gone:.0f} s ago"
        elif gone < 0 and waited >= STARTUP_GRACE:
            reason = f"no writer has come in {waited:.0f} s: did the explorers fail to start?"
        else:
            return
        raise WouldBlockForever(
            f"sample() would wait for ever: {figures}; {reason}. Write more rows, start explorers, or ask less of the "
            f"limiter; buffer.expect_writers() says that writers will come"
        )

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
