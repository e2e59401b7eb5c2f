"""The messages between learners and shards of other nodes: a struct, JSON, and raw arrays, over a TCP connection.

A learner says `HELLO` and the secret that Ray has given it; the shard says `HELLO`. Then each request has an answer.
Nothing is unpickled. What does not fit ends the connection.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchreplay.buffer.base import MAX_BATCH
from torchreplay.buffer.stats import Stats
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.ray.sharded.batch_block import Layout, RaggedItems
from torchreplay.ray.sharded.shard_sampler import Answer, ShardReport

HELLO: Final = b"tr-shard-wire/1\n"
"""What both sides say first: with another version it is another text."""

REQUEST: Final = struct.Struct("<4sQId")
"""The mark, the number of the request, items, and of a draw the largest raw priority known; of TD errors NaN."""

_KINDS: Final = {"int": "q", "float": "d", "bool": "?"}
# The mark, the number of the request, bytes of JSON, and of a draw what a report says in numbers.
_REPLY: Final = struct.Struct("<4sQI" + "".join(_KINDS[str(field.type)] for field in fields(Stats)) + "dqddqqdd")
_MARK: Final = b"trsh"
_MOST_TEXT: Final = 1 << 20
_STATS: Final = tuple(field.name for field in fields(Stats))
_NOTHING: Final = (0,) * (len(_STATS) + 8)
_ERRORS: Final = {kind.__name__: kind for kind in (MemoryError, OverflowError, RuntimeError, ValueError)}


class Request(NamedTuple):
    """What a learner asks for."""

    number: int  # by which the answer names it
    n: int  # candidates, or TD errors
    largest: float  # raw priority that the learner knows of; NaN: TD errors follow


def keep_alive(connection: socket.socket) -> None:
    """Has a connection end half a minute after the other side or the way to it is gone, also where nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, name, value)


def receive(connection: socket.socket, room: Any, idle: Callable[[], None] | None = None) -> Any:
    """Fills a contiguous array, or a bytearray, and returns it; raises ConnectionError at the connection's end.

    Where the system's timeout passes it calls `idle`.
    """
    left = memoryview(room).cast("B") if len(room) else memoryview(b"")
    while len(left):
        try:
            count = connection.recv_into(left)
        except BlockingIOError:
            if idle is not None:
                idle()
            continue
        if not count:
            raise ConnectionError("the connection has ended")
        left = left[count:]
    return room


def send(connection: socket.socket, *parts: Any) -> None:
    """Sends all of some buffers, small ones together."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    for view in views if sum(map(len, views)) > 1 << 16 else [b"".join(views)]:
        connection.sendall(view)


def send_request(connection: socket.socket, request: Request, *arrays: NDArray[Any]) -> None:
    """Sends a request; keys and TD errors follow it."""
    send(connection, REQUEST.pack(_MARK, *request), *map(np.ascontiguousarray, arrays))


def receive_request(connection: socket.socket) -> Request:
    """Returns the next request; raises ConnectionError for anything else."""
    mark, *values = REQUEST.unpack(receive(connection, bytearray(REQUEST.size)))
    request = Request(*values)
    if mark != _MARK or request.n > MAX_BATCH:
        raise ConnectionError("something else than a request has come")
    return request


def send_reply(connection: socket.socket, number: int, answer: Answer | Exception | None) -> None:
    """Sends the answer to a draw, an error, or None: TD errors are applied."""
    values: tuple[Any, ...] = _NOTHING
    said, arrays, shared = b"", list[Any](), tuple[int, ...]()
    if isinstance(answer, Exception):
        said = json.dumps([type(answer).__name__, str(answer)[:10_000]]).encode()
    elif answer is not None:
        report, block = answer
        own = report.candidates, report.writers, report.since_departure, report.moment
        values = (*(getattr(report.stats, name) for name in _STATS), *report.drawn, *own)
        if isinstance(block, RaggedItems):
            arrays, shared = [block.block, *block.lengths, *block.values], block.of
        elif block is not None:
            arrays = [block]
        if report.trouble or report.barren or shared:
            shapes = [array.shape for array in arrays[1:]]
            said = json.dumps([report.trouble, report.barren, shapes, shared]).encode()
    send(connection, _REPLY.pack(_MARK, number, len(said), *values), said, *arrays)


class Reply(NamedTuple):
    """An answer before its arrays."""

    number: int  # of the request
    values: list[Any]  # what a report says in numbers
    said: Any  # the rest


def receive_reply(connection: socket.socket, idle: Callable[[], None]) -> Reply:
    """Returns the beginning of the next answer; calls `idle` now and then where none comes.

    Raises:
        ConnectionError: Something else has come, or the connection has ended.
    """
    mark, number, length, *values = _REPLY.unpack(receive(connection, bytearray(_REPLY.size), idle))
    if mark != _MARK or length > _MOST_TEXT:
        raise ConnectionError("something else than an answer has come")
    return Reply(number, values, json.loads(receive(connection, bytearray(length), idle)) if length else None)


def receive_answer(
    connection: socket.socket, reply: Reply, layout: Layout | None, idle: Callable[[], None]
) -> Answer | Exception | None:
    """Returns the whole answer: to a draw of items that lie so, or None: to TD errors."""
    if reply.said is not None and len(reply.said) == 2:
        kind, message = reply.said
        return _ERRORS.get(kind, RuntimeError)(message if kind in _ERRORS else f"{kind}: {message}")
    if layout is None:
        return None
    trouble, barren, shapes, of = reply.said or (None, None, (), ())
    *figures, total, drawable, smallest, beta, n, writers, since_departure, moment = reply.values
    drawn = TreeSummary(total, drawable, smallest, beta)
    stats = Stats.of(dict(zip(_STATS, figures, strict=True)))
    report = ShardReport(stats, drawn, n, writers, since_departure, trouble, barren, moment)
    count = len(shapes) - len(of)  # of lengths: fields may share them
    if not 0 <= n <= MAX_BATCH or any(shape[0] != n for shape in shapes[:count]):
        raise ConnectionError("items have come that nobody has asked for")
    if not n:
        return report, None
    block = receive(connection, layout.new_block(n).numpy(), idle)
    if layout.is_ragged:
        lengths = tuple(receive(connection, np.empty(shape, np.int64), idle) for shape in shapes[:count])
        values = tuple(receive(connection, np.empty(shape, np.uint8), idle) for shape in shapes[count:])
        block = RaggedItems(block, lengths, tuple(of), values)
    return report, block


def size_of(answer: Answer | Exception | None) -> int:
    """Returns how many bytes of items came with an answer."""
    block = answer[1] if isinstance(answer, tuple) else None
    if isinstance(block, RaggedItems):
        return block.block.nbytes + sum(part.nbytes for part in block.lengths) + sum(v.nbytes for v in block.values)
    return 0 if block is None else block.nbytes
