"""Batches one after the other; a native thread draws some before they are asked for."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from torchreplay import _C
from torchreplay.buffer.base import EpochsOver, StreamSpec
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.errors import ReplayTimeout, Stopped
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import takes_what_it_draws, value_of
from torchreplay.segment.waits import LOG_EVERY, SLICE_NS, Wait, Waiting

if TYPE_CHECKING:
    from torchreplay._C import DrawnFrom
    from torchreplay.buffer.local_sampler import Into, LocalSampler

DRAWN_FIELDS = {"key": torch.int64, "weight": torch.float32, "probability": torch.float32}
"""What names a batch again that is not to be drawn anew, and its dtypes."""


DRAWS = "draws"
"""How often each item of such a batch was drawn, where it leaves after so many draws."""


def count_draws(segment: _C.Segment, drawn: dict[str, Any]) -> None:
    """Has the items of a batch that a state names count as drawn, as far as they do not."""
    if DRAWS in drawn:
        segment.raise_draws(drawn["key"], drawn[DRAWS])


LAST_LOOK = 1.0
"""Seconds for which a thread that draws may be late with its last look, when a wait's timeout is over."""


class PrefetchIterator:
    """An iterator of batches as `sample` returns them. It is for one thread, which must close it.

    Feedback and rows of this thread come after the batches ordered before. So the same seed and the same calls give the
    same batches. A batch does not know the feedback between its order and its handing out.

    Args:
        source: Of the buffer to draw from.
        spec: Which batches, and how they are drawn.
    """

    def __init__(self, source: LocalSampler, spec: StreamSpec) -> None:
        self._source = source
        self._segment = segment = source.segment
        self._batch_size, self._left, self._prefetch = spec.batch_size, spec.count, spec.prefetch
        self._timeout, self._waiting, self._again = spec.timeout, spec.waiting, spec.drawn
        self._last_epoch = () if spec.last_epoch is None else (spec.last_epoch,)
        self._from: DrawnFrom | None = None  # of the batch handed out last, unless it was drawn ahead
        self._spec, self._staging = spec, spec.staging
        self._limits = None if spec.budget is None else source.limits(spec.budget)
        self._finish = source.config.finish if spec.staging is None else None
        self._ahead: _C.Prefetcher | None = None
        self._ordered = 0  # and not taken
        self._is_first = True
        self._steady = False  # `prefetch` batches are ordered: one more, and one is taken
        self._beta = source.config.sampler.beta
        self._max_age = source.config.sampler.max_age if spec.prefetch else None  # what is drawn when asked for is not
        _ = segment.stream  # a forked child has one of its own from here on, and steps that belong to it
        self._waited_by: tuple[int, int] | None = None  # process and thread, while one waits for a batch
        self._others = segment.draws - segment.step  # draws of this and other processes before

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> ReplayBatch:
        """Returns the next batch.

        Raises:
            StopIteration: There were `count`, or the last epoch is over.
            ReplayTimeout, WouldBlockForever, Stopped: As `sample` does.
        """
        try:
            if self._source.pending.waiting:
                self._source.pending.apply_arrived()
            if self._staging is not None:
                self._staging.require_own_process()
            self._end_last()
            batch = self._next_batch()
            while self._max_age is not None and int(batch["age"][: (n := self._items_of(batch))].max()) > self._max_age:
                self._put_back(batch["key"][:n])  # an item has become too old since it was drawn ahead
                batch = self._next_batch()
        except RuntimeError:
            if self._source.ended:  # another thread has closed it, since
                raise Stopped(f"{self._source.config.called} was stopped") from None
            raise
        if self._left is not None:
            self._left -= 1
        if self._source.is_linked:
            self._source.note_items(batch)
        return batch

    def _next_batch(self) -> ReplayBatch:
        left = self._left
        if self._steady and (left is None or left > self._prefetch):
            return self._order_and_take()
        if left is not None and left <= 0:
            self.close()
            raise StopIteration
        waiting, self._waiting = self._waiting, Wait
        again = self._next_again() if self._again else None
        return self._next_drawn(self._begins(waiting)) if again is None else again

    def _begins(self, waiting: type[Wait]) -> Waiting:
        """Returns what begins a wait of this kind."""
        return waiting

    def _items_of(self, batch: ReplayBatch) -> int:
        room = None if self._staging is None else self._staging.room_of(batch)
        return len(batch["key"]) if room is None else int(room.drawn[0])

    def _put_back(self, keys: torch.Tensor) -> None:
        """Has the items of a batch that is not handed out drawn again, as far as they can be."""
        self._give_back(keys)

    def _place(self) -> Into:
        """Returns where the next batch goes, or what bounds it; None: into memory of its own, whatever it takes."""
        if self._staging is None:
            return self._limits
        batch = self._staging.place()
        return self._staging.room or batch

    @property
    def ready(self) -> int:
        """How many of the next batches are drawn. Batches from a state do not count."""
        return 0 if self._ahead is None or self._again else self._ahead.ready()

    @property
    def drawn_from(self) -> TreeSummary:
        """What the weights of the batch handed out last were computed from."""
        if self._from is not None:
            return TreeSummary(*self._from)
        assert self._ahead is not None
        return TreeSummary(*self._ahead.drawn_from)

    @property
    def answered(self) -> int:
        """The same: what is drawn is in this machine's memory."""
        return self.ready

    def drawn(self) -> list[dict[str, Any]]:
        """Returns what names the batches that are drawn and were not handed out, after waiting for those ordered.

        Returns:
            For each the `step` of its draw, `key` int64 `[B]`, `weight` and `probability` float32 `[B]`, and
            `drawn_from`, [total, drawable, smallest, beta].
        """
        if self._ahead is None:
            return []
        return [
            {"step": step, "drawn_from": list(drawn_from)}
            | {
                name: torch.frombuffer(bytearray(part), dtype=dtype)
                for (name, dtype), part in zip(DRAWN_FIELDS.items(), parts, strict=True)
            }
            for step, *parts, drawn_from in self._ahead.drawn()
        ]

    def close(self) -> None:
        """Ends the thread. What was drawn and is not handed out has not been drawn.

        Raises:
            RuntimeError: Another thread waits for a batch of it.
        """
        if self._ahead is not None:
            pid, thread = self._waited_by or (0, 0)
            if pid == os.getpid() and thread != threading.get_ident():
                raise RuntimeError("another thread waits for a batch of this iteration: it is for one thread")
            self._ahead.close()
            self._ahead, self._ordered, self._steady = None, 0, False

    def _end_last(self) -> None:
        """Called when another batch is asked for: whoever asks is done with the last one."""

    def _next_again(self) -> ReplayBatch | None:
        if self._prefetch:
            self._order()  # before it is handed out, as if it had been drawn here
        while self._again:
            drawn = self._again.popleft()
            count_draws(self._segment, drawn)
            batch, found = self._source.find(drawn["key"], drawn["step"])
            if len(batch["key"]) == len(drawn["key"]):
                batch["weight"].copy_(drawn["weight"])
                batch["probability"].copy_(drawn["probability"])
                self._from = TreeSummary.of_state(drawn.get("drawn_from", found))
                return batch
            if len(batch["key"]):
                self._give_back(batch["key"])
        return None

    def _give_back(self, keys: torch.Tensor) -> None:
        if takes_what_it_draws(self._source.config.sampler):
            self._segment.give_back(keys)

    def _next_drawn(self, waiting: Waiting) -> ReplayBatch:
        self._from = None
        if self._prefetch == 0:
            place = self._place()
            batch = self._source.draw(self._batch_size, None, self._timeout, waiting, place, self._sample_told)
        else:
            ahead = self._order()
            batch = self._wait_for_batch(ahead, ahead.take(0), waiting)
            self._ordered -= 1
            self._steady = self._ordered == self._prefetch
        if self._is_first:
            self._is_first = False
            if not self._last_epoch:
                self._source.warn_of_copies(self._batch_size, self.drawn_from.drawable)
        return batch

    def _sample_told(self, n: int, beta: float, deadline: int, out: Into) -> Any:
        """Draws as the segment does, and keeps what the batch was drawn from: other threads draw from it, too."""
        batch, told = self._segment.sample_told(n, beta, deadline, out, *self._last_epoch)
        if batch is None:
            self._end_if_emptied(told)
            return told
        self._from = told
        return batch

    def _end_if_emptied(self, shortage: Any) -> None:
        """Ends an iteration over epochs that has begun: the items that its last epoch had not drawn are gone."""
        if self._last_epoch and not self._is_first and shortage is not None and shortage[3] == 0:
            raise EpochsOver

    def _order_and_take(self) -> ReplayBatch:
        """Does what `_next_drawn` does where there is one batch to order, in one native call."""
        ahead, beta = self._ahead, self._beta
        assert ahead is not None
        batch = ahead.next(beta if beta.__class__ is float else self._next_beta(), self._place())
        return self._wait_for_batch(ahead, batch, self._begins(Wait))

    def _next_beta(self) -> float:
        # As many batches were drawn as will have been when this one is: others may have drawn more meanwhile.
        segment = self._segment
        return value_of(self._beta, max(self._others + segment.step + self._ordered, segment.draws))

    def _order(self) -> _C.Prefetcher:
        """Has as many batches drawn as shall be ahead of the next one, and that."""
        if self._segment.stopped:
            raise Stopped(f"{self._source.config.called} was stopped")
        if self._ahead is None:
            self._ahead = self._prefetcher()
        most = self._prefetch + 1 if self._left is None else min(self._left, self._prefetch + 1)
        while self._ordered + len(self._again) < most:
            self._ahead.order(self._next_beta(), self._place())
            self._ordered += 1
        return self._ahead

    def _prefetcher(self) -> _C.Prefetcher:
        return _C.Prefetcher(self._segment, self._batch_size, *self._last_epoch)

    def _check_shortage(self, shortage: Any, wait: Wait) -> None:
        """Raises unless waiting may help, as the native core has found."""
        self._end_if_emptied(shortage)
        self._source.check_shortage(shortage, self._batch_size, wait)

    def _wait_for_batch(self, ahead: _C.Prefetcher, result: Any, waiting: Waiting) -> ReplayBatch:
        """Returns `result`, or if that is no batch, the one that comes; it is finished."""
        if result.__class__ is not ReplayBatch:
            wait = waiting(self._source.watched, self._timeout)
            self._waited_by = os.getpid(), threading.get_ident()
            try:
                result = self._waited_for(ahead, result, wait)
            finally:
                self._waited_by = None
                wait.end()
        batch: ReplayBatch = result
        if self._finish is not None:
            self._finish(batch)
        return batch

    def _waited_for(self, ahead: _C.Prefetcher, result: Any, wait: Wait) -> Any:
        heard_at = time.monotonic()
        while result.__class__ is not ReplayBatch:
            if wait.expired:
                return self._last_look(ahead, result, wait)
            if result is not None:
                heard_at = time.monotonic()
                self._check_shortage(result, wait)
            elif time.monotonic() - heard_at >= LOG_EVERY:
                heard_at = time.monotonic()
                self._segment.refresh(wait.deadline_ns, True)  # which says in the log whose the lock is
            result = ahead.take(wait.slice_ns())
        return result

    def _last_look(self, ahead: _C.Prefetcher, known: Any, wait: Wait) -> Any:
        """Returns the batch that the thread has when the timeout is over, and it has looked once more.

        What it said before, `known`, may be older than the newest rows.
        """
        until = time.monotonic() + LAST_LOOK
        while True:
            wait.slice_ns()  # which raises when the buffer was stopped
            result = ahead.take(SLICE_NS)
            if result.__class__ is ReplayBatch:
                return result
            if self._segment.refresh(wait.deadline_ns, True) is None:  # it raises where the lock is another's
                continue
            late = time.monotonic() >= until
            known = known if result is None else result
            if known is not None and (result is not None or late):
                self._check_shortage(known, wait)
            if late:
                raise ReplayTimeout(f"no batch of {self._batch_size:,} within {self._timeout} s")
