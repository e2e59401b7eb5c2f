"""`QueueLoader`: a queue whose batches worker processes draw and transform."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from torchreplay.buffer.base import source_of
from torchreplay.buffer.local_source import LocalSource
from torchreplay.buffer.queue import NO_LOOP
from torchreplay.errors import Stopped
from torchreplay.loading.dataset import ReplayDataset
from torchreplay.loading.group_dataset import GroupDataset
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import Fifo
from torchreplay.segment.waits import MEANWHILE, Meanwhile
from torchreplay.validation import checked_instance, checked_int


class QueueLoader(DataLoader[Any]):
    """A `DataLoader` for a queue: its workers draw batches and transform them, for the loop of this process.

    A worker holds what it has drawn until the loop gets it. From then on this process holds it, as if it had drawn it:
    until the loop asks for its next batch, or until `commit`, as `Fifo(commit=)` says. What the loop never gets goes
    back when the workers end, and with `persistent_workers` when the next iteration begins. So does what a worker holds
    that dies; the `DataLoader` says that it did. If the items of a batch on its way went back, and somebody else has
    got some of them, the loop does not get that batch.

    Each worker draws whole batches, and they come in turns. So items come in their order within a batch, and the
    batches nearly so. A worker that draws ahead holds as many batches as `prefetch_factor` says. A commit by hand, or
    the loop's next batch, must leave room for these.

    Args:
        dataset: Of the queue. Its `prefetch` does not matter with workers, which draw ahead themselves. Its place in
            `steps` stays in the workers; what its `state_dict` says of held items is right.
        num_workers: Processes that draw; 0: this one does.
        collate_fn: Transforms a batch, in a worker. What it returns must be the `ReplayBatch`, or a copy of that by
            `batch.copy()` or `batch | {...}`.
        **options: As for a `DataLoader`. `batch_size` is the dataset's.

    Raises:
        ValueError: The dataset is of no queue, or has a device beside workers; or a `batch_size` is given. Or the queue
            cannot hold as many batches as the workers draw ahead.
        TypeError: The dataset is none, or a `GroupDataset`, which draws where the loop is.

    Example:
        >>> queue = tr.ReplayBuffer({"x": tr.Field()}, capacity=100, sampler=tr.Fifo())
        >>> keys = queue.extend(x=torch.arange(20.0))
        >>> def doubled(batch):
        ...     return batch | {"x": 2 * batch["x"]}
        >>> loader = tr.QueueLoader(tr.ReplayDataset(queue, 5, steps=4), num_workers=2, collate_fn=doubled)
        >>> sum(batch["x"].sum().item() for batch in loader)
        380.0
    """

    def __init__(self, dataset: ReplayDataset, num_workers: int = 0, **options: Any) -> None:
        checked_instance("dataset", dataset, ReplayDataset, "a ReplayDataset of a queue")
        if isinstance(dataset, GroupDataset):
            raise TypeError("dataset is a GroupDataset, which draws in the process that trains: iterate it itself")
        if not isinstance(dataset.buffer.sampler, Fifo):
            raise ValueError(f"the buffer's sampler is {dataset.buffer.sampler}: a QueueLoader needs a queue, Fifo()")
        if "batch_size" in options:
            raise ValueError(
                f"batch_size is {options['batch_size']!r}: the dataset has one, {dataset.batch_size}, and its batches "
                f"are whole; leave it out"
            )
        if checked_int("num_workers", num_workers, 0):
            dataset = _ForTheLoop(dataset)
        super().__init__(dataset, batch_size=None, num_workers=num_workers, **options)
        self._queue = source_of(dataset.buffer)
        self._require_room(dataset)

    def _require_room(self, dataset: ReplayDataset) -> None:
        ahead = self.num_workers * (self.prefetch_factor or 0)
        rows = (ahead + 2) * dataset.batch_size * dataset.buffer.view.rows_of_an_item
        if ahead and rows > dataset.buffer.capacity:
            raise ValueError(
                f"{self.num_workers} workers hold {ahead} batches of {dataset.batch_size:,} items ahead of the loop, "
                f"beside that of the loop and the next: {rows:,} rows, and the queue has a capacity of "
                f"{dataset.buffer.capacity:,}. Choose a larger one, smaller batches, or fewer workers"
            )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names the class that it returns
        """Hands out batch after batch.

        Raises:
            TypeError: `collate_fn` returns what does not say which items it is of.
        """
        batches = iter(super().__iter__())
        return self._taken_over(batches) if self.num_workers else batches

    def _taken_over(self, batches: Iterator[Any]) -> Iterator[Any]:
        assert isinstance(self._queue, LocalSource)  # a queue is one machine's
        segment, sampler = self._queue.segment, self._queue.config.sampler
        loop = segment.new_loop() if isinstance(sampler, Fifo) and sampler.commit == "next" else NO_LOOP
        try:
            while True:
                segment.end_loop(loop)
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                if not isinstance(batch, ReplayBatch) or not hasattr(batch, "holder"):
                    raise TypeError(
                        f"the workers' collate_fn returned {type(batch).__name__}, which does not say which items it "
                        f"is of; return the batch that it was given, batch.copy(), or batch | {{...}}"
                    )
                if segment.adopt(batch["key"], batch.holder, loop):
                    self._queue.note_items(batch)
                    yield batch
        except GeneratorExit:
            if not segment.closed:
                segment.end_loop(loop)
            raise
        except BaseException:  # such as what a DataLoader raises, at any place, when a worker died
            if not segment.closed:
                segment.leave_loop(loop)  # the batch has not arrived
            raise


def _leave_with(parent: int) -> Meanwhile:
    """Returns what ends a wait for items when the process that trains is gone: the worker holds what that never got."""

    def leave() -> None:
        if os.getppid() != parent:
            raise Stopped("the process that has started this worker is gone")

    return leave


class _ForTheLoop(ReplayDataset):
    """What a worker draws for the loop of the process that has started it."""

    _for_others = True

    def __init__(self, dataset: ReplayDataset) -> None:
        if dataset.device is not None:
            raise ValueError(
                f"the dataset's device is {dataset.device}, and workers draw to the CPU: leave device out, and move "
                f"batches in the loop, batch.to(device)"
            )
        super().__init__(
            dataset.buffer, dataset.batch_size, dataset.steps, 0, timeout=dataset.timeout, budget=dataset.budget
        )

    def _batches(self) -> Iterator[ReplayBatch]:
        queue = source_of(self.buffer)
        assert isinstance(queue, LocalSource)
        if get_worker_info() is not None:
            queue.segment.release(None)  # of an iteration before, whose loop has had all that it gets
            MEANWHILE.set(_leave_with(os.getppid()))
        for batch in super()._batches():
            batch.holder = queue.segment.presence
            yield batch
