"""Snapshots over time, and what follows from two of them: rates, and shares of time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from torchreplay.monitoring.snapshot import Role, Snapshot

KEPT = 61.0
"""Seconds for which snapshots are kept."""

RECENT = 5.0
"""Seconds over which present rates are taken."""


class Timeline:
    """The snapshots of about a minute, oldest first.

    Attributes:
        snapshots: Those kept.
    """

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self._times: list[float] = []

    def add(self, snapshot: Snapshot) -> None:
        """Adds one, and forgets those that are too old."""
        self.snapshots.append(snapshot)
        self._times.append(snapshot.time)
        old = bisect_left(self._times, snapshot.time - KEPT)
        if old > len(self._times) // 4:  # now and then: it moves all that follow
            del self.snapshots[:old], self._times[:old]

    @property
    def now(self) -> Snapshot:
        """The newest one."""
        return self.snapshots[-1]

    @property
    def span(self) -> float:
        """Seconds from the oldest to the newest one."""
        return self._times[-1] - self._times[0] if self._times else 0.0

    def since(self, seconds: float) -> Snapshot:
        """Returns the newest one that is at least so old, or else the oldest."""
        return self.snapshots[max(0, bisect_right(self._times, self._times[-1] - seconds) - 1)]

    def change(self, counter: str, seconds: float = RECENT) -> float:
        """Returns by how much a counter has grown, a field or property of `Snapshot`, since `seconds` ago."""
        grown: float = getattr(self.now, counter) - getattr(self.since(seconds), counter)
        return max(0.0, grown)

    def rate(self, counter: str, seconds: float = RECENT) -> float:
        """Returns by how much a counter has grown each second of late."""
        elapsed = self.now.time - self.since(seconds).time
        return self.change(counter, seconds) / elapsed if elapsed > 0 else 0.0

    def share(self, part: str, whole: str, seconds: float = RECENT) -> float:
        """Returns how much of the growth of one counter another has had, from 0 to 1."""
        grown = self.change(whole, seconds)
        return min(1.0, self.change(part, seconds) / grown) if grown else 0.0

    def insert_wait_share(self, seconds: float = RECENT) -> float:
        """Returns the share of their time that writers have waited of late, on average."""
        return min(1.0, self.rate("insert_wait", seconds) / self._many("writer", seconds))

    def sample_wait_share(self, seconds: float = RECENT) -> float:
        """Returns the share of their time that learners have waited for rows of late, on average."""
        return min(1.0, self.rate("sample_wait", seconds) / self._many("learner", seconds))

    def _many(self, role: Role, seconds: float) -> int:
        """Returns how many of a role there were, or are, if that is more: some may just have left."""
        return max(1, len(self.since(seconds).alive(role)), len(self.now.alive(role)))

    def participant_rate(self, place: int, seconds: float = RECENT) -> float:
        """Returns the rows a second of the participant in a place: written, or got by a learner."""
        here = next((p for p in self.now.participants if p.id == place), None)
        before = self.since(seconds)
        there = next((p for p in before.participants if p.id == place), None)
        elapsed = self.now.time - before.time
        if here is None or elapsed <= 0:
            return 0.0
        same = there is not None and there.pid == here.pid and there.rows <= here.rows
        return (here.rows - (there.rows if same and there is not None else 0)) / elapsed
