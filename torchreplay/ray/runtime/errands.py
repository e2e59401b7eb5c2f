"""`Errands`: calls that a thread of its own makes, one after the other."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

IDLE_SECONDS: Final = 0.2
"""Seconds without a call after which the thread ends, until there is one again."""


class Errands:
    """Makes calls in the order in which they were added, while other threads go on.

    A signal handler may add some, too. A forked child has none of its parent's. The calls must not raise.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()

    def _begin(self) -> None:
        self._pid, self._calls, self._turn = os.getpid(), queue.SimpleQueue[Callable[[], object]](), threading.Lock()

    def add(self, call: Callable[[], object]) -> None:
        """Has a call made after those that were added before."""
        if self._pid != os.getpid():
            self._begin()
        self._calls.put(call)
        if not self._turn.locked():
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        # Of two threads that were started at once, one goes on. Who finds the lock held has added a call before it is
        # let go of.
        while self._turn.acquire(blocking=False):
            try:
                with suppress(queue.Empty):
                    while True:
                        self._calls.get(timeout=IDLE_SECONDS)()
            finally:
                self._turn.release()
            if self._calls.empty():
                return
