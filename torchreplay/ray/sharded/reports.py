"""`Reports`: telling shards' actors what was drawn, where no order does."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from torchreplay.ray.runtime.session import import_ray

REPORT: Final = 0.1
"""Seconds between two reports of this learner's draws to a shard that it draws from without a message."""

REPORTS: Final = 32
"""Reports under way at most: the next one says all that those left out would have said."""


class Reports:
    """What shards' actors would have heard, had they been asked for candidates. Nobody waits for their answers.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._ray = import_ray()
        self._under_way: deque[tuple[int, Any]] = deque()  # shard, answer to come
        self._reported, self._reported_at = 0, -REPORT  # batches, and when

    def answered(self) -> list[tuple[int, Any]]:
        """Returns the calls that shards have answered meanwhile, with the shards' numbers."""
        answered = []
        while self._under_way:
            number, report = self._under_way.popleft()  # a signal handler that runs here looks at the next
            if not self._ray.wait([report], timeout=0)[0]:
                self._under_way.appendleft((number, report))
                break
            answered.append((number, report))
        return answered

    def is_due(self, batches: int, limited: bool) -> bool:
        """Returns whether to report what was drawn, and notes that it is.

        Args:
            batches: So many were.
            limited: Whether explorers wait for what learners draw: then each batch is reported. Elsewhere only other
                learners' schedules and statistics need to know, and now and then is enough.
        """
        now = time.monotonic()
        has_room = len(self._under_way) < REPORTS
        due = batches > self._reported and has_room and (limited or now - self._reported_at >= REPORT)
        if due:
            self._reported, self._reported_at = batches, now
        return due

    def add(self, number: int, report: Any) -> None:
        """Keeps a report's answer to come."""
        self._under_way.append((number, report))
