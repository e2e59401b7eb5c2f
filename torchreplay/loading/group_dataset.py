"""`GroupDataset`: a queue as a stream of batches of whole groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from torchreplay.buffer.base import MAX_BATCH, StreamSpec, source_of
from torchreplay.buffer.groups import GROUP, GroupCounts, Groups
from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.loading.dataset import ReplayDataset
from torchreplay.schema.batch_plan import as_path
from torchreplay.schema.samplers import Fifo
from torchreplay.schema.spec import Field
from torchreplay.schema.views import Rows
from torchreplay.validation import checked_instance, checked_int, checked_timeout


class GroupDataset(ReplayDataset):
    """Batches of whole groups of a queue's items, such as the rollouts of one prompt, which GRPO compares.

    The members of a group come from any writers, in any order, between those of others. A batch has `groups` groups of
    `size` members. It is drawn when it is asked for: nothing is drawn ahead.

    - The members of a batch are taken at once, when all are there. Until then those of an unfinished group wait in the
      queue, in their places. So a learner's death, or the end of its iteration, changes nothing for them.
    - Several processes draw from the same queue, each its own batches. All members of a group go to the same one.
    - Groups come in the order in which they became whole, and members in the order in which they came.
    - Of more than `size` members the oldest are a group. The others begin the next group of the same value.
    - What was given is held, and done, as `Fifo(commit=)` says: a whole batch at a time, and never what still waits.
      `state_dict` and `ReplayCheckpoint` treat it as that of a `ReplayDataset`.
    - Where no writer is left, the last batch has fewer groups. With `min_size` it has unfinished ones, too. What is
      left then stays in the queue, and a warning is logged that says how much.
    - Where unfinished groups fill the queue, their other members find no room. That is found, and raised.

    Each look for groups takes O(capacity), and some microseconds for a thousand rows.

    Args:
        queue: A `ReplayBuffer` with `sampler=tr.Fifo()` and the view `tr.Rows()`, which is the default.
        by: The field whose value the members of a group share: a scalar of dtype int64. Of nested fields the names are
            joined by '/'.
        size: Members of a group.
        groups: Groups of a batch.
        min_size: Members with which a group is given that is late, or that nobody can complete any more. None: such a
            group is not given.
        timeout: Seconds after which a group is late, from when its oldest member was written. A late group with fewer
            than `min_size` members is dropped: they leave the queue, and `counts` counts them. Members that come later
            begin another group. None: a group may wait for ever.
        steps: Batches in one iteration; None for an endless one.
        device: Where the batch's tensors go, all but `batch["key"]`; None leaves them on the CPU.

    Raises:
        ValueError: `queue` is no queue, or its view has items of several rows. `by` is no field, or another one than it
            must be. A number is out of range, or a batch has more items than the queue holds rows. Or the queue has a
            field `group`.

    Example:
        >>> spec = {"prompt": tr.Field((), torch.int64), "reward": tr.Field()}
        >>> queue = tr.ReplayBuffer(spec, capacity=1_000, sampler=tr.Fifo())
        >>> keys = queue.extend(prompt=[7, 3, 7, 3, 7], reward=[1.0, 0.0, 0.0, 0.5, 1.0])
        >>> dataset = tr.GroupDataset(queue, by="prompt", size=2, groups=2)
        >>> batch = next(iter(dataset))
        >>> batch["prompt"], batch["group"]
        (tensor([7, 7, 3, 3]), tensor([0, 0, 1, 1]))
        >>> reward = batch["reward"].view(2, 2)  # of each group; GRPO's advantages follow
        >>> (reward - reward.mean(1, keepdim=True)).tolist()
        [[0.5, -0.5], [-0.25, 0.25]]
    """

    def __init__(
        self,
        queue: ReplayBuffer,
        by: str = "prompt",
        size: int = 8,
        groups: int = 8,
        min_size: int | None = None,
        timeout: float | None = None,
        *,
        steps: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        column = _column_of(queue, by)
        size, groups = checked_int("size", size, 1), checked_int("groups", groups, 1)
        if size * groups > min(queue.capacity, MAX_BATCH):
            raise ValueError(
                f"size is {size:,} and groups is {groups:,}: a batch has {size * groups:,} items, and the queue holds "
                f"{queue.capacity:,} rows; give a larger capacity, or fewer groups"
            )
        least = None if min_size is None else checked_int("min_size", min_size, 1, size)
        self._groups = Groups(column, size, groups, least, checked_timeout(timeout))
        self._by = by
        super().__init__(queue, size * groups, steps, 0, device)

    @property
    def counts(self) -> GroupCounts:
        """What became of the groups so far, in this process.

        Example:
            >>> dataset.counts
            GroupCounts(given=2, incomplete=0, dropped=0, dropped_items=0)
        """
        return self._groups.counts

    def _spec(self, spec: StreamSpec) -> StreamSpec:
        return replace(spec, groups=self._groups)

    def _share_of_this_worker(self) -> int | None:
        if get_worker_info() is not None:
            raise RuntimeError(
                "GroupDataset in a worker of a DataLoader: a worker asks for more before the training loop has had its "
                "last batches, and so would lose what it held. Drawing is native: leave num_workers at 0"
            )
        return self.steps

    def __repr__(self) -> str:
        groups = self._groups
        return (
            f"GroupDataset(by={self._by!r}, size={groups.size}, groups={groups.groups}, min_size={groups.min_size}, "
            f"timeout={groups.timeout}; use DataLoader(dataset, batch_size=None))"
        )


def _column_of(queue: Any, by: Any) -> int:
    """Returns the number of the field that says which group a row is of; raises ValueError where there is none."""
    checked_instance("queue", queue, ReplayBuffer, "a ReplayBuffer with sampler=tr.Fifo()")
    if not isinstance(queue.sampler, Fifo):
        raise ValueError(
            f"the buffer's sampler is {queue.sampler}: a GroupDataset gives each item once, and needs a queue; "
            f"expected a buffer with sampler=tr.Fifo()"
        )
    if not isinstance(queue.view, Rows):
        raise ValueError(
            f"the queue's view is {queue.view}, whose items have several rows: a GroupDataset takes tr.Rows(), with a "
            f"whole rollout in each row"
        )
    fields = source_of(queue).config.fields
    if (GROUP,) in fields:
        raise ValueError(
            f"the queue has a field {GROUP!r}, and batches of a GroupDataset have an entry of that name, the place of "
            f"each item's group in the batch; give the field another name"
        )
    path = as_path(by) if isinstance(by, str) else None
    if path not in fields:
        names = ", ".join(repr("/".join(name)) for name in fields)
        raise ValueError(f"by is {by!r:.200}, which is no field of the queue: expected one of {names}")
    column = fields[path]
    if not isinstance(column, Field) or column.shape != () or column.dtype != torch.int64:
        raise ValueError(
            f"by is {by!r}, which is {column}: expected a scalar of dtype int64, tr.Field((), torch.int64), whose "
            f"value the members of a group share"
        )
    return list(fields).index(path)
