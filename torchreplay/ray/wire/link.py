"""`Link`: a process's own connection to a server on another node."""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

from torchreplay.ray.runtime.errands import Errands
from torchreplay.ray.wire.connection import (
    Address,
    Arrival,
    LinkBroken,
    Receive,
    connect,
    receive,
    receive_head,
    send,
)

LOOK_SECONDS: Final = 0.02
"""Seconds after which who waits looks whether another reads, or a signal handler has read what it waits for."""

T = TypeVar("T")
Read = Callable[[list[Any], Receive], Arrival[Any]]
"""Makes an answer of what it begins with, and of what else it fills."""


class Reply(Future[T]):
    """An answer to come. Who waits for it reads what the connection brings meanwhile, so that no thread wakes another.

    Args:
        link: What it comes over.
    """

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self.has_come = False  # what done() says, without its lock

    def settle(self, answer: T | Exception) -> None:
        """Takes the answer, unless it has one."""
        if self.has_come:  # a signal handler could not wait
            return
        self.has_come = True
        if isinstance(answer, Exception):
            self.set_exception(answer)
        else:
            self.set_result(answer)

    def result(self, timeout: float | None = None) -> T:
        """Returns the answer."""
        return super().result(self._link.read_until(self, timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns what has come instead of the answer."""
        return super().exception(self._link.read_until(self, timeout))


class Link:
    """A connection to one server. Answers come in the order of the requests.

    Args:
        address: Of the server.

    Raises:
        OSError: It cannot be reached.
    """

    head: ClassVar[struct.Struct]
    """How each answer begins: with the mark."""

    def __init__(self, address: Address) -> None:
        self._pid = os.getpid()
        self._connection = connect(address)
        self._broken: Exception | None = None
        self._waiting: deque[tuple[Reply[Any], Read]] = deque()
        self._lock, self._reading = threading.RLock(), threading.RLock()  # of sending, and of reading
        self._news = threading.Condition()
        self._sender = self._reader = 0  # the threads that send a request and read answers now
        self._answers, self._amid = self._receive_answers(), False
        self._ahead = Errands("torchreplay-link")  # reads what nobody waits for at once

    @property
    def broken(self) -> Exception | None:
        """Why nothing comes through any more; None while it does."""
        if self._broken is None and not self._waiting:  # nothing but its end can come
            try:
                if not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    self._fail(LinkBroken("the connection has ended"))
            except BlockingIOError:
                pass
            except OSError as error:
                self._fail(LinkBroken(str(error)))
        return self._broken

    @property
    def halfway(self) -> bool:
        """Whether the calling thread sends or reads: a signal handler has interrupted it, and does neither."""
        return threading.get_ident() in (self._sender, self._reader)

    def ask(self, read: Read, *parts: Any, ahead: bool = False) -> Reply[Any]:
        """Sends a request, and returns what its answer is got by.

        `read` makes it of what the answer begins with, and of what else it fills; an exception that it returns is
        raised where the answer is got. With `ahead` the answer is read while nobody waits for it, by a thread.
        """
        answer = Reply[Any](self)
        with self._lock:
            if self._broken is not None:
                answer.settle(self._broken)
                return answer
            try:
                self._sender = threading.get_ident()
                self._waiting.append((answer, read))
                send(self._connection, *parts)
            except OSError as error:
                self._fail(LinkBroken(str(error)))
            except BaseException:  # half a request cannot be taken back
                self.close()
                raise
            finally:
                self._sender = 0
        if ahead:
            self._ahead.add(partial(self.read_until, answer, None))
        return answer

    def read_until(self, answer: Reply[Any], timeout: float | None) -> float | None:
        """Reads until that answer has come, or has it read by the thread that reads now; returns the seconds left."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not answer.has_come:
            if self._reading.acquire(blocking=False):
                before, self._reader = self._reader, threading.get_ident()
                try:
                    while self._read_some(answer, until - time.monotonic()):
                        pass
                finally:
                    self._reader = before
                    self._reading.release()
                    self._tell()
            else:
                with self._news:
                    if self._reader and not answer.has_come:
                        self._news.wait(max(0.0, min(until - time.monotonic(), LOOK_SECONDS)))
            if time.monotonic() >= until:
                break
        return None if timeout is None else max(0.0, until - time.monotonic())

    def close(self) -> None:
        """Ends the connection; in a forked child, whose parent's it is, that goes on."""
        if os.getpid() == self._pid:
            self._fail(LinkBroken("the connection was closed"))

    def _read_some(self, answer: Reply[Any], seconds: float) -> bool:
        """Reads what is there, and waits for more where that is not all; returns whether to go on."""
        if self._amid:  # a signal handler waits for what it has interrupted
            answer.settle(LinkBroken("a signal handler has asked for it amid an answer"))
            return False
        try:
            self._amid = True
            next(self._answers)
        except BaseException as error:
            self._fail(LinkBroken(f"{type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise
        finally:
            self._amid = False
        if answer.has_come:
            return False
        coming = select.poll()  # of this call: a signal handler may wait, too
        coming.register(self._connection, select.POLLIN)
        coming.poll(math.ceil(max(0.0, min(seconds, LOOK_SECONDS)) * 1000))
        return seconds > 0

    def _tell(self) -> None:
        """Wakes the threads that let another read: an answer has come, or no thread reads any more."""
        with self._news:
            self._news.notify_all()

    def _receive_answers(self) -> Generator[None]:
        while True:
            fill = partial(receive, self._connection)
            values = yield from receive_head(fill, self.head)
            answer = yield from self._waiting[0][1](values, fill)
            self._waiting.popleft()[0].settle(answer)
            self._tell()
            yield

    def _fail(self, error: Exception) -> None:
        with suppress(OSError):  # first: who sends holds the lock, perhaps for as long as nobody reads
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._broken = self._broken or error
            waiting, self._waiting = self._waiting, deque()
            while waiting:
                waiting.popleft()[0].settle(error)
            self._tell()
            if self._reading.acquire(blocking=False):  # another thread that reads hears of the end, and closes it
                self._connection.close()
                self._reading.release()
