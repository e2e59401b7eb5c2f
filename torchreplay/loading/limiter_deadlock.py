"""`LimiterDeadlockGuard`: one buffer holds explorers of several back, while a learner waits for another of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import Token
from typing import Any

from torchreplay.buffer.base import Replay
from torchreplay.buffer.replay_buffer import ReplayBuffer, local_sampler
from torchreplay.segment.waits import LOG_EVERY, MEANWHILE, Meanwhile, logger

GRACE = 0.1
"""Seconds for which a wait is one for a draw, or for rows that are on their way."""

ADMITTED = 1024
"""Items that are admitted at a time. So many too many come at most where the learner dies in its wait."""


class LimiterDeadlockGuard:
    """Lets explorers go on, as a context, while the learner waits for one buffer of several.

    An explorer that writes to several buffers may wait for ever at one whose limiter says that the learner is behind.
    Meanwhile the learner waits for rows that the explorer would write to another buffer. So during this context's waits
    a writer to another buffer goes on if its thread also has a writer to the awaited buffer. Those of buffers with
    explorers of their own wait on. A long wait beside them is logged. It cannot be seen whether the same explorers
    write by several threads, or from other nodes.

    Args:
        name: Of the buffer that is waited for.
        awaited: That buffer.
        others: The other buffers, by name.
    """

    def __init__(self, name: Any, awaited: Replay, others: Sequence[tuple[Any, Replay]]) -> None:
        self._name, self._awaited = name, awaited
        self._others = [(other, buffer) for other, buffer in others if isinstance(buffer, ReplayBuffer)]
        self._lent = set[ReplayBuffer]()
        self._since = self._log_at = 0.0
        self._before: Token[Meanwhile | None] | None = None

    def __enter__(self) -> None:
        self._since = 0.0
        self._before = MEANWHILE.set(self._look)

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        MEANWHILE.reset(self._before)
        while self._lent:
            segment = local_sampler(self._lent.pop()).segment
            if not segment.closed:
                segment.withdraw()

    def _look(self) -> None:
        now = time.monotonic()
        if not self._since:
            self._since, self._log_at = now, now + LOG_EVERY
        if now - self._since < GRACE:
            return
        for name, buffer in self._others:
            segment = local_sampler(buffer).segment
            if segment.closed:
                continue
            awaited = self._awaited
            if isinstance(awaited, ReplayBuffer) and segment.admit_writers_of(local_sampler(awaited).segment, ADMITTED):
                self._lent.add(buffer)
                continue
            if now >= self._log_at and (waiting := segment.census(False)["waiting"]):
                self._log_at = now + LOG_EVERY
                logger.warning(
                    "waiting for buffer %r since %.0f s, while %d writers wait at buffer %r for the learner to draw: "
                    "where the same explorers write to both, by several threads or from other nodes, each waits for "
                    "the other; let the buffer with a SamplesPerInsert be the last one to have its min_size",
                    self._name,
                    now - self._since,
                    waiting,
                    name,
                )
