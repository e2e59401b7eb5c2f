"""What a learner does with a buffer: drawing batches, and feeding TD errors back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchreplay import _C
from torchreplay.buffer.pending_updates import PendingUpdates, require_one_each
from torchreplay.cuda.copies import to_host
from torchreplay.errors import MissingItems, ReplayTimeout, Stopped
from torchreplay.schema.batch import Finish, ReplayBatch, keys_of
from torchreplay.schema.config import Config
from torchreplay.schema.samplers import Schedule, value_of
from torchreplay.segment.delivery_log import DeliveryLog, RemotelyWritten
from torchreplay.segment.handle import Handle
from torchreplay.segment.waits import NEVER, Wait, Watched
from torchreplay.validation import checked_choice, checked_int, checked_kind

MAX_BATCH = 1 << 24

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


class Drawing:
    """The part of a `ReplayBuffer` that learners use."""

    _segment: _C.Segment
    _config: Config
    _nonce: int
    _ledger: DeliveryLog | Handle | None
    _finish: Finish | None
    _deferred: PendingUpdates

    def sample(
        self,
        batch_size: int,
        beta: Schedule | None = None,
        timeout: float | None = None,
        *,
        out: ReplayBatch | None = None,
    ) -> ReplayBatch:
        """Draws a batch, stratified and with replacement; waits until the limiter admits it.

        Args:
            batch_size: Number of items, B.
            beta: Exponent of the weights, instead of the sampler's own: a number, or a schedule of the batches drawn.
            timeout: Seconds to wait at most, for rows and for the lock; None: as long as someone is left who may write.
            out: A batch of as many items, whose tensors are overwritten: contiguous and on the CPU, such as those that
                `sample` returned before, page-locked or not. Autograd does not notice: a graph that still needs them
                must have been run backward. What a `Hindsight` view computes are new tensors.

        Returns:
            The fields, each `[B, *shape]`, with `key` int64 `[B]`, `weight` and `probability` float32 `[B]`. The memory
            is the batch's own, or that of `out`, which is returned.

        Raises:
            ValueError: `batch_size` is below 1 or too large, beta is negative, or a tensor of `out` does not fit; then
                nothing is drawn. After another error `out` holds parts of items.
            ReplayTimeout: The timeout passed; the text says what for, or which process holds the lock.
            WouldBlockForever: Too few rows, and nobody is left to write more.
            Stopped: The buffer was stopped.
        """
        if out is not None:
            checked_kind("out", out, out, (ReplayBatch,))
        return self._draw(batch_size, beta, timeout, Wait, out)

    def _draw(
        self,
        batch_size: int,
        beta: Schedule | None,
        timeout: float | None,
        waiting: type[Wait],
        out: ReplayBatch | None = None,
    ) -> ReplayBatch:
        """Does what `sample` does, waiting as `waiting` does."""
        if self._deferred.waiting:
            self._deferred.apply_arrived()
        if batch_size.__class__ is not int or not 0 < batch_size <= MAX_BATCH:
            batch_size = checked_int("batch_size", batch_size, 1, MAX_BATCH)
        exponent = self._config.sampler.beta if beta is None else beta
        if exponent.__class__ is not float:
            exponent = value_of(exponent, self._segment.draws)
        elif beta is not None:
            exponent = value_of(exponent, 0)
        wait = None if timeout is None else waiting(self._watched, timeout)
        result = self._segment.sample(batch_size, exponent, NEVER if wait is None else wait.deadline_ns, out)
        if result.__class__ is not ReplayBatch:
            wait = wait or waiting(self._watched, None)
            try:
                result = self._sample_waiting(result, batch_size, exponent, wait, out)
            except BaseException:
                self._segment.withdraw()  # or writers would go on running ahead for a learner that gave up
                raise
            finally:
                wait.end()
        if self._finish is not None:
            self._finish(result)
        return result

    @property
    def _watched(self) -> Watched:
        """What a wait for rows looks at."""
        return self._segment if self._ledger is None else RemotelyWritten(self._segment, self._ledger)

    def gather(self, keys: Any, missing: Missing = "drop") -> ReplayBatch:
        """Returns the items anchored at given rows.

        It counts as no draw: the limiter and the streams of draws do not notice. Under `Hindsight` items come as they
        were lived: nothing is relabelled.

        Args:
            keys: int64 `[n]`, or a batch of this buffer, whose `key` is taken.
            missing: What becomes of items that cannot be drawn, because their rows were overwritten or are not
                complete. `"drop"`: they are left out, and the batch is smaller. `"raise"`: there is no batch.

        Returns:
            A batch of the m <= n items there are, in the order of `keys`; `key` says which. `weight` (with the
            sampler's beta) and `probability` are those that a draw would give them.

        Raises:
            ValueError: The keys are not int64 `[n]`, the batch is of another buffer, or `missing` is neither.
            MissingItems: There are such items, and `missing` is `"raise"`: how many, and the first one's key.
        """
        checked_choice("missing", missing, MISSING)
        wanted = keys_of(keys, self._nonce) if isinstance(keys, dict) else keys
        batch = self._gather(wanted, None)
        if missing == "raise":
            require_all(wanted, batch)
        return batch

    def _gather(self, keys: Any, step: int | None) -> ReplayBatch:
        """Does what `gather` does; with the `step` of a draw of this process, random choices are those it made."""
        self._deferred.apply_arrived()
        beta = value_of(self._config.sampler.beta, self._segment.draws)
        batch: ReplayBatch = self._segment.gather(keys, beta, step)
        if self._finish is not None:
            self._finish(batch)
        return batch

    def _sample_waiting(
        self, result: Any, batch_size: int, beta: float, wait: Wait, out: ReplayBatch | None
    ) -> ReplayBatch:
        while result.__class__ is not ReplayBatch:
            self._check_shortage(result, batch_size, wait)
            self._segment.wait_rows(wait.slice_ns())
            result = self._segment.sample(batch_size, beta, wait.deadline_ns, out)
        return result

    def _check_shortage(self, result: Any, batch_size: int, wait: Wait) -> None:
        """Raises unless `result`, which the native core gave instead of a batch, says that waiting may help."""
        if result == "stopped":
            raise Stopped("the replay buffer was stopped")
        trouble = self._trouble(result, batch_size)
        if trouble is None:
            inserted, needed, drawable = result
            complete_when, remark = self._config.view.complete_when, self._small_ring()
            wait.check_rows(inserted, needed, drawable, self._rows_held(), complete_when, remark)
        elif result == "barren":
            wait.check_turns(trouble)
        else:
            raise RuntimeError(trouble)

    def _rows_held(self) -> int | None:
        """Returns the number of rows held; None where the lock is another's now, who may be stopped."""
        with suppress(ReplayTimeout):
            return self._segment.refresh(0, True)
        return None

    def _small_ring(self) -> str:
        """Returns the remark that fewer items came than were written, where the minimum makes one of it."""
        min_size, ratio, _ = self._segment.limiter
        capacity = self._config.capacity
        if ratio or min_size <= capacity:
            return ""
        return f"; min_size is more than the {capacity:,} rows that fit, of which those overwritten unseen do not count"

    def _trouble(self, result: Any, batch_size: int) -> str | None:
        """Returns why there is no batch; None where all that is missing is items."""
        view, capacity = self._config.view, self._config.capacity
        if result == "barren":
            return (
                f"the ring turned without completing an item: {view} needs {view.rows_of_an_item} rows "
                f"of one stream at a time, and all writers' environments share the {capacity:,} rows; "
                f"{view.complete_when}. "
                f"Choose a larger capacity or fewer environments, or see that episodes complete items"
            )
        if result == "lapped":
            return (
                f"the ring turns faster than a batch is copied: {capacity:,} rows against batches of "
                f"{batch_size:,}. Choose a larger capacity, or slow the explorers with SamplesPerInsert"
            )
        return None

    def update_priorities(self, batch_or_keys: ReplayBatch | Any, td: Any) -> None:
        """Feeds TD errors back to exactly the items they were computed from.

        TD errors of rows overwritten since are dropped and counted (`stats().stale_updates`). Of equal keys the last
        one wins. The next call of this object finds them applied. (Beside a `ReplayDataset` that draws ahead, its
        thread may apply them, after the batches that are ordered already: before others are to see them, call `flush`.
        Where the iteration ends while the buffer's lock does not come free, they are dropped and counted.)

        Those on a CUDA device are not waited for. They are copied beside the learner's work, as they are at this point
        of its stream. They are applied once they have come, in the order given, when this process next calls the buffer
        or has it draw; `flush` waits for them. So the draws meanwhile depend on how fast the device is. For the same
        draws in every run, call `flush` after each update, or feed back from the CPU.

        Args:
            batch_or_keys: A batch of this buffer, or a dict made of one with its `key`; or int64 keys `[n]`.
            td: TD errors `[n]` of any real dtype, on any device; their absolute values are taken.

        Raises:
            ValueError: A shape does not fit, an error is NaN or infinite, a key was never issued, or the batch is of
                another buffer; nothing is applied. NaN or infinite errors from a CUDA device are raised by the next
                call, or by `flush`, which say which update it was.
        """
        on_device = isinstance(td, Tensor) and td.is_cuda
        if on_device or self._deferred.waiting or not self._segment.update(batch_or_keys, td):
            self._update_otherwise(batch_or_keys, td, on_device)

    def _update_otherwise(self, batch_or_keys: ReplayBatch | Any, td: Any, on_device: bool) -> None:
        """Does what one native call cannot: TD errors on a device or after such, and batches that we did not sign."""
        keys = keys_of(batch_or_keys, self._nonce) if isinstance(batch_or_keys, dict) else batch_or_keys
        if on_device:
            self._deferred.add(self._checked_keys(keys, td), to_host(td))
            self._deferred.apply_arrived()
            return
        try:
            self.flush()
        finally:
            if not self._segment.update(keys, td):
                raise ValueError(f"the keys are a value of type {type(keys).__name__}, expected int64 of shape (n,)")

    def flush(self) -> None:
        """Has all TD errors applied that this process has fed back; waits for those on their way from a device.

        Raises:
            ValueError: Some are NaN or infinite: they are dropped, and the others applied.
        """
        self._flush(NEVER)

    def _flush(self, deadline: int) -> None:
        """Does what `flush` does, but until `deadline` only, in monotonic nanoseconds, for what a thread took over."""
        if self._deferred.waiting:
            self._deferred.flush()
        self._segment.settle(deadline)

    def _unissued(self, keys: NDArray[np.int64]) -> int | None:
        return self._segment.unissued(keys)

    def _checked_keys(self, keys: Any, td: Tensor) -> Tensor:
        """Returns the keys in memory of their own; raises ValueError for what no TD errors can be applied to."""
        checked = self._segment.checked_keys(keys)
        require_one_each(td, len(checked))
        return checked
