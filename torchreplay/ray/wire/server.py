"""`Server`: what answers processes of other nodes over TCP."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final

from torchreplay.ray.wire.connection import HELLO, Address, set_up

HELLO_SECONDS: Final = 5
"""Seconds within which who connects must have said the secret."""

STRANGERS: Final = 64
"""Who has not said it yet: with more at once, further ones wait."""

PAUSE_SECONDS: Final = 0.1
"""Seconds after which it listens again where the system refuses a connection, such as with too many open files."""


class Server(ABC):
    """Answers each process that connects by a thread of its own, in the order of its requests.

    Args:
        host: The address of the node, at which it listens.
    """

    def __init__(self, host: str) -> None:
        self._closed = False
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes())
        threading.Thread(target=self._accept, name="torchreplay-listen", daemon=True).start()

    @abstractmethod
    def serve(self, connection: socket.socket) -> None:
        """Answers who has said the secret, until the connection ends.

        Raises:
            OSError: It has ended, or what has come makes no sense: it ends then.
        """

    def close(self) -> None:
        """Takes no more connections."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                self._strangers.acquire()
                try:
                    connection, _ = self._listener.accept()
                    threading.Thread(
                        target=self._listen_to, args=(connection,), name="torchreplay-serve", daemon=True
                    ).start()
                except (OSError, RuntimeError):  # there are too many files, or threads
                    self._strangers.release()
                    time.sleep(PAUSE_SECONDS)

    def _listen_to(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the other side is gone, or was a stranger
            try:
                known = self._is_known(connection)
            finally:
                self._strangers.release()
            if known:
                self.serve(connection)

    def _is_known(self, connection: socket.socket) -> bool:
        """Returns whether the other side says the secret in time."""
        set_up(connection)
        due = HELLO + self.address.secret
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_SECONDS, 0))
        said = connection.recv(len(due), socket.MSG_WAITALL)  # the time is that of all of it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        if not secrets.compare_digest(said, due):
            return False
        connection.sendall(HELLO)
        return True
