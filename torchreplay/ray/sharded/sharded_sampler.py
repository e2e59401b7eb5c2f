"""`ShardedSampler`: one process's batches from all shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.buffer.base import MAX_BATCH, Pin, StreamSpec
from torchreplay.cuda.copies import DeviceCopies
from torchreplay.cuda.staging import Staging
from torchreplay.ray.sharded.batch_block import RaggedItems
from torchreplay.ray.sharded.sample_request import candidates_of
from torchreplay.ray.sharded.sample_request_stream import SampleRequestStream
from torchreplay.ray.sharded.sampling_rounds import SamplingRounds
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.ray.sharded.shard_feedback import ShardFeedback
from torchreplay.ray.sharded.shard_keys import as_keys, unpack
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config
from torchreplay.schema.samplers import Schedule, value_of
from torchreplay.segment.waits import Wait
from torchreplay.validation import checked_int


class ShardedSampler(SamplingRounds):
    """What a process draws."""

    def __init__(self, shards: ShardClient, config: Config, seed: int, nonce: int, feedback: ShardFeedback) -> None:
        super().__init__(shards, config, seed, nonce)
        self._feedback = feedback

    def unissued(self, keys: NDArray[np.int64]) -> int | None:
        """Returns the index of the first of `keys` that names no row that any shard has or had."""
        self.shards.require_open()
        return self._feedback.unissued(keys)

    def batches(self, spec: StreamSpec) -> SampleRequestStream:
        """Returns a stream of batches; the shards are asked for `prefetch` of them ahead."""
        self.shards.require_open()
        return SampleRequestStream(self, self._feedback, spec)

    def staging(
        self,
        batch_size: int,
        prefetch: int,
        device: torch.device,
        pin: Pin | None,
        budget: Mapping[str, int] | None = None,
    ) -> Staging | None:
        """Returns what takes batches to a CUDA device while the learner computes; None: each is copied by itself.

        Raises:
            ValueError: `pin` is `"ring"`: the shards' rings are other processes' to page-lock.
        """
        if pin == "ring":
            raise ValueError('pin="ring" page-locks the memory of a ReplayBuffer: expected another for a ShardedReplay')
        if pin is not None and pin != "off":
            self.config.fixed_fields(f"pin={pin!r}")
        if pin == "off" or self.config.ragged:  # each batch with values of any length is of another size
            return None
        return Staging(self.config, batch_size, prefetch, DeviceCopies(device))

    def draw(self, n: int, beta: Schedule | None, wait: Wait, budget: Mapping[str, int] | None = None) -> ReplayBatch:
        """Returns a batch of `n` items, or fewer within a budget, once there are any and the limiter admits it."""
        checked_int("batch_size", n, 1, MAX_BATCH)
        while True:
            self.admit(n, wait)
            if budget is None and (drawn := self.draw_here(n, beta)) is not None:
                return self.finished(drawn[0])
            exponent = self.exponent(beta)
            if (batch := self.take(self.begin(n, wait, exponent, budget=budget), wait)) is not None:
                self.shards.report()  # there may be no next one for long
                return batch
            self.pause(n, wait)

    def gather(self, keys: Any) -> ReplayBatch:
        """Does what `ShardedReplay.gather` does."""
        asked = as_keys(keys)
        numbers, own = unpack(np.unique(asked))
        self.shards.refresh()
        if not set(numbers.tolist()) <= self.shards.table.entries.keys():
            self.shards.look()  # others may have written to a shard that was made since
        self.shards.local.try_attach()
        wanted = {number: own[numbers == number] for number in np.unique(numbers).tolist()}
        answers = list(self.shards.gather(wanted, self._layout).values())
        found = self._layout.new_batch(sum(figures.candidates for figures, _ in answers))
        if n := len(found["key"]):
            beta = value_of(self._sampler.beta, self.shards.limiter.steps)
            draw = _C.UnionDraw(n, beta, self._weights, 0, 0, 0, self._layout.tensors(found))
            draw.take_all(candidates_of(answers, self._layout))
        if self._layout.is_ragged:
            each = [(items, np.arange(len(items.lengths[0]))) for _, items in answers if isinstance(items, RaggedItems)]
            found = self._layout.with_values(found, each)
        batch = self._layout.picked(found, rows_of(asked, found["key"].numpy()))
        batch.source = self.nonce
        return self.finished(batch)


def rows_of(asked: NDArray[np.int64], found: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the position in `found`, which has each key once, of each key asked for, without those not found."""
    if not len(found):
        return found
    order = np.argsort(found)
    rows: NDArray[np.int64] = order[np.searchsorted(found, asked, sorter=order).clip(max=len(found) - 1)]
    return rows.compress(found[rows] == asked)
