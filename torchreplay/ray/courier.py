"""The rows of one process's remote writers on their way: collected, sent, answered for, and sent again."""

from __future__ import annotations

import atexit
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torchreplay.buffer import ReplayBuffer
from torchreplay.config import Config
from torchreplay.errors import AttachError, Stopped
from torchreplay.ray.home import Home
from torchreplay.ray.ingest import Answer, Chunk, Source
from torchreplay.ray.session import import_ray
from torchreplay.spec import nest
from torchreplay.waiting import SLICE_NS, Wait

logger = logging.getLogger("torchreplay.ray")

CHUNK_BYTES: Final = 4 << 20
CHUNK_ROWS: Final = 4096
"""Rows are sent when there are so many bytes or rows of them, or at the next `TICK`."""

TICK: Final = 0.1
"""Seconds that rows wait at most before they are sent, when not as many are under way as may be."""

IN_FLIGHT: Final = 4
"""Chunks of one writer that are under way at most: then it waits."""

INLINE_BYTES: Final = 64 << 10
"""Smaller chunks travel with the call; larger ones as objects of their own, which are sent again without a copy."""

FAREWELL: Final = 5.0
"""Seconds that a process which ends gives to its rows."""

HEARTBEAT: Final = 0.5
PAUSE: Final = 0.25
"""Seconds before another try, when the ingest does not answer."""


@dataclass(slots=True)
class _Parcel:
    chunk: Chunk
    payload: Any  # the chunk, or the reference to it in the object store


class Outbox:
    """What one writer has written and nobody has acknowledged yet.

    Rows are collected in a small segment of this process's own, whose writer checks them as it always does. It admits
    no more rows than a chunk ahead of those that were cut from it.

    Args:
        config: Of the buffer.
        lanes: Streams that the writer has.
    """

    def __init__(self, config: Config, lanes: int) -> None:
        row = sum(field.nbytes for field in config.fields.values()) + 24
        self.rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // row))
        # A writer takes tickets by the 64, and no more than a quarter of the ring, past what it is admitted.
        capacity = max(8, 2 * self.rows, config.view.rows_of_an_item)
        self.stage = ReplayBuffer(nest(config.fields), capacity, view=config.view)
        self.writer = secrets.randbits(62) + 1
        self.lanes = lanes
        self.changed = threading.Condition(threading.RLock())
        self.parcels: deque[_Parcel] = deque()
        self.sent = 0  # the last chunk that is under way
        self.in_air = 0  # calls without an answer
        self.rewind = False  # something was not taken: send it again when all calls are answered
        self.not_before = 0.0  # monotonic time of the next try
        self.answered = False
        self.waiting = ""
        self.leaving = False
        self._cut = 0  # key of the first row that is in no chunk
        self._number = 0
        self.stage._segment.admit(self.rows)

    @property
    def source(self) -> Source:
        """What the ingest has to know of this writer."""
        return Source(self.writer, self.lanes, self.rows, not self.answered)

    def cut(self) -> bool:
        """Makes chunks of what was written, as many as may be under way; returns whether there is room for rows."""
        segment = self.stage._segment
        while len(self.parcels) < IN_FLIGHT:
            rows = segment.run_length(self._cut, self._cut + self.rows)
            if not rows:
                return True
            block, links_at = segment.copy_run(self._cut, rows)
            self._number += 1
            chunk = Chunk(self._number, self._cut, rows, block.numpy(), links_at)
            self._cut += rows
            segment.admit(self._cut + self.rows)
            self.parcels.append(_Parcel(chunk, None))
        return segment.run_length(self._cut, self._cut + self.rows) < self.rows

    @property
    def is_empty(self) -> bool:
        """Whether everything written is acknowledged, and nothing is on its way."""
        return not self.parcels and not self.in_air and not self.stage._segment.run_length(self._cut, self._cut + 1)


