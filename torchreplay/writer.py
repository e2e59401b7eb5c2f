"""What an explorer writes with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import _C
from .errors import ReplayTimeout, Stopped
from .waiting import STALL_LIMIT, Wait

if TYPE_CHECKING:
    from types import TracebackType


class Writer(_C.Writer):
    """Writes rows of one buffer from one thread, straight into shared memory, without a lock.

    Made by `ReplayBuffer.writer()`. Cheap: one for each explorer thread. A context manager. A child process that
    inherits one by fork may go on using it; to other processes pass the buffer, and make a writer there.
    """

    def __init__(self, segment: _C.Segment) -> None:
        super().__init__(_C.Segment, segment)
        self._segment = segment
        self._stalled_since = 0.0
        self._last_stall = 0.0

    def flush(self) -> None:
        """Returns when everything written so far is in the buffer: at once, since this writer shares its memory."""

    def close(self) -> None:
        """Gives up the writer's place; using it again is a `ValueError`. Idempotent."""
        self._close()

    def _wait(self, stalled: bool) -> None:
        """Called by the native core when a row cannot be written now; returns when it is worth another try."""
        if stalled:
            self._wait_stalled()
            return
        wait = Wait(self._segment, None)
        while True:
            ns = wait.slice_ns()
            if self.admitted():
                return
            self.wait_room(ns)
            if not self.admitted():
                self._segment.refresh()  # rows lost to the dead are not inserts: the limit may have moved
            if self.admitted():
                return
            wait.check_room()

    def _wait_stalled(self) -> None:
        # A full turn of slots is held by others. Their holders are stopped, or died and are freed by the census.
        now = time.monotonic()
        if self._segment.stopped:
            raise Stopped("the replay buffer was stopped")
        if now - self._last_stall > 1.0:
            self._stalled_since = now
        self._last_stall = now
        if now - self._stalled_since > STALL_LIMIT:
            raise ReplayTimeout(f"no slot came free for {STALL_LIMIT:.0f} s: every slot is held by a stopped writer")
        self._segment.census(False)
        time.sleep(0.001)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a Writer belongs to one process: pass the buffer, and call buffer.writer() there")

    def __repr__(self) -> str:
        return "Writer(closed)" if self.closed else f"Writer({self.rows:,} rows written)"
