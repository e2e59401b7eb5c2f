"""Where the rows of remote writers arrive: an actor on the buffer's node, which writes them to shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchreplay.buffer.jams import why_full, why_not_admitted
from torchreplay.buffer.replay_buffer import ReplayBuffer, attached_here, local_sampler
from torchreplay.buffer.writer import Writer
from torchreplay.errors import AttachError, ReplayLost, Stopped
from torchreplay.ray.remote.row_wire import Answer, Chunk, RowServer, Source, most_bytes
from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.ray.wire.connection import Address
from torchreplay.schema.limiters import Admission
from torchreplay.schema.samplers import Fifo
from torchreplay.schema.views import Rows
from torchreplay.segment.delivery_log import END, DeliveryLog, WriterEntry
from torchreplay.segment.handle import Handle
from torchreplay.segment.waits import LISTENERS, Audience, Listener

INGEST_SLICE_SECONDS: Final = 0.2
"""Seconds for which a chunk waits here for the limiter; then its writer sends it again, and knows why."""

SILENCE: Final = 15.0
"""Seconds without a word after which a remote writer counts as dead."""

LOST: Final = 5.0
"""The same, where its connection has ended: its process says twice a second that it lives."""

LATE: Final = 120.0
"""Seconds after which nothing comes any more that a closed writer's process has sent: less than a connection lasts."""

LINGER: Final = 10.0
"""Seconds for which the actor stays when it has nothing to do: to tell those who ask that the buffer was stopped."""

_LOOK_EVERY: Final = 0.5

_LINK_BITS: Final = 16


class _Behind(Exception):
    """The limiter has kept a chunk waiting for so long that its writer must know; or so many items, its argument."""


