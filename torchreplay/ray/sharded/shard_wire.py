"""Draws and feedback over a connection: `ShardServer` in the process of a shard, `ShardLink` in that of a learner."""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.buffer.base import MAX_BATCH
from torchreplay.buffer.stats import Stats
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.ray.sharded.batch_block import Layout, RaggedItems
from torchreplay.ray.sharded.shard_sampler import Answer, ShardReport
from torchreplay.ray.wire.connection import MARK, Address, LinkBroken, connect, send
from torchreplay.ray.wire.server import Server
from torchreplay.segment.waits import SLICE_NS

REQUEST: Final = struct.Struct("<4sId")
"""The mark, items, and of a draw the largest raw priority known; of TD errors, which follow behind keys, NaN."""

_STATS: Final = _C.figure_names()
_TYPES: Final = {field.name: str(field.type) for field in fields(Stats)}
_KINDS: Final = {"int": "q", "float": "d", "bool": "?7x"}
_FIGURES: Final = "dqddq" + "".join(_KINDS[_TYPES[name]] for name in _STATS) + "qdd"
ANSWER: Final = struct.Struct("<4sIQ" + _FIGURES)
"""The mark, bytes of JSON and of items, and of a draw what a report says in numbers, as `ShardHead` has it."""

_HEAD: Final = struct.Struct("<" + _FIGURES)
_figures: Final = attrgetter(*_STATS)
_NOTHING: Final = (0,) * (len(_STATS) + 8)
_ERRORS: Final = {kind.__name__: kind for kind in (MemoryError, OverflowError, RuntimeError, ValueError)}


class ShardServer(Server):
    """Answers learners of other nodes.

    Args:
        host: The address of the node, at which it listens.
        draw: Answers a draw, as `Shard.draw` does, where `native` does not.
        update: Feeds back, as `Shard.update` does, where `native` does not.
        native: Answers all that needs no words.
    """

    def __init__(
        self,
        host: str,
        draw: Callable[[int, float], Answer],
        update: Callable[[Any, Any], int],
        native: _C.ShardService | None = None,
    ) -> None:
        self._draw, self._update = draw, update
        self._native = native or _C.ShardService(None, 0, MAX_BATCH)
        super().__init__(host)

    def serve(self, connection: socket.socket) -> None:
        """Answers one learner."""
        while (call := self._native.serve(connection.fileno())) is not None:
            send(connection, *self._answer(*call))

    def _answer(self, n: int, largest: float, fed_back: tuple[bytes, bytes] | None) -> list[Any]:
        try:
            if fed_back is None:
                return _answer_to_draw(*self._draw(n, largest))
            keys, td = fed_back
            self._update(np.frombuffer(keys, np.int64), np.frombuffer(td))
            return [ANSWER.pack(MARK, 0, 0, *_NOTHING)]
        except Exception as error:
            said = json.dumps([type(error).__name__, str(error)[:10_000]]).encode()
            return [ANSWER.pack(MARK, len(said), 0, *_NOTHING), said]


def _answer_to_draw(report: ShardReport, block: NDArray[np.uint8] | RaggedItems | None) -> list[Any]:
    said, arrays, shared = b"", list[Any](), tuple[int, ...]()
    if isinstance(block, RaggedItems):
        arrays, shared = [block.block, *block.lengths, *block.values], block.of
    elif block is not None:
        arrays = [block]
    if report.trouble or report.barren or shared:
        shapes = [array.shape for array in arrays[1:]]
        said = json.dumps([report.trouble, report.barren, shapes, shared]).encode()
    nbytes = sum(array.nbytes for array in arrays)
    figures = *report.drawn, report.candidates, *_figures(report.stats), report.writers, report.since_departure
    return [ANSWER.pack(MARK, len(said), nbytes, *figures, report.moment), said, *arrays]


def read_report(head: bytes, trouble: str | None = None, barren: str | None = None) -> ShardReport:
    """Returns what an answer says of its shard, in the head and in words."""
    total, drawable, smallest, beta, n, *figures, writers, since_departure, moment = _HEAD.unpack(head)
    stats, drawn = Stats.of(dict(zip(_STATS, figures, strict=True))), TreeSummary(total, drawable, smallest, beta)
    return ShardReport(stats, drawn, n, writers, since_departure, trouble, barren, moment)


