"""Draws and feedback over a connection: `ShardServer` in the process of a shard, `ShardLink` in that of a learner."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchreplay.buffer.base import MAX_BATCH
from torchreplay.buffer.stats import Stats
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.ray.sharded.batch_block import Layout, RaggedItems
from torchreplay.ray.sharded.shard_sampler import Answer, ShardReport
from torchreplay.ray.wire.connection import MARK, Arrival, Fill, Receive
from torchreplay.ray.wire.link import Link, Reply
from torchreplay.ray.wire.server import Server

REQUEST: Final = struct.Struct("<4sId")
"""The mark, items, and of a draw the largest raw priority known; of TD errors, which follow behind keys, NaN."""

_KINDS: Final = {"int": "q", "float": "d", "bool": "?"}
ANSWER: Final = struct.Struct("<4sI" + "".join(_KINDS[str(field.type)] for field in fields(Stats)) + "dqddqqdd")
"""The mark, bytes of JSON, and of a draw what a report says in numbers."""

_MOST_TEXT: Final = 1 << 20
_STATS: Final = tuple(field.name for field in fields(Stats))
_figures: Final = attrgetter(*_STATS)
_NOTHING: Final = (0,) * (len(_STATS) + 8)
_ERRORS: Final = {kind.__name__: kind for kind in (MemoryError, OverflowError, RuntimeError, ValueError)}


class ShardServer(Server):
    """Answers learners of other nodes by `Shard.draw` and `Shard.update`."""

    request = REQUEST

    def __init__(self, host: str, draw: Callable[[int, float], Answer], update: Callable[[Any, Any], int]) -> None:
        self._draw, self._update = draw, update
        super().__init__(host)

    def answer(self, values: list[Any], fill: Fill) -> list[Any]:
        """Draws, or feeds back."""
        n, largest = values
        if n > MAX_BATCH:
            raise ConnectionError("more items are asked for than a batch has")
        try:
            if not math.isnan(largest):
                return _answer_to_draw(*self._draw(n, largest))
            keys = fill(np.empty(n, np.int64))
            self._update(keys, fill(np.empty(n)))
            return [ANSWER.pack(MARK, 0, *_NOTHING)]
        except ConnectionError:
            raise
        except Exception as error:
            said = json.dumps([type(error).__name__, str(error)[:10_000]]).encode()
            return [ANSWER.pack(MARK, len(said), *_NOTHING), said]


def _answer_to_draw(report: ShardReport, block: NDArray[np.uint8] | RaggedItems | None) -> list[Any]:
    said, arrays, shared = b"", list[Any](), tuple[int, ...]()
    if isinstance(block, RaggedItems):
        arrays, shared = [block.block, *block.lengths, *block.values], block.of
    elif block is not None:
        arrays = [block]
    if report.trouble or report.barren or shared:
        shapes = [array.shape for array in arrays[1:]]
        said = json.dumps([report.trouble, report.barren, shapes, shared]).encode()
    own = report.candidates, report.writers, report.since_departure, report.moment
    return [ANSWER.pack(MARK, len(said), *_figures(report.stats), *report.drawn, *own), said, *arrays]


class ShardLink(Link):
    """A learner's own connection to a shard of another node."""

    head = ANSWER

    def draw(self, candidates: int, largest: float, layout: Layout) -> Reply[Answer]:
        """Asks for candidates, as `Shard.draw` does."""
        return self.ask(partial(_read, layout), REQUEST.pack(MARK, candidates, largest))

    def update(self, keys: NDArray[np.int64], td: NDArray[np.float64]) -> Reply[bool]:
        """Feeds back TD errors, as `Shard.update` does; the answer says that they are applied."""
        arrays = map(np.ascontiguousarray, (keys, td))
        return self.ask(partial(_read, None), REQUEST.pack(MARK, len(keys), math.nan), *arrays)


def _read(layout: Layout | None, head: list[Any], fill: Receive) -> Arrival[Answer | Exception | bool]:
    """Returns the answer: to a draw of items that lie so; or True, TD errors are applied."""
    length, *figures, total, drawable, smallest, beta, n, writers, since_departure, moment = head
    if length > _MOST_TEXT:
        raise ConnectionError("something else than an answer has come")
    said: Any = json.loads((yield from fill(bytearray(length)))) if length else (None, None, (), ())
    if len(said) == 2:
        kind, message = said
        return _ERRORS.get(kind, RuntimeError)(message if kind in _ERRORS else f"{kind}: {message}")
    if layout is None:
        return True
    trouble, barren, shapes, of = said
    stats = Stats.of(dict(zip(_STATS, figures, strict=True)))
    drawn = TreeSummary(total, drawable, smallest, beta)
    report = ShardReport(stats, drawn, n, writers, since_departure, trouble, barren, moment)
    count = len(shapes) - len(of)  # of lengths: fields may share them
    if not 0 <= n <= MAX_BATCH or any(shape[0] != n for shape in shapes[:count]):
        raise ConnectionError("items have come that nobody has asked for")
    if not n:
        return report, None
    block = yield from fill(layout.new_block(n).numpy())
    if not layout.is_ragged:
        return report, block
    parts: list[Any] = []
    for k, shape in enumerate(shapes):
        parts.append((yield from fill(np.empty(shape, np.int64 if k < count else np.uint8))))
    return report, RaggedItems(block, tuple(parts[:count]), tuple(of), tuple(parts[count:]))
