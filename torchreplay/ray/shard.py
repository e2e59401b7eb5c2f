"""`Shard`: the actor that holds one node's part of a `ShardedReplay`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.batch import ReplayBatch
from torchreplay.buffer import ReplayBuffer
from torchreplay.config import Config
from torchreplay.limiters import MinSize
from torchreplay.ray.blocks import Layout
from torchreplay.ray.candidates import Candidates
from torchreplay.ray.figures import Answer, Order
from torchreplay.samplers import Prioritized
from torchreplay.segment import Handle
from torchreplay.spec import nest
from torchreplay.stats import Stats

LEASH = float(1 << 40)
"""Draws that count as one insert for a shard's own limiter: it follows the learners' limit, not its own draws."""

UNBOUNDED = -1e300


class Shard:
    """One buffer, written by the processes of its node, and drawn from by calls from the others.

    Draws and feedback come one after the other, in the order of each caller's calls. Weights, and who may draw, are
    matters of the union: the learners' affair.

    Args:
        number: Of this shard, never used again: the high bits of its keys.
        config: Of the buffer.
        seed: Of its draws.
        limit: Items up to which writers are admitted until a learner says otherwise; None for no limit.
    """

    _buffer: ReplayBuffer
    _candidates: Candidates

    def __init__(self, number: int, config: Config, seed: int, limit: int | None) -> None:
        self._config, self._seed, self._limit = config, seed, limit
        self._number = number
        self._layout = Layout(config.outputs())
        self._block = torch.empty(0, dtype=torch.uint8)  # used again and again: the object store has its own copy
        self._batch = ReplayBatch()
        self._batch_items = 0
        self._learners: dict[int, tuple[int, int]] = {}

    def open(self) -> Handle:
        """Makes the buffer, and returns what processes of this node attach. Called first, and once.

        Raises:
            MemoryError: There is too little memory left.
        """
        config, sampler = self._config, self._config.sampler
        if isinstance(sampler, Prioritized):
            sampler = replace(sampler, beta=0.0, weights="none")
        self._buffer = ReplayBuffer(
            nest(config.fields), config.capacity, sampler=sampler, view=config.view, limiter=MinSize(), seed=self._seed
        )
        self._candidates = Candidates(self._buffer, self._number)
        if self._limit is not None:
            self._admit(self._limit)
        return self._buffer.handle()

    def handle(self) -> Handle:
        """Returns what processes of this node attach."""
        return self._buffer.handle()

    def draw(self, order: Order) -> Answer:
        """Draws candidates, stratified and with replacement.

        Returns:
            The figures, and a block of as many items as they say; None if there are none.
        """
        if order.batches:  # those who only look around would add up
            self._learners[order.stream] = (order.items, order.batches)
        self._candidates.raise_largest(order.largest)
        if order.limit not in (None, self._limit):
            self._admit(order.limit)
        if not order.candidates:
            return self._candidates.figures(self._learners), None
        figures = self._candidates.draw(order.candidates, self._room_for(order.candidates), self._learners)
        if not figures.candidates:
            return figures, None
        return figures, self._block.numpy()[: self._layout.nbytes(order.candidates)]

    def update(self, keys: NDArray[np.int64], td: NDArray[np.float64]) -> int:
        """Feeds back TD errors for keys of this shard's own; both were checked. Returns how many."""
        self._buffer.update_priorities(keys, td)
        return len(keys)

    def stats(self) -> Stats:
        """Returns the buffer's own."""
        return self._buffer.stats()

    def histograms(self, bins: int) -> dict[str, torch.Tensor]:
        """Returns the buffer's own."""
        return self._buffer.histograms(bins)

    def stop(self) -> None:
        """Tells the node's writers to finish."""
        self._buffer.stop()

    def _admit(self, limit: int) -> None:
        """Lets writers go on until so many items are in."""
        self._limit = limit
        room = max(0, limit - self._buffer.stats().inserted)
        # A new limiter counts as if its min_size, 1, had just come: from there on `room` more are admitted.
        self._buffer._segment.set_limiter((1, LEASH, UNBOUNDED, (room + 1) * LEASH, 0.0))

    def _room_for(self, n: int) -> ReplayBatch:
        if n != self._batch_items:
            if len(self._block) < self._layout.nbytes(n):
                self._block = torch.empty(self._layout.nbytes(n), dtype=torch.uint8)
            self._batch, self._batch_items = self._layout.batch_over(self._block, n), n
        return self._batch
