"""`Throughput`: how long the parts of a learner's steps take, and how many rows and items pass in a second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

_TIMES_KEPT: Final = 100
_LOOK_EVERY: Final = 1.0
"""Seconds between two looks at the counters."""
_LOOKS_KEPT: Final = 10


@dataclass(frozen=True)
class Timing:
    """How long one part of the learner's steps takes.

    Attributes:
        count: How often it was done.
        seconds: How long in all.
        mean_ms: Mean of the last 100 times, in milliseconds; 0 before the first.
    """

    count: int
    seconds: float
    mean_ms: float


class Throughput:
    """Measures the steps of a learner, which have parts of these names."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._times: dict[str, deque[float]] = {part: deque(maxlen=_TIMES_KEPT) for part in parts}
        self._counts, self._totals = dict.fromkeys(parts, 0), dict.fromkeys(parts, 0.0)
        self._ready: deque[int] = deque(maxlen=_TIMES_KEPT)
        self._looks: deque[tuple[float, int, int]] = deque(maxlen=_LOOKS_KEPT + 1)  # time, rows, items
        self._rows: dict[Any, int] = {}  # the last count of each buffer or shard

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Measures one part of a step, unless it raises."""
        began = time.perf_counter()
        yield
        self.add(part, time.perf_counter() - began)

    def add(self, part: str, seconds: float) -> None:
        """Notes how long one part of a step took."""
        self._times[part].append(seconds)
        self._counts[part] += 1
        self._totals[part] += seconds

    def note_ready(self, batches: int) -> None:
        """Notes how many batches were drawn when the learner asked for its next one."""
        self._ready.append(batches)

    @property
    def timings(self) -> dict[str, Timing]:
        """Of each part."""
        means = {part: 1e3 * sum(times) / max(len(times), 1) for part, times in self._times.items()}
        return {part: Timing(self._counts[part], self._totals[part], mean) for part, mean in means.items()}

    @property
    def ready(self) -> float:
        """Batches that were drawn when the learner asked, on average over the last 100 steps."""
        return sum(self._ready) / max(len(self._ready), 1)

    def start(self, rows: Mapping[Any, int], items: int) -> None:
        """Begins to count a second's rows and items anew."""
        self._looks.clear()
        self._rows.clear()
        self.look(rows, items)

    @property
    def is_due(self) -> bool:
        """Whether it is time for another look at the counters."""
        return time.monotonic() - self._looks[-1][0] >= _LOOK_EVERY

    def look(self, rows: Mapping[Any, int], items: int) -> None:
        """Takes in the rows written to each buffer or shard, by its id, and the items learned from.

        A buffer or shard may be gone, for good or for once.
        """
        self._rows |= rows
        self._looks.append((time.monotonic(), sum(self._rows.values()), items))

    def throughput(self, now: tuple[Mapping[Any, int], int] | None) -> tuple[float, float]:
        """Returns rows and items a second, over the last ten seconds.

        `now` are the counters, as for `look`; None: the last look was the end.
        """
        if not self._looks:
            return 0.0, 0.0
        (began, rows_then, items_then), (ended, rows, items) = self._looks[0], self._looks[-1]
        if now is not None:
            ended, rows, items = time.monotonic(), sum({**self._rows, **now[0]}.values()), now[1]
        seconds = ended - began
        return ((rows - rows_then) / seconds, (items - items_then) / seconds) if seconds > 0 else (0.0, 0.0)
