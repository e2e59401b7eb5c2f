"""`ShardedSource`: what a `ShardedReplay` hands its batches to datasets with."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.buffer.base import MAX_BATCH, BatchSource, Pin
from torchreplay.cuda.copies import DeviceCopies
from torchreplay.cuda.staging import Staging
from torchreplay.ray.sharded.priority_updates import Feedback
from torchreplay.ray.sharded.sample_request import SampleRequestStream
from torchreplay.ray.sharded.sampler import ShardedSampler
from torchreplay.schema.config import Config
from torchreplay.segment.waits import Wait
from torchreplay.validation import checked_int


class ShardedSource(BatchSource):
    """Batches of all shards.

    Args:
        sampler: What draws them.
        feedback: What is fed back meanwhile.
        config: Of the union.
        nonce: What signs the batches.
    """

    def __init__(self, sampler: ShardedSampler, feedback: Feedback, config: Config, nonce: int) -> None:
        self._sampler, self._feedback, self.config, self.nonce = sampler, feedback, config, nonce

    @property
    def seed(self) -> int:
        """The seed of the draws."""
        return self._sampler.seed

    def unissued(self, keys: NDArray[np.int64]) -> int | None:
        """Returns the index of the first of `keys` that names no row that any shard has or had."""
        self._sampler.shards.require_open()
        return self._feedback.unissued(keys)

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
        self._sampler.shards.require_open()
        return SampleRequestStream(
            self._sampler, self._feedback, batch_size, count, prefetch, timeout, waiting, staging
        )

    def staging(self, batch_size: int, prefetch: int, device: torch.device, pin: Pin | None) -> Staging | None:
        """Returns what takes batches to a CUDA device while the learner computes; None: each is copied by itself.

        Raises:
            ValueError: `pin` is `"ring"`: the shards' rings are other processes' to page-lock.
        """
        if pin == "ring":
            raise ValueError('pin="ring" page-locks the memory of a ReplayBuffer: expected another for a ShardedReplay')
        if pin == "off":
            return None
        return Staging(self.config, batch_size, prefetch, DeviceCopies(device))
