"""What a learner does with a `ShardedReplay`: drawing batches of all shards, and feeding TD errors back."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.buffer.base import Pin, Replay
from torchreplay.buffer.sampling import MAX_BATCH, MISSING, Missing, require_all
from torchreplay.cuda.copies import DeviceCopies
from torchreplay.cuda.staging import Staging
from torchreplay.ray.sharded.client import ShardClient
from torchreplay.ray.sharded.gathering import Gathering
from torchreplay.ray.sharded.priority_updates import Feedback
from torchreplay.ray.sharded.sample_request import SampleRequestStream
from torchreplay.ray.sharded.sampler import ShardedSampler
from torchreplay.schema.batch import ReplayBatch, keys_of
from torchreplay.schema.samplers import Schedule
from torchreplay.segment.waits import Wait
from torchreplay.validation import checked_choice, checked_int


class ShardedDrawing(Replay):
    """The part of a `ShardedReplay` that learners use."""

    shards: ShardClient
    _draws: ShardedSampler
    _feedback: Feedback
    _gathering: Gathering
    _nonce: int

    @abstractmethod
    def require_open(self) -> None:
        """Raises RuntimeError if this object is closed."""

    def sample(self, batch_size: int, beta: Schedule | None = None, timeout: float | None = None) -> ReplayBatch:
        """Draws a batch from all shards, stratified and with replacement; waits until the limiter admits it.

        Every shard is asked once, and hears at once what was drawn if explorers wait for that; `ReplayDataset` has
        several batches under way at a time and is faster.

        Args:
            batch_size: Number of items, B.
            beta: Exponent of the weights, instead of the sampler's own: a number, or a schedule of the batches drawn.
            timeout: Seconds to wait at most, for rows and for answers; None: as long as someone is left who may write.
                Answers of other nodes take a millisecond or more: in less time there is no batch.

        Returns:
            The fields, each `[B, *shape]`, with `key` int64 `[B]`, `weight` and `probability` float32 `[B]`: those of
            the union of all shards. Items of one shard lie together.

        Raises:
            ValueError: `batch_size` is below 1 or too large, or beta is negative.
            ReplayTimeout: The timeout passed; the text says what for, or which shard does not answer.
            WouldBlockForever: Too few rows, and nobody is left to write more.
            Stopped: The buffer was stopped, or the process that made it is gone.
        """
        self.require_open()
        self._feedback.apply_arrived()
        wait = Wait(self.shards, timeout)
        try:
            return self._draws.draw(batch_size, beta, wait)
        finally:
            wait.end()

    def gather(self, keys: Any, missing: Missing = "drop") -> ReplayBatch:
        """Returns the items anchored at given rows of any shards.

        It counts as no draw: the limiter and the streams of draws do not notice. Under `Hindsight` items come as they
        were lived: nothing is relabelled. TD errors that this process has fed back before are known to it.

        Args:
            keys: int64 `[n]`, or a batch of this buffer, whose `key` is taken.
            missing: What becomes of items that cannot be drawn, because their rows were overwritten, lost with their
                shard, or are not complete. `"drop"`: they are left out, and the batch is smaller. `"raise"`: there is
                no batch.

        Returns:
            A batch of the m <= n items there are, in the order of `keys`; `key` says which. `weight` (with the
            sampler's beta) and `probability` are those that a draw from all shards would give them, each shard being as
            it is just after its items were found.

        Raises:
            ValueError: The keys are not int64 `[n]`, the batch is of another buffer, or `missing` is neither.
            MissingItems: There are such items, and `missing` is `"raise"`: how many, and the first one's key.
            Stopped: The process that made the buffer is gone.
        """
        checked_choice("missing", missing, MISSING)
        self.require_open()
        self._feedback.apply_arrived()
        wanted = keys_of(keys, self._nonce) if isinstance(keys, dict) else keys
        batch = self._gathering.gather(wanted)
        if missing == "raise":
            require_all(wanted, batch)
        return batch

    def batches(
        self,
        batch_size: int,
        count: int | None,
        prefetch: int,
        timeout: float | None,
        waiting: type[Wait],
        drawn: deque[dict[str, Any]],
        staging: Staging | None = None,
    ) -> SampleRequestStream:
        """Returns a stream of batches; the shards are asked for `prefetch` of them ahead."""
        checked_int("batch_size", batch_size, 1, MAX_BATCH)
        self.require_open()
        return SampleRequestStream(self._draws, self._feedback, batch_size, count, prefetch, timeout, waiting, staging)

    def staging(self, batch_size: int, prefetch: int, device: torch.device, pin: Pin | None) -> Staging | None:
        """Returns what takes batches to a CUDA device while the learner computes; None: each is copied by itself.

        Raises:
            ValueError: `pin` is `"ring"`: the shards' rings are other processes' to page-lock.
        """
        if pin == "ring":
            raise ValueError('pin="ring" page-locks the memory of a ReplayBuffer: expected another for a ShardedReplay')
        if pin == "off":
            return None
        return Staging(self, batch_size, prefetch, DeviceCopies(device))

    def update_priorities(self, batch_or_keys: ReplayBatch | Any, td: Any) -> None:
        """Feeds TD errors back to exactly the items they were computed from, each to its own shard.

        It returns when the TD errors are on their way; draws that this process asks for later know them. Those of rows
        overwritten since, or lost with their shard, are dropped and counted (`stats().stale_updates`,
        `lost_updates`). Of equal keys the last one wins.

        Those on a CUDA device are not waited for. They are copied beside the learner's work, as they are at this point
        of its stream. They are sent once they have come, in the order given, when this process next calls the buffer or
        asks for a batch; `flush` waits for them.

        Args:
            batch_or_keys: A batch of this buffer, or int64 keys `[n]`.
            td: TD errors `[n]` of any real dtype, on any device; their absolute values are taken.

        Raises:
            ValueError: A shape does not fit, an error is NaN or infinite, a key was never issued, or the batch is of
                another buffer; nothing is applied. NaN or infinite errors from a CUDA device are raised by the next
                call, or by `flush`, which say which update it was.
        """
        self.require_open()
        self._feedback.send(batch_or_keys, td)

    def _unissued(self, keys: NDArray[np.int64]) -> int | None:
        self.require_open()
        return self._feedback.unissued(keys)

    def flush(self) -> None:
        """Waits until all TD errors fed back by this process have been applied, or counted as lost.

        Raises:
            ValueError: Some that came from a device are NaN or infinite: they are dropped, and the others applied.
        """
        self._feedback.flush()