class Courier:
    """Sends the rows of this process's writers of one buffer, and listens for answers, in a thread of its own.

    Args:
        home: The ingest.

    Attributes:
        ending: Why nobody should write any more; "" while they should.
    """

    def __init__(self, home: Home) -> None:
        self._ray = import_ray()
        self._home = home
        self.ending = ""
        self._lock = threading.Lock()
        self._outboxes: set[Outbox] = set()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._heartbeat_due = 0.0
        self._heartbeat_out = False
        self._connect()
        self._closing = False
        atexit.register(self._drain)  # before Ray's own, which was registered earlier
        threading.Thread(target=self._work, name="torchreplay-courier", daemon=True).start()

    def open(self, config: Config, lanes: int) -> Outbox:
        """Returns the outbox of a new writer.

        Raises:
            Stopped: The buffer was stopped, or is gone.
        """
        self.check()
        outbox = Outbox(config, lanes)
        with self._lock:
            self._outboxes.add(outbox)
        with suppress(self._ray.exceptions.RayError):
            self._enter.remote(outbox.source)
        return outbox

    def check(self) -> None:
        """Raises `Stopped` when nobody should write any more."""
        if self.ending:
            raise Stopped(self.ending)

    def make_room(self, outbox: Outbox) -> None:
        """Returns when the outbox admits rows again.

        Raises:
            Stopped: The buffer was stopped, or is gone.
        """
        self._await(outbox, lambda: self._pump(outbox))

    def flush(self, outbox: Outbox) -> None:
        """Returns when everything in the outbox is acknowledged.

        Raises:
            Stopped: The buffer was stopped, or is gone, before it was.
        """

        def is_done() -> bool:
            self._pump(outbox)
            return outbox.is_empty

        self._await(outbox, is_done)

    def leave(self, outbox: Outbox) -> None:
        """Sends what is left in the outbox, and forgets it; does not wait for that."""
        outbox.leaving = True
        self._events.put(None)

    def close(self) -> None:
        """Ends the thread when all outboxes are empty; does not wait for that."""
        self._closing = True

    def _drain(self) -> None:
        """Gives rows that were written last their time to arrive when the process ends."""
        deadline = time.monotonic() + FAREWELL
        for outbox in list(self._outboxes):
            with outbox.changed:
                while not (self.ending or outbox.is_empty) and time.monotonic() < deadline:
                    self._pump(outbox)
                    outbox.changed.wait(SLICE_NS / 1e9)

    def _await(self, outbox: Outbox, is_done: Callable[[], bool]) -> None:
        wait = Wait(outbox.stage._segment, None)
        with outbox.changed:
            while True:
                self.check()
                if is_done():
                    return
                wait.check_delivery(outbox.waiting or "an answer from the buffer's node")
                outbox.changed.wait(SLICE_NS / 1e9)

    def _pump(self, outbox: Outbox) -> bool:
        """Cuts chunks and sends those that may go; returns whether the outbox has room for rows."""
        with outbox.changed:
            has_room = outbox.cut()
            if outbox.rewind or time.monotonic() < outbox.not_before:
                return has_room
            for parcel in outbox.parcels:
                if parcel.chunk.number > outbox.sent:
                    self._send(outbox, parcel)
            return has_room

    def _send(self, outbox: Outbox, parcel: _Parcel) -> None:
        chunk = parcel.chunk
        outbox.in_air += 1
        try:
            if parcel.payload is None:
                parcel.payload = self._ray.put(chunk) if chunk.block.nbytes > INLINE_BYTES else chunk
            future = self._push.remote(outbox.source, parcel.payload).future()
        except BaseException as error:
            outbox.in_air -= 1
            outbox.rewind, outbox.not_before = True, time.monotonic() + PAUSE
            if not isinstance(error, self._ray.exceptions.RayError):  # an explorer may be interrupted wherever it is
                raise
            self._events.put(partial(self._reconnect, error))
            return
        outbox.sent = chunk.number
        future.add_done_callback(lambda done: self._events.put(lambda: self._hear(outbox, chunk.number, done)))

    # In the courier's thread.

    def _work(self) -> None:
        try:
            while not (self._closing and not self._outboxes):
                self._take_events()
                self._beat()
                for outbox in list(self._outboxes):
                    self._attend(outbox)
            atexit.unregister(self._drain)
        except Exception as error:  # Ray was shut down, most likely
            if not self.ending:
                logger.exception("rows are no longer sent to the buffer on node %s", self._home.node)
                self._end(f"rows can no longer be sent to the buffer's node: {error}")

    def _take_events(self) -> None:
        with suppress(queue.Empty):
            event = self._events.get(timeout=TICK)
            while True:
                if event is not None:
                    event()
                event = self._events.get_nowait()

    def _attend(self, outbox: Outbox) -> None:
        with outbox.changed:
            if self.ending:
                outbox.stage.stop()
            elif not outbox.in_air and outbox.rewind and time.monotonic() >= outbox.not_before:
                outbox.rewind, outbox.sent = False, 0
            if not self.ending:
                self._pump(outbox)
            if outbox.leaving and (outbox.is_empty or self.ending):
                self._forget(outbox)

    def _forget(self, outbox: Outbox) -> None:
        if self.ending and not outbox.is_empty:
            logger.warning("rows that a remote writer had written were not taken any more: %s", self.ending)
        with self._lock:
            self._outboxes.discard(outbox)
        outbox.stage.close()
        if not self.ending:
            self._depart.remote(outbox.source)

    def _hear(self, outbox: Outbox, number: int, done: Any) -> None:
        """Takes the answer to chunk `number`."""
        error = done.exception()
        answer = Answer() if error is not None else done.result()
        with outbox.changed:
            outbox.in_air -= 1
            outbox.answered |= answer.written > 0
            while outbox.parcels and outbox.parcels[0].chunk.number <= answer.written:
                outbox.parcels.popleft()
            outbox.waiting = answer.waiting
            if answer.written < number:
                outbox.rewind = True
                if error is not None:
                    outbox.waiting = "the buffer's node to answer again"
                    outbox.not_before = time.monotonic() + PAUSE
            outbox.changed.notify_all()
        if error is not None:
            self._reconnect(error)
        elif answer.ending:
            self._end(answer.ending)

    def _beat(self) -> None:
        """Lets the ingest know who is alive, and hears whether to go on."""
        now = time.monotonic()
        if self._heartbeat_out or now < self._heartbeat_due or self.ending:
            return
        self._heartbeat_due = now + HEARTBEAT
        self._heartbeat_out = True
        with self._lock:
            writers = [outbox.writer for outbox in self._outboxes]
        try:
            future = self._look.remote(writers).future()
        except self._ray.exceptions.RayError as error:
            self._heartbeat_out = False
            self._reconnect(error)
        else:
            future.add_done_callback(lambda done: self._events.put(lambda: self._hear_beat(done)))

    def _hear_beat(self, done: Any) -> None:
        self._heartbeat_out = False
        error = done.exception()
        if error is not None:
            self._reconnect(error)
        elif done.result():
            self._end(done.result())

    def _reconnect(self, error: BaseException) -> None:
        """Finds the ingest again after it has died."""
        if isinstance(error, self._ray.exceptions.RayTaskError):
            self._end(f"rows cannot be written on the buffer's node: {error}")
            return
        try:
            self._connect()
        except AttachError as gone:
            self._end(str(gone))

    def _connect(self) -> None:
        actor = self._home.find()
        self._push = actor.push.options(concurrency_group="rows")
        self._enter = actor.enter.options(concurrency_group="rows")
        self._depart = actor.depart.options(concurrency_group="rows")
        self._look = actor.look.options(concurrency_group="calls")

    def _end(self, reason: str) -> None:
        self.ending = reason
        with self._lock:
            outboxes = list(self._outboxes)
        for outbox in outboxes:
            outbox.stage.stop()
            with outbox.changed:
                outbox.changed.notify_all()
