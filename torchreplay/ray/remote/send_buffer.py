"""What one remote writer has written and nobody has acknowledged yet."""

from __future__ import annotations

import queue
import secrets
from collections import deque
from contextlib import suppress
from typing import Any, Final

from torchreplay.buffer.replay_buffer import ReplayBuffer, local_sampler
from torchreplay.ray.remote.ingest_actor import Chunk, Source
from torchreplay.schema.config import Config
from torchreplay.schema.spec import nest

CHUNK_BYTES: Final = 4 << 20
CHUNK_ROWS: Final = 4096
"""Rows are sent when there are so many bytes or rows of them, when somebody waits for them, or after a while."""

IN_FLIGHT: Final = 4
"""Chunks of one writer that are under way at most: then it waits."""


class SendBuffer:
    """The rows of one writer between its calls and the buffer.

    They are collected in a small segment of this process's own, whose writer checks them as it always does. It admits
    at most one chunk of rows beyond those that were sent. All the rest is done by the sender's thread, which no signal
    interrupts: the writer's thread looks, says what it wants, and sleeps until there is news. The two share no lock,
    which an exception out of a signal's handler could leave in any state.
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        row = sum(field.nbytes for field in config.fields.values()) + 24
        self.rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // row))
        # A writer takes tickets by the 64, and no more than a quarter of the ring, past what it is admitted.
        capacity = max(8, 2 * self.rows, config.view.rows_of_an_item)
        self.stage = ReplayBuffer(nest(config.fields), capacity, view=config.view)  # what they are collected in
        self.segment = local_sampler(self.stage).segment  # its memory
        self.writer = secrets.randbits(62) + 1
        self.num_envs = num_envs
        self.chunks: deque[Chunk] = deque()  # what is cut and not acknowledged, in order
        self.stored: dict[int, Any] = {}  # Ray's references to those that travel as objects of their own, by number
        self.sent = 0  # the last chunk that is under way
        self.in_air = 0  # calls without an answer
        self.rewind = False  # something was not taken: all is sent again when every call is answered
        self.not_before = 0.0  # monotonic time of the next try
        self.waiting = ""  # what keeps the rows from being taken; "" when nothing is known to
        self.limited = False  # that is the limiter
        self.ending = ""  # why this writer's rows are taken no more; "" while they are
        self.refused = False  # that is a failure, not the end of the buffer or of this process
        self.answered = False  # the ingest has written some of its rows
        self.hurried = False  # somebody waits until everything is acknowledged
        self.leaving = False  # the writer is gone: what is left is sent, and that is it
        self.drained = False  # the writer is there, and rows that it writes from now on are not sent
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # at most one: there is some
        self._cut = 0  # key of the first row that is in no chunk
        self._number = 0
        self.segment.admit(self.rows)

    @property
    def source(self) -> Source:
        """What the ingest has to know of this writer."""
        return Source(self.writer, self.num_envs, self.rows, not self.answered)

    def cut(self, everything: bool) -> None:
        """Makes chunks of what was written, as many as may be under way, and makes room for as many rows.

        With `everything` also of rows that are too few for a whole chunk. Each costs as much on its way as a whole one.
        """
        segment = self.segment
        everything = everything or self.hurried or self.leaving
        while len(self.chunks) < IN_FLIGHT:
            rows = segment.run_length(self._cut, self._cut + self.rows)
            if rows < (1 if everything else self.rows):
                return
            block, links_at = segment.copy_run(self._cut, rows)
            self._number += 1
            self.chunks.append(Chunk(self._number, self._cut, rows, block.numpy(), links_at))
            self._cut += rows  # after that: rows are never in neither
            segment.admit(self._cut + self.rows)
            self.tell()

    @property
    def is_empty(self) -> bool:
        """Whether everything written is acknowledged, and nothing is on its way."""
        segment = self.segment
        is_cut = segment.closed or not segment.run_length(self._cut, self._cut + 1)  # first: see `cut`
        return is_cut and not self.chunks and not self.in_air

    def acknowledge(self, written: int) -> None:
        """Forgets the chunks up to number `written`, which are in the buffer."""
        self.answered |= written > 0
        while self.chunks and self.chunks[0].number <= written:
            self.stored.pop(self.chunks.popleft().number, None)
        self.tell()

    def end(self, reason: str, refused: bool = False) -> None:
        """Lets the writer know why its rows are taken no more; the first reason stays."""
        if not self.ending:
            self.refused, self.ending = refused, reason
            self.stage.stop()
            self.tell()

    def tell(self) -> None:
        """Wakes who sleeps."""
        if self._news.empty():
            self._news.put(None)

    def sleep(self, seconds: float) -> None:
        """Returns when there is news since the last time, or after so many seconds."""
        with suppress(queue.Empty):
            self._news.get(timeout=seconds)
