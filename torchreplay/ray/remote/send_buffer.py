"""What one remote writer has written and nobody has acknowledged yet."""

from __future__ import annotations

import queue
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from torchreplay.buffer.replay_buffer import collecting_buffer, local_sampler
from torchreplay.errors import Stopped
from torchreplay.ray.remote.row_wire import CHUNK_BYTES, CHUNK_ROWS, LARGEST_PAGE, Chunk, Source, row_bytes
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import Admission
from torchreplay.schema.samplers import Fifo
from torchreplay.schema.spec import nest

WINDOW_BYTES: Final = 3 * CHUNK_BYTES
"""Bytes of pages that rows in no chunk take at most, unless one row needs more: two chunks of values, and for each row
of a chunk a page that is not full."""

IN_FLIGHT: Final = 4
"""Chunks of one writer that are under way at most: then it waits."""


class WriterState(Enum):
    """What the writer of a send buffer does."""

    WRITING = auto()
    GONE = auto()  # what it left is sent
    DRAINED = auto()  # it is there, but its process ends: what it wrote before is sent, and nothing later


class Delay(NamedTuple):
    """What keeps rows from being taken for now."""

    waits_for: str
    by_limiter: bool = False


class End(NamedTuple):
    """Why the rows of a writer are taken no more."""

    reason: str
    refused: bool  # a failure, and not the end of the buffer or of this process

    def error(self) -> Exception:
        """Returns what the calls of the writer raise."""
        return RuntimeError(self.reason) if self.refused else Stopped(self.reason)


@dataclass(eq=False)
class Request:
    """To be admitted, the last `n` rows anew, up to a row; or to give back what was admitted beyond."""

    number: int = 0  # among those of its writer
    end: int = 0  # the row, counted where it is collected
    n: int = 0
    patience: float = 0.0  # seconds that it may wait in the ingest; 0: it is asked once
    settled: bool = False
    why: str = ""  # it is not, as it was heard last
    error: Exception | None = None
    version: int = 0  # of the learner's policy, when it was settled
    not_before: float = 0.0  # monotonic time of the next try


class SendWindow:
    """The chunks of one writer that nobody has acknowledged, sent in order, several at a time.

    If the ingest does not take one, it does not take later ones either. Then all are sent again, once every call is
    answered ("go back N"). The sender's thread alone changes it; any thread may ask whether it is empty.

    Attributes:
        chunks: In order.
        unanswered: Calls that are under way.
    """

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()
        self._last_sent = 0  # number of a chunk
        self.unanswered = 0
        self._goes_back = False  # all is sent again when every call is answered
        self._not_before = 0.0  # monotonic time of the next try

    @property
    def is_empty(self) -> bool:
        """Whether everything is acknowledged, and no call is under way."""
        return not self.chunks and not self.unanswered

    def to_send(self) -> Iterator[Chunk]:
        """Yields each chunk that is to be sent now, for as long as none before it could not be."""
        if time.monotonic() < self._not_before:
            return
        if self._goes_back and not self.unanswered:
            self._goes_back, self._last_sent = False, 0
        for chunk in self.chunks:
            if self._goes_back:
                return
            if chunk.number > self._last_sent:
                yield chunk

    def note_sent(self, number: int) -> None:
        """Notes that a chunk is under way."""
        self.unanswered += 1
        self._last_sent = number

    def note_answer(self) -> None:
        """Notes that a call is answered, or has failed."""
        self.unanswered -= 1

    def acknowledge(self, written: int) -> None:
        """Forgets the chunks up to number `written`, which are in the buffer."""
        while self.chunks and self.chunks[0].number <= written:
            self.chunks.popleft()

    def go_back(self) -> None:
        """Has all that is not acknowledged sent again, once every call is answered."""
        self._goes_back = True

    def start_over(self, seconds: float) -> None:
        """Has all sent again after so many seconds."""
        self.go_back()
        self._not_before = time.monotonic() + seconds


