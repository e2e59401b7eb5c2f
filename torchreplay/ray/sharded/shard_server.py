"""`ShardServer`: what answers learners of other nodes over TCP, in the process of a shard."""

from __future__ import annotations

import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from torchreplay.ray.sharded.shard_sampler import Answer
from torchreplay.ray.sharded.wire import HELLO, Request, keep_alive, receive, receive_request, send_reply

HELLO_SECONDS: Final = 5
"""Seconds within which who connects must have said the secret."""

STRANGERS: Final = 64
"""Who has not said it yet: with more at once, further ones are turned away."""

PAUSE_SECONDS: Final = 0.1
"""Seconds after which it listens again where the system refuses a connection, such as with too many open files."""


class Address(NamedTuple):
    """Where a shard listens, and what it wants to hear first."""

    host: str
    port: int
    secret: bytes


class ShardServer:
    """Answers each learner by a thread of its own, in the order of its requests.

    Args:
        host: The address of the node, at which it listens.
        draw: Draws candidates, as `Shard.draw` does.
        update: Feeds back TD errors, as `Shard.update` does.
    """

    def __init__(self, host: str, draw: Callable[[int, float], Answer], update: Callable[[Any, Any], int]) -> None:
        self._draw, self._update, self._closed = draw, update, False
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes())
        threading.Thread(target=self._accept, name="torchreplay-listen", daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    time.sleep(PAUSE_SECONDS)
                    continue
                if not self._strangers.acquire(blocking=False):
                    connection.close()
                    continue
                try:
                    threading.Thread(
                        target=self._serve, args=(connection,), name="torchreplay-serve", daemon=True
                    ).start()
                except RuntimeError:  # there are too many threads
                    connection.close()
                    self._strangers.release()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the learner is gone, or was none
            try:
                known = self._is_known(connection)
            finally:
                self._strangers.release()
            while known:
                request = receive_request(connection)
                send_reply(connection, request.number, self._answer(connection, request))

    def _is_known(self, connection: socket.socket) -> bool:
        """Returns whether who has connected says the secret in time."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_SECONDS, 0))
        due = HELLO + self.address.secret
        said = connection.recv(len(due), socket.MSG_WAITALL)  # the time is that of all of it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        if not secrets.compare_digest(said, due):
            return False
        connection.sendall(HELLO)
        return True

    def _answer(self, connection: socket.socket, request: Request) -> Answer | Exception | None:
        try:
            if not math.isnan(request.largest):
                return self._draw(request.n, request.largest)
            keys = receive(connection, np.empty(request.n, np.int64))
            self._update(keys, receive(connection, np.empty(request.n)))
            return None
        except ConnectionError:
            raise
        except Exception as error:
            return error
