"""`ShardLink`: a learner's own connection to a shard of another node. `ShardLinks`: all that a process has."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.ray.sharded.batch_block import Layout
from torchreplay.ray.sharded.shard_sampler import Answer
from torchreplay.ray.sharded.shard_server import Address
from torchreplay.ray.sharded.shard_table import ShardEntry
from torchreplay.ray.sharded.wire import (
    HELLO,
    REQUEST,
    Request,
    keep_alive,
    receive,
    receive_answer,
    receive_reply,
    send,
    send_request,
    size_of,
)

CONNECT_SECONDS: Final = 2.0
"""Seconds within which a shard must be reached."""

WATCH_SECONDS: Final = 2
"""Seconds without an answer after which Ray is asked whether the shard is there: a lost node ends no connection."""

GIVE_UP_SECONDS: Final = 30.0
"""Seconds after which a connection counts as broken that carries nothing."""

AGAIN_SECONDS: Final = 10.0
"""Seconds after which a connection that could not be made is tried again, where there was one."""

BROKEN_SECONDS: Final = 1.0
"""Seconds after which a connection that broke is made anew."""


class LinkBroken(Exception):
    """The answer was lost with the connection."""


class ShardLink:
    """A connection to one shard. Answers come to a thread of its own, in the order of the requests.

    Args:
        address: Of the shard.
        actor: Ray's handle of it, which is asked where no answer comes.

    Raises:
        OSError: It cannot be reached.
    """

    def __init__(self, address: Address, actor: Any) -> None:
        self._ray, self._actor, self._pid = import_ray(), actor, os.getpid()
        self._connection = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
        try:
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GIVE_UP_SECONDS * 1000))
            keep_alive(self._connection)
            send(self._connection, HELLO + address.secret)
            if receive(self._connection, bytearray(len(HELLO))) != HELLO:
                raise ConnectionError("it speaks another version")
            self._connection.settimeout(None)
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", WATCH_SECONDS, 0))
        except BaseException:
            self._connection.close()
            raise
        self._numbers = count()
        # By number: what a request waits for, and of a draw how its items lie.
        self._waiting: dict[int, tuple[Future[Any], Layout | None]] = {}
        self._lock = threading.RLock()
        self._broken: Exception | None = None
        self._probe: Any = None  # a call of Ray's
        self._sender = 0  # the thread that sends a request now
        self.carried = 0  # bytes of requests and of items
        threading.Thread(target=self._listen, name="torchreplay-link", daemon=True).start()

    @property
    def broken(self) -> bool:
        """Whether nothing comes through any more."""
        return self._broken is not None

    @property
    def halfway(self) -> bool:
        """Whether the calling thread has sent half a request: a signal handler has interrupted it, and sends none."""
        return self._sender == threading.get_ident()

    def draw(self, candidates: int, largest: float, layout: Layout) -> Future[Answer]:
        """Asks for candidates, as `Shard.draw` does."""
        return self._ask(layout, Request(next(self._numbers), candidates, largest))

    def update(self, keys: NDArray[np.int64], td: NDArray[np.float64]) -> Future[bool]:
        """Feeds back TD errors, as `Shard.update` does; the answer says that they are applied."""
        return self._ask(None, Request(next(self._numbers), len(keys), math.nan), keys, td)

    def close(self) -> None:
        """Ends the connection; in a forked child, whose parent's it is, that goes on."""
        if os.getpid() == self._pid:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, layout: Layout | None, request: Request, *arrays: NDArray[Any]) -> Future[Any]:
        answer = Future[Any]()
        with self._lock:
            self._waiting[request.number] = answer, layout
            if self._broken is not None:
                self._fail(self._broken)
                return answer
            try:
                self._sender = threading.get_ident()
                send_request(self._connection, request, *arrays)
                self.carried += REQUEST.size + sum(array.nbytes for array in arrays)
            except OSError as error:  # the thread that listens hears it, too
                self._fail(LinkBroken(str(error)))
            except BaseException:  # half a request cannot be taken back
                self.close()
                raise
            finally:
                self._sender = 0
        return answer

    def _listen(self) -> None:
        with self._connection:
            try:
                while True:
                    reply = receive_reply(self._connection, self._watch)
                    answer = receive_answer(self._connection, reply, self._waiting[reply.number][1], self._watch)
                    future, _ = self._waiting.pop(reply.number)
                    self.carried += size_of(answer)
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        future.set_result(True if answer is None else answer)  # None would say that it is lost
            except self._ray.exceptions.RayError as error:
                self._end(error)
            except Exception as error:
                self._end(LinkBroken(f"{type(error).__name__}: {error}"))

    def _end(self, error: Exception) -> None:
        self.close()  # first: who sends holds the lock, perhaps for as long as nobody reads
        self._fail(error)

    def _watch(self) -> None:
        """Called where nothing has come for long; raises one of Ray's errors if the shard is not there any more."""
        if not self._ray.is_initialized():  # its calls would start another one
            if self._waiting:
                raise ConnectionError("Ray was shut down")
            return
        if self._probe is not None and self._ray.wait([self._probe], timeout=0)[0]:
            self._ray.get(self._probe)
            self._probe = None
        if self._probe is None and self._waiting:
            self._probe = self._actor.draw.remote(0, 0.0)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._broken = error
            waiting, self._waiting = self._waiting, {}
        while waiting:  # the thread that listens may take one out
            waiting.popitem()[1][0].set_exception(error)


