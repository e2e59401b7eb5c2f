"""`CoordinatorView`: the coordinator of a `ShardedReplay` as one process sees it: table, limiter, and reports."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import Any, Final

from torchreplay.errors import AttachError, Stopped
from torchreplay.ray.runtime.session import import_ray
from torchreplay.ray.sharded.coordinator_client import CoordinatorClient
from torchreplay.ray.sharded.rate_limiter import LearnerLimiter, Rule
from torchreplay.ray.sharded.shard_table import ShardTable
from torchreplay.schema.limiters import MinSize

REPORT_SECONDS: Final = 0.1
"""Seconds between two reports of this learner's draws, unless it needs a lease before."""

NEWS_SECONDS: Final = 0.9
"""The same where nobody waits for them: the limiter divides nothing. Each takes a learner a millisecond."""

ANSWER_SECONDS: Final = 0.02
"""Seconds for which who waits for items waits for an answer of the coordinator's, before it looks around again."""

REFRESH: Final = 0.9
"""Seconds between two looks at the table: shards that came back are drawn from that much later."""

SILENT_AFTER: Final = 5.0
"""Seconds without an answer after which messages about a wait name the coordinator."""


class CoordinatorView(ABC):
    """What is where, and how much this process may draw. The coordinator says so, and gets reports of what was drawn.

    Args:
        name: Of the coordinator's actor.
        called: What messages call the buffer.
        lock: Guards what it knows. The coordinator is never asked while it is held: if Ray cannot reach it, only the
            asking thread waits.
    """

    def __init__(self, name: str, called: str, lock: threading.RLock) -> None:
        self.called = called
        self.coordinator = CoordinatorClient(name, lambda: self.stopped)  # says what is where, and counts
        self._ray, self._lock = import_ray(), lock
        self._reports: deque[tuple[Any, float]] = deque()  # answers to come, and since when
        self._reported_at = -REPORT_SECONDS  # while nothing was waited for
        self._looked_at = 0.0  # when a report asked for the table last
        self._late: threading.Timer | None = None  # reports what was drawn if no call does
        self._limiter: LearnerLimiter | None = None
        # What was where when the coordinator said so last; at first nothing, until it has answered.
        self.table = ShardTable({}, Rule(MinSize()))
        self.table = self.coordinator.table()
        self.closed = False  # whether the `ShardedReplay` that this belongs to is closed

    @property
    @abstractmethod
    def stopped(self) -> bool:
        """Whether the buffer was stopped, as far as this process has heard."""

    @property
    def limiter(self) -> LearnerLimiter:
        """The limiter, as far as this learner knows what was inserted and drawn."""
        if self._limiter is None:
            stream = self.coordinator.ask("join")
            with self._lock:
                if self._limiter is None:  # no other thread has asked meanwhile
                    self._limiter = LearnerLimiter(self.table.rule, stream)
                    self._take_in(self.table)
            self._catch_up()
        return self._limiter

    def close(self) -> None:
        """Reports no more."""
        self.closed = True
        if self._late is not None:
            self._late.cancel()

    def require_open(self) -> None:
        """Raises RuntimeError if the `ShardedReplay` is closed."""
        if self.closed:
            raise RuntimeError("the ShardedReplay is closed")

    def refresh(self) -> None:
        """Takes in what the coordinator has answered to reports, without waiting for it."""
        with self._lock:
            while self._limiter is not None and self._reports:
                first = report, _ = self._reports.popleft()  # a signal handler that runs here looks at the next
                if not self._ray.wait([report], timeout=0)[0]:
                    self._reports.appendleft(first)
                    break
                with suppress(self._ray.exceptions.RayError):  # if the coordinator is gone, the next report says so
                    totals, table = self.coordinator.answer(report)
                    self._limiter.hear(totals)
                    if table is not None:
                        self._adopt(table)
        self._catch_up()

    def report(self, n: int = 0, last: bool = False) -> None:
        """Reports to the coordinator what this process has drawn and knows of the shards, without a wait.

        It does so now and then, and when the lease runs short. Now and then the answer brings the table.

        Args:
            n: Items that it waits for, and so for an answer that comes soon; 0 for none.
            last: Whether it draws no more for now, so that it must be said in any case.
        """
        limiter = self._limiter
        if limiter is None:  # there is nothing to report
            return
        if not n and not last and limiter.silent:  # nobody waits for it
            self.report_later()
            return
        if self._reports:
            self.refresh()
        if n or last or self._is_due(time.monotonic()):
            self._send_report(limiter, n, last)
            if n:
                self._hear_soon()
        self.report_later()

    def _send_report(self, limiter: LearnerLimiter, n: int, last: bool) -> None:
        with self._lock:
            if last or len(self._reports) <= (n > 0):  # one on its way may not say `n`
                now, known = time.monotonic(), None
                self._reported_at = self._reported_at if n else now
                if now - self._looked_at >= REFRESH:
                    self._looked_at, known = now, self.table.moment
                self._reports.append((self.coordinator.tell("report", limiter.report(n), known), now))

    def _hear_soon(self) -> None:
        """Waits a little for what the coordinator answers, and takes it in."""
        with self._lock:
            calls = [call for call, _ in self._reports]
        self._ray.wait(calls, num_returns=len(calls), timeout=ANSWER_SECONDS)
        self.refresh()

    def _is_due(self, now: float) -> bool:
        """Whether it is time for a report."""
        return self.limiter.tally.is_short or now - self._reported_at >= self._report_seconds

    @property
    def _report_seconds(self) -> float:
        """Seconds between two reports."""
        return REPORT_SECONDS if self.limiter.divides else NEWS_SECONDS

    def report_later(self) -> None:
        """Has a thread report what was drawn, though no other call may follow: explorers may wait for it."""
        limiter = self._limiter
        if self._late is None and limiter is not None and limiter.unsaid:
            self._late = threading.Timer(self._report_seconds, self._report_late)
            self._late.daemon = True
            self._late.start()

    def _report_late(self) -> None:
        self._late = None
        limiter = self._limiter
        if limiter is None or self.closed or not self.coordinator.connected:
            return
        with suppress(AttachError, Stopped, self._ray.exceptions.RayError):  # the next draw says so
            self.refresh()
            if limiter.silent:
                self._send_report(limiter, 0, False)
                self._hear_soon()
            else:
                self.report()

    @property
    def silence(self) -> str:
        """What to add to a message about a wait where the coordinator has not answered for long; "" where it has."""
        with self._lock:
            seconds = time.monotonic() - self._reports[0][1] if self._reports else 0.0
        if seconds < SILENT_AFTER:
            return ""
        return (
            f"; {self.coordinator.named} has not answered for {seconds:.0f} s, and tells explorers how much they may "
            f"write: is its process stopped?"
        )

    def look(self) -> ShardTable:
        """Returns the table as it is now."""
        return self._adopt(self.coordinator.table())

    def _catch_up(self) -> None:
        """Asks the coordinator where the limiter known here, and what others have drawn under it, do not fit."""
        limiter = self._limiter
        if limiter is not None and limiter.others.rule > self.table.rule.number:
            self.look()
        if limiter is not None and limiter.others.rule < limiter.rule.number:
            limiter.hear(self.coordinator.ask("report", limiter.report(looks=True))[0])

    def _adopt(self, table: ShardTable) -> ShardTable:
        """Takes a table in, unless a newer one came first, and returns the newest."""
        with self._lock:
            if table.moment >= self.table.moment:
                self._take_in(table)
            return self.table

    def _take_in(self, table: ShardTable) -> None:
        """Keeps to a table from now on. The lock is held."""
        self.table = table
        if self._limiter is not None:
            self._limiter.change(table.rule)
            self._limiter.count_inserted({lost.number: lost.inserted for lost in table.lost})
