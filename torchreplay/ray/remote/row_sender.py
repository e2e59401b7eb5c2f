"""The rows of one process's remote writers on their way: sent, answered for, and sent again."""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchreplay.errors import AttachError, ReplayLost, ReplayTimeout, Stopped
from torchreplay.ray.remote.row_wire import Answer, Chunk, RowLink
from torchreplay.ray.remote.send_buffer import Delay, Request, SendBuffer, WriterState
from torchreplay.ray.runtime.actor_client import NodeActor
from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.ray.wire.way import Way
from torchreplay.schema.config import Config
from torchreplay.segment.waits import SLICE_NS, Wait

TICK: Final = 0.1
"""Seconds that rows wait at most before they are sent, when not as many are under way as may be."""

FAREWELL: Final = 5.0
"""Seconds that a process which ends gives to its rows."""

FIRST_WORD: Final = 5.0
"""Seconds for which a call that does not wait to be admitted waits for an answer."""

HEARTBEAT: Final = 0.5
PAUSE: Final = 0.25
"""Seconds before another try, when the ingest does not answer; and for which a writer waits there to be admitted."""


class RowSender:
    """Sends the rows of this process's writers of one buffer, and listens for answers, in a thread of its own.

    Its calls for those who write raise `Stopped` when the buffer was stopped, `ReplayLost` when it is gone, and
    RuntimeError when rows are taken no more.
    """

    def __init__(self, actor: NodeActor, ending: Stopped | None = None) -> None:
        self._ray = import_ray()
        self._actor = actor
        self._way = Way(RowLink, f"the buffer on node {actor.node}", partial(actor.tell, "address"))
        self.ending = ending  # why nobody should write any more; None while they should
        # What has gone wrong, where nobody can write from here any more although they should; "" otherwise
        self.failure = ""
        self._send_buffers: set[SendBuffer] = set()  # copied to go through it: writers come at any time
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sweep_due = 0.0
        self._heartbeat_due = 0.0
        self._heartbeat_out = False
        self._closing = self._giving_up = False
        self._departure: Any = None  # the last one: the ingest hears of them in order
        self._thread = threading.Thread(target=self._work, name="torchreplay-row-sender", daemon=True)
        atexit.register(self.drain)  # before Ray's own, which was registered earlier
        self._thread.start()

    # In the threads that write.

    def open(self, config: Config, num_envs: int) -> SendBuffer:
        """Returns the send buffer of a new writer."""
        self._check()
        send_buffer = SendBuffer(config, num_envs)
        self._send_buffers.add(send_buffer)
        self._heartbeat_due = 0.0  # a learner that waits knows that rows may come
        self._events.put(None)
        return send_buffer

    def make_room(self, send_buffer: SendBuffer, admitted: Callable[[], bool], timeout: float | None) -> None:
        """Returns when the send buffer admits rows again; raises ReplayTimeout if that takes longer."""

        def has_room() -> bool:
            self._check(send_buffer)  # first: a stage that is stopped admits nothing
            return admitted()

        self._await(send_buffer, has_room, timeout)

    def admit(self, send_buffer: SendBuffer, end: int, n: int, timeout: float | None) -> int:
        """Returns the learner's policy version when the writer may write `n` rows beyond row `end`.

        Raises:
            ReplayTimeout: That takes longer.
            ValueError: So many are never admitted at once.
        """
        patience = PAUSE if timeout is None else min(PAUSE, timeout)
        request = self._request(send_buffer, end + n, n, patience)
        wait = Wait(send_buffer.segment, FIRST_WORD if timeout == 0 else timeout)
        while not request.settled:
            self._check(send_buffer)
            if request.why and timeout == 0:
                raise ReplayTimeout(f"admit() does not wait: {request.why}")
            if request.why and self._giving_up:
                raise Stopped(f"this process is to end, and waits to be admitted: {request.why}")
            wait.check_delivery("the learner, before an item is begun", request.why or "its node has not answered")
            send_buffer.sleep(SLICE_NS / 1e9)
        if request.error is not None:
            raise request.error
        return request.version

    def settle(self, send_buffer: SendBuffer, end: int) -> None:
        """Has sent what is written, and gives back what the writer may write from row `end` on; waits for neither."""
        if end != send_buffer.request.end:
            self._request(send_buffer, end, 0, 0.0)
        self._sweep_due = 0.0
        self._events.put(None)

    def flush(self, send_buffer: SendBuffer) -> None:
        """Returns when everything in the send buffer is acknowledged, and what its writer gave back is taken back."""
        send_buffer.hurried = True
        try:
            self._await(send_buffer, lambda: send_buffer.is_empty and send_buffer.request.settled)
        finally:
            send_buffer.hurried = False

    def truncate(self, send_buffer: SendBuffer, keys: npt.NDArray[np.int64]) -> None:
        """Waits until all rows are acknowledged. Then ends the episodes whose last rows have these keys there."""
        self.flush(send_buffer)
        self._actor.ask("truncate", send_buffer.source, keys, group="rows")

    def leave(self, send_buffer: SendBuffer) -> None:
        """Sends what is left in the send buffer, and forgets it; does not wait for that."""
        if send_buffer.state is WriterState.WRITING:
            send_buffer.state = WriterState.GONE
        self._events.put(None)

    def end(self, reason: Stopped) -> None:
        """Lets everyone know that nobody should write any more."""
        self.ending = self.ending or reason
        self._events.put(None)

    def close(self) -> None:
        """Ends the thread when all send buffers are empty; does not wait for that."""
        self._closing = True

    def give_up(self) -> None:
        """Drops what the limiter keeps out, from now on: its writers end with `Stopped`."""
        self._giving_up = True
        self._events.put(None)

    def drain(self) -> None:
        """Gives rows that were written last their time to arrive when the process ends."""
        if not self._thread.is_alive():  # it has ended, or this is a forked child, whose end is not its parent's
            return
        for send_buffer in list(self._send_buffers):
            if send_buffer.state is WriterState.WRITING:
                send_buffer.state = WriterState.DRAINED
        self._events.put(None)
        self.close()
        self._thread.join(FAREWELL)

    def _check(self, send_buffer: SendBuffer | None = None) -> None:
        if self.ending:
            raise type(self.ending)(*self.ending.args)  # another one: its traceback keeps what it passes through
        if self.failure:
            raise RuntimeError(self.failure)
        if send_buffer is not None and send_buffer.ended is not None:
            raise send_buffer.ended.error()

    def _await(self, send_buffer: SendBuffer, is_done: Callable[[], bool], timeout: float | None = None) -> None:
        wait = Wait(send_buffer.segment, timeout)
        while not is_done():
            self._check(send_buffer)
            self._events.put(None)
            delay = send_buffer.delay
            wait.check_delivery("an answer from the buffer's node" if delay is None else delay.waits_for)
            send_buffer.sleep(SLICE_NS / 1e9)

    def _request(self, send_buffer: SendBuffer, end: int, n: int, patience: float) -> Request:
        request = send_buffer.request = Request(send_buffer.request.number + 1, end, n, patience)
        self._events.put(None)
        return request

    # In the sender's thread.

    def _work(self) -> None:
        try:
            while self._send_buffers or not self._closing:
                self._attend_all(self._take_events())
        except Exception as error:
            logger.exception("rows are no longer sent to the buffer on node %s", self._actor.node)
            self._fail(f"rows can no longer be sent to the buffer's node: {error}")
        finally:
            self._fail("this process has closed its writers for good, and sends no more rows")  # unless it is known
            atexit.unregister(self.drain)
            self._way.close()
            self._await_departure()

    def _take_events(self) -> bool:
        """Does what has come up; returns whether it is time to send what is too little for a chunk, too."""
        with suppress(queue.Empty):
            event = self._events.get(timeout=max(0.0, self._sweep_due - time.monotonic()))
            while True:
                if event is not None:
                    event()
                event = self._events.get_nowait()
        now = time.monotonic()
        sweep = now >= self._sweep_due
        if sweep:
            self._sweep_due = now + TICK
        return sweep

    def _attend_all(self, sweep: bool) -> None:
        try:
            if not self.ending:
                self._actor.require_ray()
                self._beat()
            for send_buffer in list(self._send_buffers):
                self._attend(send_buffer, sweep)
        except AttachError as gone:  # the node is, or this process's Ray
            self.end((ReplayLost if self._actor.connected else Stopped)(str(gone)))

    def _attend(self, send_buffer: SendBuffer, sweep: bool) -> None:
        if self.ending:
            send_buffer.end(str(self.ending))
        delay = send_buffer.delay
        if self._giving_up and delay is not None and delay.by_limiter:
            send_buffer.end(f"this process is to end, and its rows wait for {delay.waits_for}")
        if send_buffer.ended is None:
            self._ask(send_buffer)
            send_buffer.cut(sweep)
            for chunk in send_buffer.window.to_send():
                if send_buffer.delay is not None and send_buffer.window.unanswered:
                    break  # none is taken before that one
                self._send(send_buffer, chunk)
        if send_buffer.state is WriterState.WRITING:
            return
        if send_buffer.ended is not None or send_buffer.is_empty:
            self._forget(send_buffer)

    def _ask(self, send_buffer: SendBuffer) -> None:
        """Has the ingest do what a writer asks for, and asks again until it has; from then on it waits there, too."""
        request = send_buffer.request
        if request.settled or time.monotonic() < request.not_before:
            return
        request.not_before = math.inf  # until the answer
        words = request.number, request.end, request.n, request.patience if request.why else 0.0
        try:
            answer = self._actor.tell("admit", send_buffer.source, *words).future()
            self._await_answer(answer, partial(self._hear_of, send_buffer, request))
        except self._ray.exceptions.RayError as error:
            self._hear_of(send_buffer, request, error)

    def _hear_of(self, send_buffer: SendBuffer, request: Request, done: Any) -> None:
        """Takes the answer to a request, or the error instead of one."""
        error = done if isinstance(done, Exception) else done.exception()
        if error is None:
            request.why, request.version = done.result()
            request.settled = not request.why
            request.not_before = 0.0 if request.patience else math.inf
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            request.error, request.settled = error.cause, True
        else:
            request.why, request.not_before = "the buffer's node does not answer", time.monotonic() + PAUSE
            self._look_again(error)
        send_buffer.tell()

    def _send(self, send_buffer: SendBuffer, chunk: Chunk) -> None:
        source = send_buffer.source
        try:
            link = self._way.link()
            if link is None:
                answer = self._actor.tell("push", source, chunk, group="rows").future()
            else:
                answer = link.push(source, chunk)
            self._await_answer(answer, partial(self._hear, send_buffer, chunk.number))
        except self._ray.exceptions.RayError as error:
            self._send_again(send_buffer, error)
        else:
            send_buffer.window.note_sent(chunk.number)

    def _await_answer(self, answer: Future[Any], hear: Callable[[Any], None]) -> None:
        """Has an answer of the ingest heard in this thread."""
        answer.add_done_callback(lambda done: self._events.put(lambda: hear(done)))

    def _hear(self, send_buffer: SendBuffer, number: int, done: Any) -> None:
        """Takes the answer to chunk `number`."""
        send_buffer.window.note_answer()
        error = done.exception()
        if error is not None:
            self._send_again(send_buffer, error)
            return
        answer: Answer = done.result()
        if answer.written < number:
            send_buffer.window.go_back()
        send_buffer.acknowledge(answer.written)
        if answer.waiting or answer.written >= number:  # those behind it do not know why it was not taken
            send_buffer.delay = Delay(answer.waiting, answer.limited) if answer.waiting else None
        if answer.ending:
            self.end(answer.ending)
        elif answer.refusal:
            send_buffer.end(answer.refusal, refused=True)

    def _send_again(self, send_buffer: SendBuffer, error: BaseException) -> None:
        """Has everything sent again in a while, to the ingest that is there by then."""
        send_buffer.delay = Delay("the buffer's node to answer again")
        send_buffer.window.start_over(PAUSE)
        self._look_again(error)

    def _forget(self, send_buffer: SendBuffer) -> None:
        if not send_buffer.is_empty:
            reason = "" if send_buffer.ended is None else send_buffer.ended.reason
            logger.warning("rows that a remote writer had written were not taken any more: %s", reason)
        self._send_buffers.discard(send_buffer)
        if send_buffer.state is WriterState.GONE:
            send_buffer.stage.close()
        if not self.ending:
            with suppress(self._ray.exceptions.RayError):  # then its silence shows it
                self._departure = self._actor.tell("depart", send_buffer.source, group="rows")

    def _await_departure(self) -> None:
        """Returns when the ingest knows that the writers are gone, or after some seconds."""
        if self._departure is not None and self._actor.connected:
            with suppress(self._ray.exceptions.RayError):
                self._ray.wait([self._departure], timeout=FAREWELL)

    def _beat(self) -> None:
        """Reports the living writers to the ingest actor, and learns whether to go on."""
        now = time.monotonic()
        if self._heartbeat_out or now < self._heartbeat_due or self.ending or self.failure:
            return
        self._heartbeat_due = now + HEARTBEAT
        sources = [send_buffer.source for send_buffer in list(self._send_buffers) if send_buffer.ended is None]
        try:
            self._await_answer(self._actor.tell("look", sources).future(), self._hear_beat)
            self._heartbeat_out = True
        except self._ray.exceptions.RayError as error:
            self._look_again(error)

    def _hear_beat(self, done: Any) -> None:
        self._heartbeat_out = False
        error = done.exception()
        if error is not None:
            self._look_again(error)
        elif done.result():
            self.end(done.result())

    def _look_again(self, error: BaseException) -> None:
        """Has the next call find the ingest again after it has died."""
        self._actor.forget()
        self._way.close()
        if isinstance(error, self._ray.exceptions.RayTaskError):
            self._fail(f"rows cannot be written on the buffer's node: {error}")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        for send_buffer in list(self._send_buffers):
            send_buffer.end(self.failure, refused=True)