class SendBuffer:
    """The rows of one writer between its calls and the buffer.

    They are collected in a small segment of this process's own, whose writer checks them as it always does. It admits
    at most one chunk of rows beyond those that were sent, and two chunks of values that have any length. All the rest
    is done by the sender's thread, which no signal interrupts: the writer's thread looks, says what it wants, and
    sleeps until there is news. The two share no lock, which an exception out of a signal's handler could leave in any
    state.

    Attributes:
        stage: What the rows are collected in.
        segment: Its memory.
        source: What the ingest has to know of this writer.
        window: The chunks that are cut.
        delay: What keeps rows from being taken; None when nothing is known to.
        ended: Why they are taken no more; None while they are.
        hurried: Whether somebody waits until everything is acknowledged.
        wanted: Bytes of pages that the row needs for which the writer waits, or has waited last.
        state: What the writer does.
        request: What the writer asks for, where writers have to be admitted.
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // row_bytes(config)))
        # A writer takes tickets by the 64, and no more than a quarter of the ring, past what it is admitted.
        capacity = max(8, 2 * rows, config.view.rows_of_an_item)
        # A row may take a quarter of the buffer's pages, and so of these, whose size is another one.
        ragged = None if config.ragged_bytes is None else max(config.ragged_bytes + 4 * LARGEST_PAGE, 2 * WINDOW_BYTES)
        # Where writers have to be admitted, this one has to be here, too: when it was there.
        sampler, limiter = None, None
        if isinstance(config.limiter, Admission):
            sampler, limiter = Fifo(), Admission(capacity, 1 << 31)
        of_rows = Config.of(nest(config.fields), capacity, sampler, config.view, limiter, config.name, ragged)
        self.stage = collecting_buffer(of_rows)
        self.segment = local_sampler(self.stage).segment
        self.source = Source(secrets.randbits(62) + 1, num_envs, rows, fresh=True)
        self.window = SendWindow()
        self.delay: Delay | None = None
        self.ended: End | None = None
        self.hurried = False
        self.wanted = 0
        self.state = WriterState.WRITING
        self.request = Request(settled=True)
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # at most one: there is some
        self._cut = 0  # key of the first row that is in no chunk
        self._number = 0  # of the last chunk
        self._granted = 0  # what was wanted when room was made last
        self._admit()

    def cut(self, everything: bool) -> None:
        """Makes chunks of what was written, as many as may be under way, and makes room for as many rows.

        With `everything` also of rows that are too few for a whole chunk. Each costs as much on its way as a whole one.
        """
        segment, most = self.segment, self.source.rows
        everything = everything or self.hurried or self.state is not WriterState.WRITING
        # Less than a chunk of values may be there, and the row need all the room.
        everything = everything or 2 * self.wanted > CHUNK_BYTES
        while len(self.window.chunks) < IN_FLIGHT:
            rows, values = segment.measure_run(self._cut, self._cut + most, CHUNK_BYTES)
            if not rows or not (everything or rows == most or values >= CHUNK_BYTES):
                break
            block, links_at = segment.copy_run(self._cut, rows)
            self._number += 1
            self.window.chunks.append(Chunk(self._number, self._cut, rows, links_at, block.numpy()))
            self._cut += rows  # after that: rows are never in neither
            self._admit()
            self.tell()
        if self.wanted:  # also where nothing is cut: a row may have counted twice when it was just being finished
            granted = self._granted
            self._admit()
            if self._granted != granted:  # or writer and sender would wake each other for ever
                self.tell()

    def _admit(self) -> None:
        """Makes room for one chunk of rows, and for two of values or the row that needs more."""
        self._granted = self.wanted
        self.segment.admit(self._cut + self.source.rows, self._cut, max(WINDOW_BYTES, 2 * self._granted))

    @property
    def is_empty(self) -> bool:
        """Whether everything written is acknowledged, and nothing is on its way."""
        segment = self.segment
        is_cut = segment.closed or not segment.run_length(self._cut, self._cut + 1)  # first: see `cut`
        return is_cut and self.window.is_empty

    def acknowledge(self, written: int) -> None:
        """Forgets the chunks up to number `written`, which are in the buffer."""
        if written > 0 and self.source.fresh:
            self.source = self.source._replace(fresh=False)
        self.window.acknowledge(written)
        self.tell()

    def end(self, reason: str, refused: bool = False) -> None:
        """Lets the writer know why its rows are taken no more; the first reason stays."""
        if self.ended is None:
            self.ended = End(reason, refused)
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
