"""`Queue`: what a buffer with `Fifo` has beside others: batches that are held until their learner is done with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torchreplay.buffer.base import MAX_BATCH, BatchSource
from torchreplay.buffer.jams import LearnerJam
from torchreplay.buffer.local_sampler import Into, Limits, Sample
from torchreplay.schema.batch import ReplayBatch, keys_of
from torchreplay.schema.config import Configured
from torchreplay.schema.samplers import Fifo, Schedule
from torchreplay.segment.waits import Wait
from torchreplay.validation import checked_int

if TYPE_CHECKING:
    import torch

    from torchreplay import _C
    from torchreplay.buffer.local_sampler import LocalSampler

NO_LOOP = 0
"""The number of a loop for the native core that none has."""


def taking(sampler: LocalSampler, at_least: int, loop: int, ends: int, for_others: bool = False) -> Sample:
    """Returns what draws from a queue as the segment's `sample` does.

    Args:
        sampler: Of the queue.
        at_least: Items in a batch, at the least.
        loop: The number under which the batch is held.
        ends: That of what is done when it is drawn.
        for_others: Another process takes over what this one holds.
    """
    segment, jam = sampler.segment, None

    def sample(n: int, beta: float, deadline: int, out: Into) -> Any:
        nonlocal jam
        result: Any = segment.sample(n, beta, deadline, out, at_least, loop, ends)
        if result.__class__ is not ReplayBatch:
            if jam is None:
                jam = LearnerJam(segment, sampler.config, for_others)
            result = jam.looked_at(result, at_least, loop)
        return result

    return sample


class Loop:
    """What a thread that calls `sample` holds: done when it asks for more, and back in its place when it ends.

    A batch is held under a number of its own until it has arrived: an error on its way gives it back.

    Args:
        segment: The queue's memory.
        by_hand: Only `commit` ends what it holds.

    Attributes:
        held: The number under which the last batch is held.
        coming: That of the batch that is being drawn.
    """

    def __init__(self, segment: _C.Segment, by_hand: bool) -> None:
        self._segment, self._by_hand = segment, by_hand
        self.held = self.coming = NO_LOOP

    def begin(self) -> tuple[int, int]:
        """Returns the number for the next batch, and that of what is done then."""
        self.give_up()
        self.coming = self._segment.new_loop()
        return self.coming, self.held

    def arrive(self) -> None:
        """Says that the batch is there."""
        if self._by_hand:
            self._segment.keep_loop(self.coming)
        else:
            self.held = self.coming
        self.coming = NO_LOOP

    def give_up(self) -> None:
        """Gives back what was drawn and has not arrived."""
        if self.coming:
            self._segment.leave_loop(self.coming)
            self.coming = NO_LOOP

    def __del__(self) -> None:
        with suppress(Exception):  # the buffer may be closed, and the interpreter at its end
            if self.held:
                self._segment.leave_loop(self.held)


class Queue(Configured):
    """The part of a `ReplayBuffer` that hands out batches to be held. Its calls are refused unless it is a queue."""

    _sampler: LocalSampler
    _segment: _C.Segment
    _nonce: int
    _local: threading.local

    @contextmanager
    def claim(
        self,
        batch_size: int,
        *,
        at_least: int | None = None,
        timeout: float | None = None,
        budget: Mapping[str, int] | None = None,
    ) -> Iterator[ReplayBatch]:
        """Draws a batch from a queue for a `with` block: done at its end, and back in its place after an exception.

        Args:
            batch_size: Number of items, B.
            at_least: A batch may be as short, if no more items are there; None: it has `batch_size`.
            timeout: Seconds to wait at most, as in `sample`.
            budget: Of ragged fields: the most elements that the batch may have, as in `sample`.

        Yields:
            The batch, as `sample` returns it.

        Raises:
            ValueError: The buffer is no queue, or an argument is out of range.
            RuntimeError: This thread is within another claim.
            ReplayTimeout, WouldBlockForever, Stopped: As `sample` does.

        Example:
            >>> queue = tr.ReplayBuffer({"obs": tr.Field()}, capacity=100, sampler=tr.Fifo())
            >>> keys = queue.extend(obs=torch.arange(6.0))
            >>> with queue.claim(4) as batch:
            ...     loss = batch["obs"].mean()  # an exception here would give the items back
            >>> queue.num_items
            2
        """
        self._require_queue("claim()")
        sampler = self._sampler
        assert isinstance(sampler, BatchSource)
        checked = None if budget is None else sampler.checked_budget(budget)
        limits = None if checked is None else sampler.limits(checked)
        local = self._local  # which close() replaces
        if getattr(local, "claim", None) is not None:
            raise RuntimeError("claim() within another claim() of this thread: end that first, or claim more at once")
        local.claim = claim = Loop(self._segment, by_hand=False)
        try:
            batch = self._sample_queue(batch_size, None, timeout, limits, None, at_least, claim)
            sampler.warn_of_budget(checked or {}, batch)
            yield batch
        except BaseException:
            if not self._segment.closed:  # else all went back
                claim.give_up()
                self._segment.leave_loop(claim.held)
            raise
        else:
            self._segment.end_loop(claim.held)
        finally:
            local.claim = None

    def commit(self, batch: ReplayBatch | torch.Tensor | None = None) -> int:
        """Ends what is held: these items leave the queue, or come again where `max_draws` says so.

        Args:
            batch: A batch of this queue, or its keys; None: all that this process was handed, in every loop. What was
                drawn ahead is not.

        Returns:
            How many items. Fewer than the batch has, where others were overwritten.

        Raises:
            ValueError: The buffer is no queue, an item is not held here, or the batch is of another buffer; nothing is
                changed.

        Example:
            >>> queue = tr.ReplayBuffer({"obs": tr.Field()}, capacity=100, sampler=tr.Fifo(commit="manual"))
            >>> keys = queue.extend(obs=torch.arange(6.0))
            >>> batches = [queue.sample(2), queue.sample(2)]
            >>> queue.commit()  # the model that has learned from them is saved
            4
        """
        self._require_queue("commit()")
        return self._segment.commit(self._held_keys(batch))

    def release(self, batch: ReplayBatch | torch.Tensor | None = None) -> int:
        """Gives back what is held: these items are in their old places again, for anybody.

        Args:
            batch: A batch of this queue, or its keys; None: all that this process was handed.

        Returns:
            How many items.

        Raises:
            ValueError: As for `commit`; so a second release of the same batch.

        Example:
            >>> queue = tr.ReplayBuffer({"obs": tr.Field()}, capacity=100, sampler=tr.Fifo())
            >>> keys = queue.extend(obs=torch.arange(6.0))
            >>> queue.release(queue.sample(4))
            4
            >>> queue.sample(2)["obs"]
            tensor([0., 1.])
        """
        self._require_queue("release()")
        return self._segment.release(self._held_keys(batch))

    def _held_keys(self, batch: Any) -> Any:
        if not isinstance(batch, dict):
            return batch
        keys = keys_of(batch, self._nonce)
        if keys is None:
            raise ValueError("the batch has no 'key', which says whose items they are; give a batch, or its keys")
        return keys

    def _require_queue(self, call: str) -> Fifo:
        sampler = self._config.sampler
        if not isinstance(sampler, Fifo):
            raise ValueError(
                f"{call} is for a queue, and the buffer's sampler is {sampler}; expected a buffer with "
                f"sampler=tr.Fifo()"
            )
        return sampler

    def _sample_queue(
        self,
        batch_size: int,
        beta: Schedule | None,
        timeout: float | None,
        out: ReplayBatch | Limits | None,
        device: Any,
        at_least: int | None,
        loop: Loop | None = None,
    ) -> ReplayBatch:
        """Does what `sample` does of a queue, for a loop; None: that of this thread."""
        by_hand = self._require_queue("at_least=").commit == "manual"
        batch_size = checked_int("batch_size", batch_size, 1, MAX_BATCH)
        least = batch_size if at_least is None else checked_int("at_least", at_least, 1, batch_size)
        if least > self._config.capacity:
            what = f"batch_size is {batch_size}" if at_least is None else f"at_least is {at_least}"
            raise ValueError(f"{what}: the queue holds {self._config.capacity:,} rows, and never has as many items")
        if loop is None:
            loop = getattr(self._local, "loop", None)
            if loop is None:
                loop = self._local.loop = Loop(self._segment, by_hand)
        coming, ends = loop.begin()
        try:
            batch = self._sampler.draw(batch_size, beta, timeout, Wait, out, taking(self._sampler, least, coming, ends))
            if device is not None:
                batch = batch.to(device)
        except BaseException:
            if not self._segment.closed:
                loop.give_up()
            raise
        loop.arrive()
        return batch