class IngestWriter(Writer):
    """Writes the chunks of one remote writer. It counts as a writer of the buffer while that one is heard of.

    Args:
        buffer: Where it writes.
        entry: What is known of the remote writer.
        others_behind: Returns how many of the other remote writers are.

    Attributes:
        heard: Monotonic time when that one was heard of last.
        is_behind: Whether its next chunk waits for the limiter, or for room in a queue.
        busy: Held by who uses it.
    """

    def __init__(self, buffer: ReplayBuffer, entry: WriterEntry, others_behind: Callable[[], int] = int) -> None:
        sampler = local_sampler(buffer)
        super().__init__(sampler.segment, sampler.config)
        self.entry = entry
        self.heard = time.monotonic()
        self._buffer = buffer
        self._linked = not isinstance(buffer.view, Rows)
        self._others_behind = others_behind
        self.is_behind = False
        self.busy = threading.Lock()
        self._request = 0  # the last one that was answered, and up to which row it was admitted by then
        self._end: int | None = None
        self._deadline = 0.0  # monotonic time until which to wait for the limiter

    def write(self, chunk: Chunk) -> None:
        """Writes what is missing of a chunk.

        Raises:
            _Behind: The limiter admits no more for now; rows may have been written.
            Stopped: The buffer was stopped.
        """
        entry = self.entry
        keys = entry.keys[: chunk.rows]
        start = 0 if entry.begin(chunk.number, chunk.rows) else self._count_written(keys)
        before, ends = self._predecessors(chunk)
        self._deadline = time.monotonic() + INGEST_SLICE_SECONDS
        end = start + self._admitted_of(chunk.rows - start)
        self._relay(chunk.block, chunk.rows, before, keys, entry.runs, start, end)  # which puts their keys there
        if end < chunk.rows:
            raise _Behind(1)
        if self._linked:
            ends = np.concatenate([ends, _ends_of(chunk, before, keys)])
        entry.finish(chunk.number, ends)

    def settle(self, request: int, end: int, n: int, seconds: float) -> None:
        """Admits rows up to `end`, the last `n` of them anew, or gives back what is admitted from there on.

        Raises:
            _Behind: They are not admitted within so many seconds.
        """
        if request > self._request:
            lacking = n if self._end is None else end - self._end
            if lacking > 0:
                self._admit(lacking, seconds)
            else:
                self._end_admission(self._begun_items - max(0, self._open_items + lacking))
            self._request, self._end = request, end

    def _admitted_of(self, rows: int) -> int:
        """Returns how many of so many rows may be written: all, unless they had been admitted.

        What was admitted is given back when the writer counts as dead, or this process dies. Rows that come all the
        same are admitted anew, one by one.
        """
        if not isinstance(self._config.limiter, Admission):
            return rows
        with suppress(_Behind):
            while self._open_items < rows:
                self._admit(1, INGEST_SLICE_SECONDS)
        return min(rows, self._open_items)

    def truncate(self, there: npt.NDArray[np.int64]) -> None:
        """Ends the episodes whose last rows have these keys where they were collected, and are in the buffer."""
        ends = self.entry.ends()
        self._truncate(ends["here"][np.isin(ends["there"], there + 1)] - 1)

    def _count_written(self, keys: npt.NDArray[np.int64]) -> int:
        """How many rows of the chunk under way are in the buffer: of the last one that got a key it has to be seen.

        Where the ring, or the pages of its values, have turned past that one, nobody can see it any more. It counts as
        written: a row never comes twice.
        """
        announced = int(np.argmax(keys < 0)) if (keys < 0).any() else len(keys)
        if not announced:
            return 0
        last = announced - 1
        return last + self._segment.was_written(int(keys[last]), int(self.entry.runs[last % 2]))

    def _predecessors(self, chunk: Chunk) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]:
        """Says which row comes before each one.

        Returns:
            int64 `[rows]`, its key + 1, or -1 - its index in the chunk; 0: none. And the ends of the streams that the
            chunk does not go on with.
        """
        links = chunk.block[chunk.links_at : chunk.links_at + 8 * chunk.rows].view(np.int64)
        before = links >> _LINK_BITS  # key + 1 where it was collected
        ends = self.entry.ends()
        if not self._linked:
            return np.zeros_like(before), ends[:0]
        inside = before > chunk.first
        outside = (before > 0) & ~inside
        at = np.searchsorted(ends["there"], before[outside])
        if len(at) and (at.max() >= len(ends) or (ends["there"][at] != before[outside]).any()):
            raise RuntimeError("a chunk goes on with a stream that is not known here")
        left = np.ones(len(ends), bool)
        left[at] = False
        before[outside] = ends["here"][at]
        before[inside] = chunk.first - before[inside]  # -1 - index
        return before, ends[left].copy()

    def _look_before_admission(self, n: int, timeout: float | None, waited: float) -> None:
        if self._segment.stopped:
            raise Stopped(f"{self._config.called} was stopped")
        if waited >= (timeout or 0.0):
            raise _Behind(n)

    def _look(self, stalled: bool, waited: float, pages: bool = False) -> None:
        if stalled:
            super()._look(stalled, waited, pages)
            return
        if self._segment.stopped:
            raise Stopped(f"{self._config.called} was stopped")
        if waited:
            if self._jam is not None:
                self._jam.check(self._others_behind())
            if time.monotonic() >= self._deadline:
                raise _Behind
            self._look_around()


