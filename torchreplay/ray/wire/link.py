"""`Link`: a process's own connection to a server on another node. `Way`: what makes it, and makes it anew."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar, Final, Generic, TypeVar

from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.ray.wire.connection import HELLO, Address, Carried, Receive, receive, receive_head, send, set_up

CONNECT_SECONDS: Final = 2.0
"""Seconds within which a server must be reached."""

LOCATE_SECONDS: Final = 0.2
"""Seconds for which an address is waited for; after that its actor is called through Ray until it has come."""

GIVE_UP_SECONDS: Final = 30.0
"""Seconds after which a connection counts as broken that carries nothing."""

AGAIN_SECONDS: Final = 10.0
"""Seconds after which a connection that could not be made is tried again, where there was one."""

BROKEN_SECONDS: Final = 1.0
"""Seconds after which a connection that broke is made anew."""


class LinkBroken(Exception):
    """The answer was lost with the connection."""


class Link:
    """A connection to one server. Answers come to a thread of its own, in the order of the requests.

    Args:
        address: Of the server.
        carried: Counts the bytes of requests and of answers. None: nobody asks.

    Attributes:
        broken: Why nothing comes through any more; None while it does.

    Raises:
        OSError: It cannot be reached.
    """

    head: ClassVar[struct.Struct]
    """How each answer begins: with the mark."""

    def __init__(self, address: Address, carried: Carried | None = None) -> None:
        self._pid, self._carried = os.getpid(), carried or Carried()
        self._connection = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
        try:
            set_up(self._connection)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GIVE_UP_SECONDS * 1000))
            send(self._connection, HELLO + address.secret)
            if receive(self._connection, bytearray(len(HELLO))) != HELLO:
                raise ConnectionError("it speaks another version")
            self._connection.settimeout(None)
        except BaseException:
            self._connection.close()
            raise
        self._waiting: deque[tuple[Future[Any], Callable[[list[Any], Receive], Any]]] = deque()
        self._lock = threading.RLock()
        self.broken: Exception | None = None
        self._sender = 0  # the thread that sends a request now
        threading.Thread(target=self._listen, name="torchreplay-link", daemon=True).start()

    @property
    def halfway(self) -> bool:
        """Whether the calling thread has sent half a request: a signal handler has interrupted it, and sends none."""
        return self._sender == threading.get_ident()

    def ask(self, read: Callable[[list[Any], Receive], Any], *parts: Any) -> Future[Any]:
        """Sends a request, and returns what its answer is got by.

        `read` makes it of what the answer begins with, and of what else it fills; an exception that it returns is
        raised where the answer is got.
        """
        answer = Future[Any]()
        with self._lock:
            if self.broken is not None:
                answer.set_exception(self.broken)
                return answer
            try:
                self._sender = threading.get_ident()
                self._waiting.append((answer, read))
                self._carried.add(sum(memoryview(part).nbytes for part in parts))  # before there can be an answer
                send(self._connection, *parts)
            except OSError as error:  # the thread that listens hears it, too
                self._fail(LinkBroken(str(error)))
            except BaseException:  # half a request cannot be taken back
                self.close()
                raise
            finally:
                self._sender = 0
        return answer

    def close(self) -> None:
        """Ends the connection; in a forked child, whose parent's it is, that goes on."""
        if os.getpid() == self._pid:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with self._connection:
            try:
                while True:
                    values = receive_head(self._receive, self.head)
                    answer = self._waiting[0][1](values, self._receive)
                    future, _ = self._waiting.popleft()
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
            except Exception as error:
                self.close()  # first: who sends holds the lock, perhaps for as long as nobody reads
                self._fail(LinkBroken(f"{type(error).__name__}: {error}"))

    def _receive(self, room: Any) -> Any:
        receive(self._connection, room)
        self._carried.add(memoryview(room).nbytes)
        return room

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.broken = error
            waiting, self._waiting = self._waiting, deque()
        while waiting:  # the thread that listens may take one out
            waiting.popleft()[0].set_exception(error)


L = TypeVar("L", bound=Link)


class Way(Generic[L]):
    """The way to one server: a connection, made when it is needed, and anew when it broke.

    Args:
        kind: Of the connection.
        called: What the warning calls the server that says that none can be made.
        locate: Calls its actor through Ray for its address.
        carried: See `Link`.
    """

    def __init__(self, kind: type[L], called: str, locate: Callable[[], Any], carried: Carried | None = None) -> None:
        self._ray, self._kind, self._called, self._locate = import_ray(), kind, called, locate
        self._carried = carried or Carried()
        self._link: L | None = None
        self._end: Callable[[], object] = bool  # ends the connection, also with this object: its thread holds it
        self._located: Any = None  # the call for an address that is under way
        self._not_before = 0.0  # monotonic time of the next try
        self._reached = False  # whether there was a connection
        self._lock = threading.RLock()

    def link(self) -> L | None:
        """Returns the connection; None: call the actor through Ray."""
        with self._lock:
            link = self._link
            if link is not None and link.broken is None:
                return None if link.halfway else link
            if link is not None:  # whether the server is gone a call through Ray finds out first
                self.close()
                self._not_before = time.monotonic() + BROKEN_SECONDS
            if time.monotonic() < self._not_before:
                return None
            try:
                call, patience = self._located or self._locate(), 0.0 if self._located else LOCATE_SECONDS
                self._located = None
                if not self._ray.wait([call], timeout=patience)[0]:
                    self._located = call
                    return None
                link = self._link = self._kind(self._ray.get(call), self._carried)
                self._end = end = weakref.finalize(self, link.close)
                end.atexit, self._reached = False, True
                return link
            except (self._ray.exceptions.RayTaskError, OSError) as error:  # one that never could be is not tried again
                self._not_before = time.monotonic() + AGAIN_SECONDS if self._reached else math.inf
                if not self._reached:
                    text = "%s is called through Ray, which is slower: no connection can be made to it (%s)"
                    logger.warning(text, self._called, str(getattr(error, "cause", error)))
            except self._ray.exceptions.RayError:  # whether it is gone, or is started again, the next call finds out
                self._not_before = time.monotonic() + BROKEN_SECONDS
            return None

    def close(self) -> None:
        """Ends the connection."""
        self._end()
        self._link = None
