"""`Gathering`: items of all shards by their keys."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.ray.sharded.batch_block import Layout
from torchreplay.ray.sharded.client import ShardClient
from torchreplay.ray.sharded.global_distribution import GlobalDistribution, as_keys, pack, unpack
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config
from torchreplay.schema.samplers import value_of

Keys: TypeAlias = NDArray[np.int64]


class Gathering:
    """What a process gathers.

    Args:
        shards: Where from.
        config: Of the union.
        nonce: What signs the batches.
    """

    def __init__(self, shards: ShardClient, config: Config, nonce: int) -> None:
        self._shards, self._nonce, self._finish = shards, nonce, config.finish
        self._sampler = config.sampler
        self._layout = Layout(config.outputs())

    def gather(self, keys: Any) -> ReplayBatch:
        """Does what `ShardedReplay.gather` does, once all TD errors that were fed back are applied."""
        asked = as_keys(keys)
        numbers, own = unpack(np.unique(asked))
        self._shards.refresh()
        if not set(numbers.tolist()) <= self._shards.table.places.keys():
            self._shards.look()  # others may have written to a shard that was made since
        answers = list(self._shards.gather({n: own[numbers == n] for n in np.unique(numbers).tolist()}).values())
        counts = [figures.candidates for figures, _ in answers]
        found, at = self._layout.new_batch(sum(counts)), 0
        for count, (_, block) in zip(counts, answers, strict=True):
            if block is not None:
                self._layout.copy(block, count, np.arange(count), self._layout.item_bytes(found), at)
            at += count
        union = GlobalDistribution(tuple(figures.drawn for figures, _ in answers))
        rows = rows_of(asked, found["key"].numpy())
        batch = self._layout.new_batch(len(rows))
        if len(rows):
            for target, source in zip(self._layout.item_bytes(batch), self._layout.item_bytes(found), strict=True):
                target[:] = source[rows]
            shares = np.repeat([part.total / union.total for part in union.parts], counts)[rows]
            union.weigh(batch, shares, value_of(self._sampler.beta, self._shards.limiter.steps), self._sampler)
        batch.source = self._nonce
        if self._finish is not None:
            self._finish(batch)
        return batch

    def keys(self, rows: bool) -> torch.Tensor:
        """Does what `ShardedReplay.keys` does."""
        places = self._shards.look().places
        told = self._shards.calls.collect({number: place.actor.keys.remote(rows) for number, place in places.items()})
        parts = [pack(number) + keys for number, keys in sorted(told.items())]
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))

    def priorities(self, keys: Keys) -> torch.Tensor:
        """Does what `ShardedReplay.priorities` does, for keys that were issued."""
        numbers, own = unpack(keys)
        places = self._shards.look().places
        calls = {
            number: places[number].actor.priorities.remote(own[numbers == number])
            for number in np.unique(numbers).tolist()
            if number in places
        }
        raw = np.full(len(keys), np.nan, np.float32)
        for number, priorities in self._shards.calls.collect(calls).items():
            raw[numbers == number] = priorities
        return torch.from_numpy(raw)


def rows_of(asked: Keys, found: Keys) -> Keys:
    """Returns the position in `found`, which has each key once, of each key asked for, without those not found."""
    if not len(found):
        return found
    order = np.argsort(found)
    rows: Keys = order[np.searchsorted(found, asked, sorter=order).clip(max=len(found) - 1)]
    return rows.compress(found[rows] == asked)
