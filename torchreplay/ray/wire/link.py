"""`Link`: a process's own connection to a server on another node. `Links`: all of one kind that a process has."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar, Final, Generic, TypeVar

from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.ray.wire.connection import HELLO, Address, Receive, receive, receive_head, send, set_idle, set_up

CONNECT_SECONDS: Final = 2.0
"""Seconds within which a server must be reached."""

WATCH_SECONDS: Final = 2
"""Seconds without an answer after which Ray is asked whether the server is there: a lost node ends no connection."""

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
        probe: Calls its actor through Ray, where no answer comes; None: somebody else finds out whether it is there.

    Raises:
        OSError: It cannot be reached.

    Attributes:
        carried: Bytes of requests and of answers.
    """

    head: ClassVar[struct.Struct]
    """How each answer begins: with the mark."""

    def __init__(self, address: Address, probe: Callable[[], Any] | None = None) -> None:
        self._ray, self._probe, self._pid = import_ray(), probe, os.getpid()
        self._connection = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
        try:
            set_up(self._connection)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GIVE_UP_SECONDS * 1000))
            send(self._connection, HELLO + address.secret)
            if receive(self._connection, bytearray(len(HELLO))) != HELLO:
                raise ConnectionError("it speaks another version")
            self._connection.settimeout(None)
            set_idle(self._connection, WATCH_SECONDS)
        except BaseException:
            self._connection.close()
            raise
        self._waiting: deque[tuple[Future[Any], Callable[[list[Any], Receive], Any]]] = deque()
        self._lock = threading.RLock()
        self._broken: Exception | None = None
        self._probed: Any = None  # a call of Ray's
        self._sender = 0  # the thread that sends a request now
        self.carried = 0
        threading.Thread(target=self._listen, name="torchreplay-link", daemon=True).start()

    @property
    def broken(self) -> bool:
        """Whether nothing comes through any more."""
        return self._broken is not None

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
            if self._broken is not None:
                answer.set_exception(self._broken)
                return answer
            try:
                self._sender = threading.get_ident()
                self._waiting.append((answer, read))
                self.carried += send(self._connection, *parts)
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
            except self._ray.exceptions.RayError as error:
                self._end(error)
            except Exception as error:
                self._end(LinkBroken(f"{type(error).__name__}: {error}"))

    def _receive(self, room: Any) -> Any:
        receive(self._connection, room, self._watch)
        self.carried += memoryview(room).nbytes
        return room

    def _end(self, error: Exception) -> None:
        self.close()  # first: who sends holds the lock, perhaps for as long as nobody reads
        self._fail(error)

    def _watch(self) -> None:
        """Called where nothing has come for long; raises one of Ray's errors if the server is not there any more."""
        if not self._ray.is_initialized():  # its calls would start another one
            if self._waiting:
                raise ConnectionError("Ray was shut down")
            return
        if self._probed is not None and self._ray.wait([self._probed], timeout=0)[0]:
            self._ray.get(self._probed)
            self._probed = None
        if self._probed is None and self._probe is not None and self._waiting:
            self._probed = self._probe()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._broken = error
            waiting, self._waiting = self._waiting, deque()
        while waiting:  # the thread that listens may take one out
            waiting.popleft()[0].set_exception(error)


L = TypeVar("L", bound=Link)


class Links(Generic[L]):
    """The connections of one process. Where none can be made an actor is called through Ray, and a warning says so.

    Args:
        kind: Makes one, as `Link` is made.
    """

    def __init__(self, kind: Callable[[Address, Callable[[], Any] | None], L]) -> None:
        self._ray, self._kind = import_ray(), kind
        self._links: dict[int, L] = {}
        self._carried = 0  # bytes of those that have ended
        self._not_before: dict[int, float] = {}  # monotonic time of the next try
        self._located: dict[int, Any] = {}  # calls for an address that are under way
        self._reached: set[int] = set()  # those that there was a connection to
        self._lock = threading.RLock()
        weakref.finalize(self, _close_all, self._links).atexit = False  # their threads hold them

    def to(self, key: int, called: str, locate: Callable[[], Any], probe: Callable[[], Any] | None = None) -> L | None:
        """Returns the connection to a server, made if need be; None: call its actor through Ray.

        Args:
            key: Tells it from the others.
            called: What the warning calls it.
            locate: Calls its actor through Ray for its address.
            probe: See `Link`.
        """
        with self._lock:
            link = self._links.get(key)
            if link is not None and not link.broken:
                return None if link.halfway else link
            now = time.monotonic()
            if link is not None:  # whether the server is gone a call through Ray finds out first
                self._forget(key)
                self._not_before[key] = now + BROKEN_SECONDS
            if now < self._not_before.get(key, 0.0):
                return None
            try:
                patience = 0.0 if key in self._located else LOCATE_SECONDS
                call = self._located.pop(key, None) or locate()
                if not self._ray.wait([call], timeout=patience)[0]:
                    self._located[key] = call
                    return None
                made = self._links[key] = self._kind(self._ray.get(call), probe)
                self._reached.add(key)
                return made
            except self._ray.exceptions.RayTaskError as error:
                self._refused(key, called, error.cause)
            except self._ray.exceptions.RayError:  # whether it is gone, or is started again, the next call finds out
                self._not_before[key] = time.monotonic() + BROKEN_SECONDS
            except OSError as error:
                self._refused(key, called, error)
            return None

    def _refused(self, key: int, called: str, why: object) -> None:
        """Says that a server cannot be reached; one that never could is not tried again."""
        self._not_before[key] = time.monotonic() + AGAIN_SECONDS
        if key not in self._reached:
            self._not_before[key] = math.inf
            logger.warning(
                "%s is called through Ray, which is slower: no connection can be made to it (%s)", called, str(why)
            )

    def keep(self, keys: Iterable[int]) -> None:
        """Ends the connections to all but these."""
        there = set(keys)
        for key in list(self._links):  # another thread may connect, or find one broken
            if key not in there and (link := self._forget(key)) is not None:
                link.close()

    @property
    def carried(self) -> int:
        """Bytes that this process has exchanged over these connections."""
        return self._carried + sum(link.carried for link in list(self._links.values()))

    def _forget(self, key: int) -> L | None:
        link = self._links.pop(key, None)
        self._carried += 0 if link is None else link.carried
        return link


def _close_all(links: dict[int, Any]) -> None:
    while links:
        links.popitem()[1].close()
