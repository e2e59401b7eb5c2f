"""`Reports`: telling a shard's actor what was drawn from the shard without it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any, Final

from torchreplay.ray.directory import Place
from torchreplay.ray.figures import Order
from torchreplay.ray.session import import_ray

REPORT: Final = 0.1
"""Seconds between two reports of this learner's draws to a shard that it draws from without a message."""

REPORTS: Final = 32
"""Reports under way at most: the next one says all that those left out would have said."""


class Reports:
    """What a shard's actor would have heard, had it been asked for the candidates. Nobody waits for its answers.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._ray = import_ray()
        self._under_way: deque[tuple[int, Any]] = deque()  # shard, answer to come
        self._reported_at = -REPORT

    def answered(self) -> list[tuple[int, Any]]:
        """Returns the calls that shards have answered meanwhile, with the shards' numbers."""
        answered = []
        while self._under_way:
            number, report = self._under_way.popleft()  # a signal handler that comes by here looks at the next
            if not self._ray.wait([report], timeout=0)[0]:
                self._under_way.appendleft((number, report))
                break
            answered.append((number, report))
        return answered

    def send(self, place: Place, order: Order) -> None:
        """Tells a shard's actor of an order.

        Where explorers wait for what learners draw, every order is reported; elsewhere only other learners' schedules
        and statistics need to know, and now and then is enough.
        """
        now = time.monotonic()
        due = order.limit is not None or now - self._reported_at >= REPORT
        if due and len(self._under_way) < REPORTS:
            self._under_way.append((place.number, place.actor.draw.remote(replace(order, candidates=0))))
            self._reported_at = now