class ShardReply:
    """The answer of a shard of another node, to come. A draw's is an `Answer`; feedback's is True, once it is applied.

    Args:
        reply: What comes.
        layout: How the items of a draw lie; None: they are fed back.
    """

    __slots__ = ("_answer", "_layout", "native")

    def __init__(self, reply: _C.Reply, layout: Layout | None) -> None:
        self.native, self._layout = reply, layout
        self._answer: Answer | bool | Exception | None = None

    def done(self) -> bool:
        """Whether it is there."""
        return self.native.is_there

    def result(self, timeout: float | None = None) -> Any:
        """Returns it, or raises what has come instead; TimeoutError: nothing comes in so many seconds."""
        if (error := self.exception(timeout)) is not None:
            raise error
        return self._answer

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Returns what has come instead; None: nothing has."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self.native.wait(int(max(0.0, min(until - time.monotonic(), SLICE_NS * 1e-9)) * 1e9)):
            if time.monotonic() >= until:
                raise TimeoutError
        if self._answer is None:
            self._answer = self._read()
        return self._answer if isinstance(self._answer, Exception) else None

    def _read(self) -> Answer | bool | Exception:
        if lost := self.native.lost:
            return LinkBroken(lost)
        text = self.native.text
        said: Any = json.loads(text) if text else (None, None, (), ())
        if len(said) == 2:
            kind, message = said
            return _ERRORS.get(kind, RuntimeError)(message if kind in _ERRORS else f"{kind}: {message}")
        if self._layout is None:
            return True
        trouble, barren, shapes, of = said
        report = read_report(self.native.head, trouble, barren)
        try:
            return report, _items(self._layout, report.candidates, shapes, of, self.native.body())
        except (TypeError, ValueError) as error:
            return LinkBroken(f"items have come that nobody has asked for: {error}")


def _items(layout: Layout, n: int, shapes: Any, of: Any, body: Any) -> NDArray[np.uint8] | RaggedItems | None:
    """Returns the items of an answer."""
    if body is None:
        return None
    items: NDArray[np.uint8] = body.numpy()
    if not layout.is_ragged:
        return items
    count = len(shapes) - len(of)  # of lengths: fields may share them
    if not 0 <= n <= MAX_BATCH or any(shape[0] != n for shape in shapes[:count]):
        raise ValueError("another number of them")
    parts, at = list[Any](), layout.block_bytes(n)
    for k, shape in enumerate(shapes):
        dtype: Any = np.int64 if k < count else np.uint8
        end = at + math.prod(shape) * np.dtype(dtype).itemsize
        part = items[at:end]
        # Behind others it may lie where no int64 does.
        parts.append((np.frombuffer(part.tobytes(), dtype) if k < count else part).reshape(shape))
        at = end
    return RaggedItems(items[: layout.block_bytes(n)], tuple(parts[:count]), tuple(of), tuple(parts[count:]))


class ShardLink:
    """A learner's own connection to a shard of another node. Answers come in the order of the requests.

    Args:
        address: Of the shard's server.
        exchange: What sends and receives for this process.

    Raises:
        OSError: It cannot be reached.
    """

    def __init__(self, address: Address, exchange: _C.Exchange) -> None:
        with connect(address) as connection:
            self._link = _C.Link(exchange, connection.fileno(), _HEAD.size)

    @property
    def native(self) -> _C.Link:
        """The connection, for the native core."""
        return self._link

    @property
    def broken(self) -> Exception | None:
        """Why nothing comes through any more; None while it does."""
        return LinkBroken(why) if (why := self._link.broken()) else None

    def draw(self, candidates: int, largest: float, layout: Layout) -> ShardReply:
        """Asks for candidates, as `Shard.draw` does."""
        nbytes = 0 if layout.is_ragged else layout.block_bytes(candidates)
        return ShardReply(self._link.ask(nbytes, REQUEST.pack(MARK, candidates, largest)), layout)

    def update(self, keys: NDArray[np.int64], td: NDArray[np.float64]) -> ShardReply:
        """Feeds back TD errors, as `Shard.update` does; the answer says that they are applied."""
        head = REQUEST.pack(MARK, len(keys), math.nan)
        return ShardReply(self._link.ask(0, head, np.ascontiguousarray(keys).data, np.ascontiguousarray(td).data), None)

    def close(self) -> None:
        """Ends the connection; in a forked child, whose parent's it is, that goes on."""
        self._link.close()