class ShardLinks:
    """The connections of one process. Where none can be made its shard is called through Ray, and a warning says so."""

    def __init__(self) -> None:
        self._ray = import_ray()
        self._links: dict[int, ShardLink] = {}  # by what names the shard's memory
        self._carried = 0  # bytes of those that have ended
        self._not_before: dict[int, float] = {}  # monotonic time of the next try
        self._reached: set[int] = set()  # those that there was a connection to
        self._lock = threading.RLock()
        weakref.finalize(self, _close_all, self._links).atexit = False  # their threads hold them

    def to(self, entry: ShardEntry) -> ShardLink | None:
        """Returns the connection to a shard, made if need be; None: call it through Ray."""
        with self._lock:
            return self._to(entry)

    def _to(self, entry: ShardEntry) -> ShardLink | None:
        shard = entry.handle.nonce
        link = self._links.get(shard)
        if link is not None and not link.broken:
            return None if link.halfway else link
        now = time.monotonic()
        if link is not None:  # whether the shard is gone a call through Ray finds out first
            self._forget(shard)
            self._not_before[shard] = now + BROKEN_SECONDS
        if now < self._not_before.get(shard, 0.0):
            return None
        try:
            self._links[shard] = made = ShardLink(
                self._ray.get(entry.actor.address.remote(), timeout=CONNECT_SECONDS), entry.actor
            )
            self._reached.add(shard)
            return made
        except self._ray.exceptions.RayTaskError as error:
            self._refused(entry, error.cause)
        except self._ray.exceptions.RayError:  # whether it is gone, or merely slow, the next call finds out
            self._not_before[shard] = time.monotonic() + AGAIN_SECONDS
        except OSError as error:
            self._refused(entry, error)
        return None

    def _refused(self, entry: ShardEntry, why: object) -> None:
        """Says that a shard cannot be reached; one that never could is not tried again."""
        shard = entry.handle.nonce
        self._not_before[shard] = time.monotonic() + AGAIN_SECONDS
        if shard not in self._reached:
            self._not_before[shard] = math.inf
            logger.warning(
                "shard %d on node %s is called through Ray, which is slower: no connection can be made to it (%s)",
                entry.number,
                entry.node,
                why,
            )

    def keep(self, entries: Iterable[ShardEntry]) -> None:
        """Ends the connections to all but these shards."""
        there = {entry.handle.nonce for entry in entries}
        for shard in list(self._links):  # another thread may connect, or find one broken
            if shard not in there and (link := self._forget(shard)) is not None:
                link.close()

    @property
    def carried(self) -> int:
        """Bytes of requests and of items that this process has exchanged with shards over its own connections."""
        return self._carried + sum(link.carried for link in list(self._links.values()))

    def _forget(self, shard: int) -> ShardLink | None:
        link = self._links.pop(shard, None)
        self._carried += 0 if link is None else link.carried
        return link


def _close_all(links: dict[int, ShardLink]) -> None:
    while links:
        links.popitem()[1].close()
