"""`ShardServer`: what answers learners of other nodes over TCP, in the process of a shard."""

from __future__ import annotations

import math
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from torchreplay.ray.sharded.shard_sampler import Answer
from torchreplay.ray.sharded.wire import HELLO, Request, receive, receive_request, send_reply

HELLO_SECONDS: Final = 5.0
"""Seconds within which who connects must have said the secret."""


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
        self._draw, self._update = draw, update
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes())
        threading.Thread(target=self._accept, name="torchreplay-listen", daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener, suppress(OSError):  # it is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), name="torchreplay-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the learner is gone, or was none
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(HELLO_SECONDS)
            due = HELLO + self.address.secret
            if not secrets.compare_digest(receive(connection, bytearray(len(due))), due):
                return
            connection.sendall(HELLO)
            connection.settimeout(None)
            while True:
                request = receive_request(connection)
                send_reply(connection, request.number, self._answer(connection, request))

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
