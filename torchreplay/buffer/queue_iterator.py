"""The batches of a queue, one after the other, each held until the next one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchreplay import _C
from torchreplay.buffer.base import QueueOver, StreamSpec
from torchreplay.buffer.jams import LearnerJam
from torchreplay.buffer.prefetch import PrefetchIterator
from torchreplay.buffer.queue import NO_LOOP, taking
from torchreplay.errors import WouldBlockForever
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import Fifo
from torchreplay.segment.waits import Wait, Waiting

if TYPE_CHECKING:
    import torch

    from torchreplay.buffer.local_sampler import LocalSampler


MOST_LOOKS = 20
"""How often in a row a batch of one item is refused, though items are there, before that is the end."""


class QueueIterator(PrefetchIterator):
    """As `PrefetchIterator`, of a queue. Where no writer is left, the last batch may be shorter, and then it is over.

    Args:
        source: Of the queue to draw from.
        spec: Which batches, and how they are drawn.
    """

    def __init__(self, source: LocalSampler, spec: StreamSpec) -> None:
        super().__init__(source, spec)
        sampler = source.config.sampler
        assert isinstance(sampler, Fifo)
        ends_by_itself = sampler.commit == "next" and not spec.for_others
        self._loop = self._segment.new_loop() if ends_by_itself else NO_LOOP
        self._at_least = spec.batch_size
        self._refused = 0
        self._alone_since: float | None = None  # a wait that found no writer left was for one since then
        self._jam = LearnerJam(self._segment, source.config, spec.for_others)
        self._is_first = False  # nothing is to be said of small buffers
        self._from = (1.0, 1, 1.0, 0.0)  # all items are alike

    def drawn(self) -> list[dict[str, Any]]:
        """Returns nothing: what is drawn and was not handed out goes back, and comes again in its order."""
        return []

    def close(self) -> None:
        """Ends the thread. What is drawn and not handed out goes back; the last batch is done.

        Raises:
            RuntimeError: Another thread waits for a batch of it.
        """
        super().close()
        if self._loop and not self._segment.closed:
            self._segment.end_loop(self._loop)

    def _put_back(self, keys: torch.Tensor) -> None:
        self._segment.release(keys)

    def _end_last(self) -> None:
        self._refused = 0
        if self._loop and self._prefetch:  # else the draw does it
            self._segment.end_loop(self._loop)

    def _prefetcher(self) -> _C.Prefetcher:
        return _C.Prefetcher(self._segment, self._batch_size, None, self._loop)

    def _next_drawn(self, waiting: Waiting) -> ReplayBatch:
        if self._prefetch:
            told = self._from
            batch = super()._next_drawn(waiting)
            self._from = told
            return batch
        while True:
            try:
                sample = taking(self._source, self._at_least, self._loop, self._loop, self._spec.for_others)
                return self._source.draw(self._batch_size, None, self._timeout, waiting, self._place(), sample)
            except WouldBlockForever as error:
                self._accept_fewer(error)

    def _begins(self, waiting: type[Wait]) -> Waiting:
        """As in `PrefetchIterator`: once a wait has found no writer left, the next one need not wait for any again."""
        return lambda watched, timeout: waiting(watched, timeout, self._alone_since)

    def _check_shortage(self, shortage: Any, wait: Wait) -> None:
        try:
            super()._check_shortage(self._jam.looked_at(shortage, self._at_least, self._loop), wait)
        except WouldBlockForever as error:
            self._accept_fewer(error)

    def _accept_fewer(self, error: WouldBlockForever) -> None:
        """Has the next batch be as short as it must.

        What the draw found may be older than the last writer's last rows: so it looks again.

        Raises:
            WouldBlockForever: It is no end: writers are there, or none ever was.
            QueueOver: Nothing is left to draw.
        """
        stats = self._segment.stats()
        if not error.no_writer or not stats["inserted"]:
            raise error
        self._alone_since = error.alone_since
        if self._at_least == 1 and stats["drawable"]:
            self._refuse_again(error)
        ahead = self._ahead
        if not stats["drawable"] and (ahead is None or not (ahead.drawn() or ahead.ready())):
            raise QueueOver from None
        self._at_least = 1
        if ahead is not None:
            ahead.accept(1)

    def _refuse_again(self, error: WouldBlockForever) -> None:
        """Raises WouldBlockForever where items are there that are not handed out, however few are asked for."""
        self._refused += 1
        if self._refused > MOST_LOOKS:
            raise error
