"""`LocalSampler`: drawing batches from a buffer's memory, and feeding TD errors back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from torch import Tensor

from torchreplay import _C
from torchreplay.buffer.base import MAX_BATCH, EpochsOver
from torchreplay.buffer.jams import why_short
from torchreplay.buffer.last_items import LastItems
from torchreplay.buffer.notices import warn_of_copies
from torchreplay.buffer.pending_updates import PendingUpdates, require_one_each
from torchreplay.cuda.copies import to_host
from torchreplay.cuda.staging import Room
from torchreplay.errors import MissingItems, ReplayTimeout, Stopped
from torchreplay.schema.batch import ReplayBatch, keys_of
from torchreplay.schema.batch_plan import GOALS
from torchreplay.schema.config import Config
from torchreplay.schema.samplers import Fifo, Schedule, counts_draws, value_of
from torchreplay.schema.spec import ragged_fields
from torchreplay.segment.delivery_log import DeliveryLog, RemotelyWritten
from torchreplay.segment.handle import Handle
from torchreplay.segment.waits import NEVER, Wait, Waiting, Watched
from torchreplay.validation import checked_choice, checked_int

if TYPE_CHECKING:
    from torchreplay._C import DrawnFrom, Shortage

Limits: TypeAlias = tuple[int, ...]
"""The most elements that a batch may have of each of its ragged fields, in their order; -1: any number."""

Into: TypeAlias = ReplayBatch | Room | Limits | None
"""What a batch is drawn into; or the limits of a new one; or None."""

Sample: TypeAlias = Callable[[int, float, int, Into], Any]
"""Draws so many items, with an exponent, until a deadline. Returns the batch, or what the core gives instead."""

Missing = Literal["drop", "raise"]
MISSING: tuple[Missing, ...] = get_args(Missing)
"""What `gather` does about items that cannot be drawn."""


def require_all(keys: Any, batch: ReplayBatch) -> None:
    """Raises MissingItems unless `batch`, which was gathered, has an item for each of `keys`, in their order."""
    wanted = np.asarray(keys.cpu() if isinstance(keys, Tensor) else keys, np.int64)
    found = batch["key"].numpy()
    if len(found) < len(wanted):
        same = wanted[: len(found)] == found
        first = len(found) if same.all() else int(same.argmin())
        raise MissingItems(len(wanted) - len(found), len(wanted), int(wanted[first]))


class LocalSampler(LastItems):
    """How one process draws from a buffer's memory, and feeds TD errors back.

    Args:
        segment: The buffer's memory.
        nonce: Its identity.
        config: What it was made of.

    Attributes:
        segment: The buffer's memory.
        delivery_log: Of its remote writers: ours, or that of the process that the handle came from.
        pending: TD errors on their way from a device.
        ended: Whether it is closed, and was stopped before.
    """

    def __init__(self, segment: _C.Segment, nonce: int, config: Config) -> None:
        self.segment, self.nonce, self.config = segment, nonce, config
        self.delivery_log: DeliveryLog | Handle | None = None
        self.pending = PendingUpdates(segment.update)
        self.ended = False
        self.is_linked = config.view.roles(config.fields) is not None
        self._finish = config.finish
        plan = config.view.plan(config.fields)
        if plan is not None:
            goal = GOALS.index(plan.goal)
            outputs = plan.native_outputs()
            segment.set_plan(outputs, plan.native, plan.steps, plan.gamma, goal, plan.share, plan.discount_field)

    # Drawing

    def draw(
        self,
        batch_size: int,
        beta: Schedule | None,
        timeout: float | None,
        waiting: Waiting,
        out: Into = None,
        sample: Sample | None = None,
    ) -> ReplayBatch:
        """Does what `ReplayBuffer.sample` does, waiting as `waiting` does.

        Args:
            batch_size: Number of items.
            beta: Exponent of the weights, or None.
            timeout: Seconds to wait at most, or None.
            waiting: The kind of wait.
            out: As `Into`.
            sample: What draws as the segment's `sample` does; None: that.
        """
        if self.pending.waiting:
            self.pending.apply_arrived()
        if batch_size.__class__ is not int or not 0 < batch_size <= MAX_BATCH:
            batch_size = checked_int("batch_size", batch_size, 1, MAX_BATCH)
        exponent = self.config.sampler.beta if beta is None else beta
        if exponent.__class__ is not float:
            exponent = value_of(exponent, self.segment.draws)
        elif beta is not None:
            exponent = value_of(exponent, 0)
        wait = None if timeout is None else waiting(self.watched, timeout)
        sample = self.segment.sample if sample is None else sample
        result = sample(batch_size, exponent, NEVER if wait is None else wait.deadline_ns, out)
        if result.__class__ is not ReplayBatch:
            wait = wait or waiting(self.watched, None)
            try:
                result = self._sample_waiting(sample, result, batch_size, exponent, wait, out)
            except BaseException:
                with suppress(RuntimeError):  # closed by another thread, which would hide what is raised
                    self.segment.withdraw()  # or writers would go on running ahead for a learner that gave up
                raise
            finally:
                wait.end()
        batch: ReplayBatch = result
        if self._finish is not None and out.__class__ is not Room:  # which has rubbish, too: its staging finishes it
            self._finish(batch)
        if self.is_linked:
            self.note_items(batch)
        return batch

    def limits(self, budget: Mapping[str, int]) -> Limits:
        """Returns a budget that was checked, by the places of the ragged fields of a batch."""
        return tuple(budget.get(name, -1) for name in ragged_fields(self.config.outputs()))

    @property
    def watched(self) -> Watched:
        """What a wait for rows looks at."""
        return self.segment if self.delivery_log is None else RemotelyWritten(self.segment, self.delivery_log)

    def gather(self, keys: Any, missing: Missing) -> ReplayBatch:
        """Does what `ReplayBuffer.gather` does."""
        checked_choice("missing", missing, MISSING)
        wanted = keys_of(keys, self.nonce) if isinstance(keys, dict) else keys
        batch, _ = self.find(wanted, None)
        if missing == "raise":
            require_all(wanted, batch)
        return batch

    def find(self, keys: Any, step: int | None) -> tuple[ReplayBatch, DrawnFrom]:
        """Does what `gather` does, and returns what the weights were computed from, too.

        With the `step` of a draw of this process, random choices are those it made.
        """
        self.pending.apply_arrived()
        beta = value_of(self.config.sampler.beta, self.segment.draws)
        batch, drawn_from = self.segment.gather(keys, beta, step)
        if self._finish is not None:
            self._finish(batch)
        if self.is_linked:
            self.note_items(batch)
        return batch, drawn_from

    def _sample_waiting(
        self, sample: Sample, result: Any, batch_size: int, beta: float, wait: Wait, out: Into
    ) -> ReplayBatch:
        while result.__class__ is not ReplayBatch:
            self.check_shortage(result, batch_size, wait)
            self.segment.wait_rows(result[-1], wait.slice_ns())
            result = sample(batch_size, beta, wait.deadline_ns, out)
        batch: ReplayBatch = result
        return batch

    def check_shortage(self, shortage: Shortage, batch_size: int, wait: Wait) -> None:
        """Raises unless `shortage`, which the native core gave instead of a batch, says that waiting may help."""
        why, inserted, needed, drawable, _ = shortage
        if why == "stopped":
            raise Stopped(f"{self.config.called} was stopped")
        if why == "over":
            raise EpochsOver
        trouble = self.trouble(why, batch_size)
        if trouble is None:
            remark = partial(self._remark, drawable)
            wait.check_rows(inserted, needed, drawable, self._rows_held(), self.config.view.complete_when, remark)
        elif why == "barren":
            wait.check_turns(trouble)
        else:
            raise RuntimeError(trouble)

    def _rows_held(self) -> int | None:
        """Returns the number of rows held; None where the lock is another's now, who may be stopped."""
        with suppress(ReplayTimeout):
            return self.segment.refresh(0, True)
        return None

    def _remark(self, drawable: int) -> str:
        """Returns what else there is to say where items are missing: of a queue, who holds some."""
        sampler = self.config.sampler
        if isinstance(sampler, Fifo):
            return why_short(self.segment, None if sampler.window is None else drawable) + self._expired()
        return self._small_ring() + self._leaving() + self._expired()

    def _small_ring(self) -> str:
        """Returns the remark that fewer items came than were written, where the minimum makes one of it."""
        min_size, ratio, *_ = self.segment.limiter
        capacity = self.config.capacity
        if ratio or min_size <= capacity:
            return ""
        return f"; min_size is more than the {capacity:,} rows that fit, of which those overwritten unseen do not count"

    def _leaving(self) -> str:
        """Returns the remark that items leave after so many draws, where they do."""
        sampler = self.config.sampler
        return f"; each item leaves after {sampler.max_draws:,} draws (max_draws)" if counts_draws(sampler) else ""

    def _expired(self) -> str:
        """Returns the remark that items became too old, where some did."""
        expired = self.segment.expired_items
        if not expired:
            return ""
        max_age, version = self.config.sampler.max_age, self.segment.policy_version
        return (
            f"; {expired:,} items have become too old: the learner is at policy_version {version:,}, and max_age is "
            f"{max_age:,}"
        )

    def trouble(self, why: str, batch_size: int) -> str | None:
        """Returns why there is no batch; None where all that is missing is items."""
        view, capacity = self.config.view, self.config.capacity
        if why == "barren":
            return (
                f"the ring turned without completing an item: {view} needs {view.rows_of_an_item} rows "
                f"of one stream at a time, and all writers' environments share the {capacity:,} rows; "
                f"{view.complete_when}. "
                f"Choose a larger capacity or fewer environments, or see that episodes complete items"
            )
        if why == "lapped":
            return (
                f"the ring turns faster than a batch is copied: {capacity:,} rows against batches of "
                f"{batch_size:,}. Choose a larger capacity, or slow the explorers with SamplesPerInsert"
            )
        return None

    def warn_of_copies(self, batch_size: int, items: int) -> int:
        """Warns if a batch was drawn of fewer items than it takes; returns up to which size nothing is to be said."""
        if batch_size <= items:
            return batch_size
        warn_of_copies(self.nonce, self.config.called, batch_size, items)
        return MAX_BATCH

    # Feeding back

    def update_otherwise(self, batch_or_keys: ReplayBatch | Any, td: Any, on_device: bool) -> None:
        """Does what one native call cannot: TD errors on a device or after such, and batches that we did not sign."""
        keys = keys_of(batch_or_keys, self.nonce) if isinstance(batch_or_keys, dict) else batch_or_keys
        if on_device:
            self.pending.add(self._checked_keys(keys, td), to_host(td))
            self.pending.apply_arrived()
            return
        try:
            self.flush()
        finally:
            if not self.segment.update(keys, td):
                raise ValueError(f"the keys are a value of type {type(keys).__name__}, expected int64 of shape (n,)")

    def flush(self, deadline: int = NEVER) -> None:
        """Does what `ReplayBuffer.flush` does.

        Args:
            deadline: Until when to wait for what a thread took over, in monotonic nanoseconds.
        """
        if self.pending.waiting:
            self.pending.flush()
        self.segment.settle(deadline)

    def _checked_keys(self, keys: Any, td: Tensor) -> Tensor:
        """Returns the keys in memory of their own; raises ValueError for what no TD errors can be applied to."""
        checked = self.segment.checked_keys(keys)
        require_one_each(td, len(checked))
        return checked
