"""What travels between nodes over a TCP connection: structs, JSON and raw arrays.

Who connects says `HELLO` and the secret that Ray has given it; the server says `HELLO`. Then each request has an
answer, in the order of the requests. Nothing is unpickled. What does not fit ends the connection.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from socket import TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_NODELAY
from typing import Any, Final, NamedTuple

HELLO: Final = b"tr-wire/4\n"
"""What both sides say first: with another version it is another text."""

CONNECT_SECONDS: Final = 2.0
"""Seconds within which a server must be reached."""

GIVE_UP_SECONDS: Final = 30.0
"""Seconds after which a connection counts as broken that carries nothing."""

MARK: Final = b"trwr"
"""With which each request and each answer begins."""

Fill = Callable[[Any], Any]
"""Fills a contiguous array, or a bytearray, with what comes next, and returns it."""


class Address(NamedTuple):
    """Where a server listens, and what it wants to hear first."""

    host: str
    port: int
    secret: bytes


class LinkBroken(Exception):
    """The answer was lost with the connection."""


def set_up(connection: socket.socket) -> None:
    """Has small messages leave at once, and a connection end half a minute after the way to the other side is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((TCP_NODELAY, 1), (TCP_KEEPIDLE, 10), (TCP_KEEPINTVL, 5), (TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def connect(address: Address) -> socket.socket:
    """Returns a connection to a server, which has said who it is.

    Raises:
        OSError: It cannot be reached, or speaks another version.
    """
    connection = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
    try:
        set_up(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GIVE_UP_SECONDS * 1000))
        send(connection, HELLO + address.secret)
        if receive(connection, bytearray(len(HELLO))) != HELLO:
            raise ConnectionError("it speaks another version")
        connection.settimeout(None)
        return connection
    except BaseException:
        connection.close()
        raise


def receive(connection: socket.socket, room: Any) -> Any:
    """Fills a contiguous array, or a bytearray, and returns it; raises ConnectionError at the connection's end."""
    left = memoryview(room).cast("B") if len(room) else memoryview(b"")
    while len(left):
        count = connection.recv_into(left)
        if not count:
            raise ConnectionError("the connection has ended")
        left = left[count:]
    return room


def receive_head(fill: Fill, head: struct.Struct) -> list[Any]:
    """Returns what stands behind the mark at the beginning of a message; raises ConnectionError for anything else."""
    mark, *values = head.unpack(fill(bytearray(head.size)))
    if mark != MARK:
        raise ConnectionError("something else than a message has come")
    return values


def send(connection: socket.socket, *parts: Any) -> None:
    """Sends all of some buffers."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    sent = connection.sendmsg(views)
    for view in views:
        if sent < len(view):
            connection.sendall(view[sent:])
        sent = max(0, sent - len(view))