def _ends_of(chunk: Chunk, before: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Returns the rows of a written chunk that no other one of it follows, in their order."""
    last = np.ones(chunk.rows, bool)
    last[-1 - before[before < 0]] = False
    ends = np.empty(int(last.sum()), END)
    ends["there"] = np.flatnonzero(last) + chunk.first + 1
    ends["here"] = keys[last] + 1
    return ends


class Ingest:
    """The Ray actor, one for each buffer that has remote writers; on the buffer's own node.

    It ends when the buffer is stopped, when no learner is left, or when no remote writer has reported for a while. The
    next remote writer starts it again.

    Args:
        handle: Of the buffer.
        view: The buffer's own, where a handle does not say all of it.
        listeners: The participants of which one must be there, or nobody is left to draw.
    """

    def __init__(self, handle: Handle, view: Any = None, listeners: Sequence[Listener] = LISTENERS) -> None:
        self._listeners = listeners
        self._ray = import_ray()
        self._me = self._ray.get_runtime_context().current_actor
        self._ending: Stopped | None = None
        self._turn = threading.Lock()  # of those who write: each connection has a thread
        self._lock = threading.Lock()
        self._server: RowServer | None = None
        self._departed: dict[int, float] = {}  # writers that are closed, and since when by the monotonic clock
        self._writers: dict[int, IngestWriter] = {}
        self._heard = time.monotonic()
        self._attached: ReplayBuffer | None = None
        try:
            if handle.delivery_log is None:
                raise AttachError("the handle was made before Ray was started: make another")
            self._log = DeliveryLog.attach(handle.delivery_log)
            self._attached = attached_here(ReplayBuffer, handle, view)
        except AttachError as error:
            self._end(error)
        threading.Thread(target=self._watch, name="torchreplay-ingest", daemon=True).start()

    # Of the group "rows": in the order in which each process calls. And what comes over connections, at any time.

    def push(self, source: Source, chunk: Chunk) -> Answer:
        """Writes a chunk, unless it is written; one that does not follow on the last is left for later."""
        self._heard = time.monotonic()
        if self._ending:
            return Answer(ending=self._ending)
        if not self._acquire():
            return Answer(waiting="the end of the process that wrote before")
        try:
            # It is heard of, however long its turn takes.
            with self._writer_of(source).busy, self._turn:
                writer = self._writer_of(source)
                if chunk.number == writer.entry.written + 1:
                    writer.is_behind = False
                    writer.write(chunk)
        except _Behind as behind:
            writer.is_behind = True
            return Answer(writer.entry.written, waiting=self._why(*behind.args), limited=True)
        except Stopped as error:
            self._end(error)
        except Exception as error:
            logger.exception("the rows of a remote writer cannot be written")
            return Answer(refusal=f"the rows of this writer cannot be written: {error}")
        return Answer(writer.entry.written, ending=self._ending)

    def truncate(self, source: Source, there: npt.NDArray[np.int64]) -> None:
        """Ends the episodes of a writer whose last rows have these keys where they were collected."""
        self._heard = time.monotonic()
        if not self._ending and self._acquire():
            with self._turn:
                self._writer_of(source).truncate(there)

    def depart(self, source: Source) -> None:
        """Forgets a writer that is closed."""
        with self._turn:
            with self._lock:
                self._departed[source.writer] = time.monotonic()
                writer = self._writers.pop(source.writer, None)
            if writer is not None:
                with suppress(RuntimeError):  # its process ends while it waits to be admitted
                    writer.close()
                writer.entry.leave()
            elif not self._ending and self._acquire():  # of one that the process before this knew, it may have an entry
                self._log.forget(source.writer)

    # Of the group "calls".

    def describe(self) -> tuple[str, Stopped | None]:
        """Returns the description of the buffer, "" when nobody can attach, and why nobody should write, or None."""
        self._heard = time.monotonic()
        self._notice_stop()
        return "" if self._attached is None else local_sampler(self._attached).segment.text, self._ending

    def address(self) -> Address:
        """Returns where chunks are taken over TCP: that costs less than calls of Ray's.

        Raises:
            OSError: Nothing can listen there.
        """
        with self._lock:
            if self._server is None:
                most = most_bytes(local_sampler(self._buffer).config)
                self._server = RowServer(self._ray.util.get_node_ip_address(), self.push, most, self.lost)
        return self._server.address

    def look(self, sources: list[Source]) -> Stopped | None:
        """Notes which writers are alive; returns why writing must end, or None."""
        self._heard = time.monotonic()
        self._notice_stop()
        if not self._ending and self._acquire():
            for source in sources:
                with suppress(MemoryError, RuntimeError):  # which its first chunk is answered with
                    self._writer_of(source)
        return self._ending

    def admit(self, source: Source, request: int, end: int, n: int, patience: float) -> tuple[str, int]:
        """Admits a writer up to its row `end`, the last `n` anew; or takes back what it was admitted beyond.

        Returns:
            Why it is not admitted within so many seconds, or ""; and the learner's policy version.
        """
        self._heard, why = time.monotonic(), "the process that wrote before has not ended"
        if self._ending and n:
            raise self._ending
        if self._acquire():
            writer, why = self._writer_of(source), ""
            try:
                if n:
                    writer.admit(n)  # which looks whether so many ever are
                with writer.busy:
                    writer.settle(request, end, n, patience)
            except _Behind:
                why = self._why(n)
        return why, self._buffer.policy_version

    def lost(self, number: int) -> None:
        """Notes that the connection of a writer has ended: perhaps its process has."""
        with self._lock:
            if number in self._writers:
                writer = self._writers[number]
                writer.heard = min(writer.heard, time.monotonic() - SILENCE + LOST)

    def ask(self, name: str) -> Any:
        """Returns an attribute of the buffer, or what a method of it returns."""
        found = getattr(self._buffer, name)
        return found() if callable(found) else found

    @property
    def _buffer(self) -> ReplayBuffer:
        if self._attached is None:
            raise AttachError(str(self._ending))
        return self._attached

    def _notice_stop(self) -> None:
        if not self._ending and self._buffer.stopped:
            self._ending = Stopped("the replay buffer was stopped")

    def _end(self, error: Exception) -> None:
        """Takes in that nobody should write any more: the buffer was stopped, or `error` says that it is gone."""
        if self._attached is not None:
            self._notice_stop()
        self._ending = self._ending or ReplayLost(str(error))

    def _acquire(self) -> bool:
        until = time.monotonic() + INGEST_SLICE_SECONDS
        while not self._log.acquire():
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def _writer_of(self, source: Source) -> IngestWriter:
        with self._lock:
            writer = self._writers.get(source.writer)
            if source.writer in self._departed:
                raise RuntimeError("this writer is closed")
            if writer is None:
                entry = self._log.entry(source.writer, source.num_envs, source.rows, source.fresh)
                if entry is None:
                    raise RuntimeError("nothing was heard of this writer for too long: make another")
                writer = self._writers[source.writer] = IngestWriter(self._buffer, entry, self._count_others_behind)
            writer.heard = time.monotonic()
            writer.entry.touch()
            return writer

    def _count_others_behind(self) -> int:
        """Returns how many remote writers wait, beside the one whose chunk is being written."""
        return sum(writer.is_behind for writer in list(self._writers.values()))

    def _why(self, not_admitted: int = 0) -> str:
        sampler = local_sampler(self._buffer)
        segment = sampler.segment
        if not_admitted:
            return f"{why_not_admitted(segment, not_admitted)}; learners alive: {segment.census(True)['learners']}"
        if isinstance(self._buffer.sampler, Fifo):
            return f"room in the queue: {why_full(segment, sampler.config)}"
        census = segment.census(True)
        return f"the learner to draw more, as the limiter wants it (learners alive: {census['learners']})"

    def _audience(self) -> Audience:
        return Audience(local_sampler(self._buffer).segment, self._listeners)

    def _watch(self) -> None:
        """Notices the end: of the buffer, of its owner, of writers."""
        audience = None if self._attached is None else self._audience()
        try:
            while time.monotonic() - self._heard < LINGER or (self._writers and not self._ending):
                time.sleep(_LOOK_EVERY)
                if audience is not None and not self._ending:
                    self._look_around(audience)
        finally:
            self._ray.kill(self._me, no_restart=True)

    def _look_around(self, audience: Audience) -> None:
        self._notice_stop()
        try:
            audience.check()
        except Stopped as error:
            self._end(error)
        now = time.monotonic()
        with self._lock:
            self._departed = {number: since for number, since in self._departed.items() if now - since < LATE}
            for number, writer in list(self._writers.items()):
                if now - writer.heard > SILENCE:
                    logger.warning("a remote writer was not heard of for %.0f s: it counts as dead", SILENCE)
                    del self._writers[number]
                    with suppress(RuntimeError):  # it is writing at this moment: then its last use closes it
                        writer.close()
