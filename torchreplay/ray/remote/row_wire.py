"""Rows of remote writers over a connection: `RowServer` where they are written, `RowLink` where they come from."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from torchreplay.errors import ReplayLost, Stopped
from torchreplay.ray.wire.connection import MARK, Address, Fill, LinkBroken, connect, receive, receive_head, send
from torchreplay.ray.wire.server import Server
from torchreplay.schema.config import Config
from torchreplay.schema.spec import Field

CHUNK_BYTES: Final = 4 << 20
CHUNK_ROWS: Final = 4096
"""Rows are sent when there are so many bytes or rows of them, when somebody waits for them, or after a while.

Values of any length count for themselves: a chunk ends with the row that makes them so many bytes."""

LARGEST_PAGE: Final = 4096
"""Bytes: pages are of another size where rows are collected."""

PUSH: Final = struct.Struct("<4sQQQ?QQQQQ")
"""The mark, what a `Source` says, and of a chunk its number, first, rows and links_at, and bytes of its block."""

ANSWER: Final = struct.Struct("<4sQ?I")
"""The mark, the last chunk that is written, whether the next waits for the limiter, and bytes of JSON: the rest."""

Lost = Callable[[int], object]
_MOST_TEXT: Final = 1 << 20
_ENDINGS: Final = {kind.__name__: kind for kind in (Stopped, ReplayLost)}


class Chunk(NamedTuple):
    """Rows of one remote writer, in the order in which it wrote them."""

    number: int  # of this chunk among those of its writer, from 1
    first: int  # key that the first row has where it was collected
    rows: int  # their number
    links_at: int  # where in the block their links begin, int64 `[rows]`: how each is linked where it was collected
    block: npt.NDArray[np.uint8]  # the rows as the native core copied them out


class Source(NamedTuple):
    """What the ingest has to know of a remote writer."""

    writer: int  # its number, its own in the whole cluster
    num_envs: int  # environments that it writes
    rows: int  # rows of its chunks at most
    fresh: bool  # whether it still waits for the answer to its first chunk


class Answer(NamedTuple):
    """What a remote writer hears."""

    written: int = 0  # the last of its chunks that is in the buffer
    waiting: str = ""  # what the next one waits for; "" when it does not
    limited: bool = False  # whether it waits for the limiter
    refusal: str = ""  # why the next one, and all after it, cannot be written; "" while they can
    ending: Stopped | None = None  # why nobody should write any more; None while they should


def row_bytes(config: Config) -> int:
    """Returns the bytes that a row takes in a chunk, without its values of any length."""
    fixed = sum(column.nbytes for column in config.fields.values() if isinstance(column, Field)) + 24
    return fixed + (LARGEST_PAGE if config.ragged else 0)


def most_bytes(config: Config) -> int:
    """Returns the bytes that the block of a chunk has at most: one row more than makes it full."""
    columns = len(config.fields) + 8  # each begins at a cache line
    return 2 * CHUNK_BYTES + row_bytes(config) + (config.ragged_bytes or 0) // 4 + 64 * columns


class RowServer(Server):
    """Takes rows of remote writers.

    Args:
        host: The address of the node, at which it listens.
        push: Writes a chunk, as `Ingest.push` does; its block's memory is used again afterwards.
        most: Bytes of a chunk's block at most.
        lost: Called with the number of each writer of a connection that has ended.
    """

    def __init__(self, host: str, push: Callable[[Source, Chunk], Answer], most: int, lost: Lost = bool) -> None:
        self._push, self._most, self._lost = push, most, lost
        super().__init__(host)

    def serve(self, connection: socket.socket) -> None:
        """Takes the rows of one process."""
        writers, fill = set[int](), partial(receive, connection)
        room = np.empty(2 * CHUNK_BYTES, np.uint8)  # memory that is new for each chunk costs as much again
        try:
            while True:
                send(connection, *self._answer(fill, room, writers))
        finally:
            for writer in writers:
                self._lost(writer)

    def _answer(self, fill: Fill, room: npt.NDArray[np.uint8], writers: set[int]) -> list[Any]:
        """Writes a chunk, once all of it is there."""
        *source, number, first, rows, links_at, nbytes = receive_head(fill, PUSH)
        if nbytes > self._most or links_at + 8 * rows > nbytes:
            raise ConnectionError("a chunk is larger than any, or has no place for its links")
        room = room[:nbytes] if nbytes <= len(room) else np.empty(nbytes, np.uint8)
        writers.add(source[0])
        answer = self._push(Source(*source), Chunk(number, first, rows, links_at, fill(room)))
        rest, ending = b"", answer.ending
        if answer.waiting or answer.refusal or ending:
            text = [type(ending).__name__, str(ending)] if ending else None
            rest = json.dumps([answer.waiting, answer.refusal, text]).encode()
        return [ANSWER.pack(MARK, answer.written, answer.limited, len(rest)), rest]


class RowLink:
    """The connection of one process's writers to the ingest of a buffer on another node.

    Answers come in the order of the chunks; a thread takes them.

    Raises:
        OSError: The ingest cannot be reached.
    """

    def __init__(self, address: Address) -> None:
        self._pid, self._connection = os.getpid(), connect(address)
        self._sending, self._lock = threading.Lock(), threading.Lock()  # nobody holds the second one for long
        self.broken: LinkBroken | None = None  # why nothing comes through any more
        self._waiting = deque[Future[Answer]]()
        threading.Thread(target=self._listen, name="torchreplay-row-link", daemon=True).start()

    def push(self, source: Source, chunk: Chunk) -> Future[Answer]:
        """Has a chunk written, as `Ingest.push` does."""
        answer = Future[Answer]()
        with self._sending:
            with self._lock:
                if self.broken is not None:
                    answer.set_exception(self.broken)
                    return answer
                self._waiting.append(answer)
            try:
                head = PUSH.pack(MARK, *source, *chunk[:-1], chunk.block.nbytes)
                send(self._connection, head, chunk.block)
            except OSError as error:
                self._end(error)
        return answer

    def close(self) -> None:
        """Ends the connection; in a forked child, whose parent's it is, that goes on."""
        if os.getpid() == self._pid:
            self._end("the connection was closed")

    def _listen(self) -> None:
        try:
            while True:
                answer = _read(partial(receive, self._connection))
                with self._lock:  # once it is broken, nothing waits
                    waiting = self._waiting.popleft()
                waiting.set_result(answer)
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")
        with self._sending:  # only here, and while nobody sends: another connection may get its descriptor
            self._connection.close()

    def _end(self, why: object) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self.broken = broken = self.broken or LinkBroken(str(why))
            lost, self._waiting = self._waiting, deque()
        for answer in lost:
            answer.set_exception(broken)


def _read(fill: Fill) -> Answer:
    written, limited, length = receive_head(fill, ANSWER)
    if length > _MOST_TEXT:
        raise ConnectionError("something else than an answer has come")
    waiting, refusal, ending = json.loads(fill(bytearray(length))) if length else ("", "", None)
    return Answer(written, waiting, limited, refusal, None if ending is None else _ENDINGS[ending[0]](ending[1]))
