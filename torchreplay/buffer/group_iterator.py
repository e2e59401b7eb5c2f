"""Batches of whole groups of a queue's items, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchreplay.buffer.base import QueueOver, StreamSpec
from torchreplay.buffer.groups import GROUP, Groups, described, waiting_groups
from torchreplay.buffer.jams import LearnerJam
from torchreplay.buffer.queue_iterator import QueueIterator
from torchreplay.errors import WouldBlockForever
from torchreplay.schema.batch import ReplayBatch
from torchreplay.segment.waits import Waiting, logger

if TYPE_CHECKING:
    from torchreplay.buffer.local_sampler import Into, LocalSampler


class GroupJam(LearnerJam):
    """Finds that unfinished groups fill the queue, so that no member of theirs can come.

    Args:
        source: Of the queue.
        groups: Those that its learner draws.
    """

    def __init__(self, source: LocalSampler, groups: Groups) -> None:
        super().__init__(source.segment, source.config)
        self._groups = groups

    def check(self, at_least: int, loop: int) -> None:
        """Looks at the queue, as `LearnerJam.check` does. Groups that will be late make room by themselves."""
        if self._groups.timeout is None or not waiting_groups(self._segment, self._groups):
            super().check(at_least, loop)

    def _advice(self, mine: int) -> str:
        waiting = waiting_groups(self._segment, self._groups)
        if not waiting:
            return super()._advice(mine)
        held = "call commit() first, " if mine else ""
        return (
            f"{described(waiting, self._groups)}, and their others find no room; {held}give timeout=, after which such "
            f"groups are dropped or given with min_size= members"
        )

    def _advice_of_admission(self, mine: int) -> str:
        waiting = waiting_groups(self._segment, self._groups)
        if not waiting:
            return super()._advice_of_admission(mine)
        held = "call commit() first, " if mine else ""
        return (
            f"{described(waiting, self._groups)}; {held}begin the members of a group in one block, `with "
            f"writer.admit({self._groups.size}):`, or give timeout="
        )


class GroupIterator(QueueIterator):
    """As `QueueIterator`, of whole groups. Each batch is drawn when it is asked for.

    Args:
        source: Of the queue to draw from.
        spec: Which batches, and the groups in them.
    """

    def __init__(self, source: LocalSampler, spec: StreamSpec) -> None:
        super().__init__(source, spec)
        assert spec.groups is not None
        self._groups = spec.groups
        self._jam = GroupJam(source, spec.groups)
        self._is_end = False  # no writer is left: what there is is all that comes

    def _next_drawn(self, waiting: Waiting) -> ReplayBatch:
        while True:
            try:
                return self._source.draw(self._batch_size, None, None, waiting, None, self._sample_groups)
            except WouldBlockForever as error:
                self._accept_fewer(error)

    def _sample_groups(self, n: int, beta: float, deadline: int, out: Into) -> Any:
        groups, counts = self._groups, self._groups.counts
        batch, told, sizes, dropped, items = self._segment.sample_groups(
            *groups.native(), self._is_end, beta, deadline, self._loop, self._loop
        )
        counts.dropped += dropped
        counts.dropped_items += items
        if batch is None:
            _, inserted, needed, drawable, _ = told
            missing = drawable + needed - inserted  # as many may be there, in unfinished groups
            return self._jam.looked_at(told, missing, self._loop)
        self._is_end = False  # writers may have come since
        counts.given += len(sizes)
        counts.incomplete += int((sizes < groups.size).sum())
        batch[GROUP] = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes)
        return batch

    def _accept_fewer(self, error: WouldBlockForever) -> None:
        """Has the next batch consist of what there is, where nothing more comes.

        Raises:
            WouldBlockForever: It is no end: writers are there, or none ever was.
            QueueOver: Nothing is left to give. What stays is logged.
        """
        if not error.no_writer or not self._segment.stats()["inserted"]:
            raise error
        self._alone_since = error.alone_since
        if not self._is_end:
            self._is_end = True
            return
        waiting = waiting_groups(self._segment, self._groups)
        if waiting:
            items = sum(waiting.values())
            logger.warning(
                "%s has no writer any more, and %s: %s in it, and %s not given",
                self._source.config.called,
                described(waiting, self._groups),
                "this item stays" if items == 1 else f"these {items:,} items stay",
                "is" if items == 1 else "are",
            )
        raise QueueOver
