"""`Gathering`: items of all shards by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.ray.sharded.batch_block import ItemBytes, Layout
from torchreplay.ray.sharded.client import ShardClient
from torchreplay.ray.sharded.global_distribution import GlobalDistribution, as_keys, pack, unpack
from torchreplay.ray.sharded.messages import Gathered
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
        """Does what `ShardedReplay.gather` does."""
        asked = as_keys(keys)
        numbers, own = unpack(asked)
        among = {number: np.flatnonzero(numbers == number) for number in np.unique(numbers).tolist()}
        self._shards.refresh()
        if not among.keys() <= self._shards.table.places.keys():
            self._shards.look()  # others may have written to a shard that was made since
        self._shards.local.draws()
        answers = self._shards.gather({number: own[at] for number, at in among.items()})
        batch = self._layout.new_batch(sum(figures.candidates for figures, _ in answers.values()))
        if len(batch["key"]):
            self._fill(batch, answers, {number: (at, asked[at]) for number, at in among.items()})
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

    def _fill(
        self, batch: ReplayBatch, answers: Mapping[int, Gathered], asked: Mapping[int, tuple[Keys, Keys]]
    ) -> None:
        """Puts the items found together, in the order in which they were asked for.

        Args:
            batch: Of as many items.
            answers: Of the shards.
            asked: The keys that each was asked for, and where in all of them each stands: the latter first.
        """
        union = GlobalDistribution(tuple(figures.drawn for figures, _ in answers.values() if figures.drawn.total > 0))
        found = {
            number: self._items(figures.candidates, items)
            for number, (figures, items) in answers.items()
            if items is not None
        }
        places = {}
        for number, items in found.items():
            at, keys = asked[number]
            places[number] = at[positions(self._layout.keys(items), keys)]
        order = np.sort(np.concatenate(list(places.values())))
        room, share = self._layout.item_bytes(batch), np.empty(len(order))
        for number, items in found.items():
            rows = np.searchsorted(order, places[number])
            for target, source in zip(room, items, strict=True):
                target[rows] = source
            share[rows] = answers[number][0].drawn.total / union.total
        probability = batch["probability"].numpy().astype(np.float64) * share
        batch["probability"].numpy()[:] = probability
        beta = value_of(self._sampler.beta, self._shards.limiter.steps)
        batch["weight"].numpy()[:] = union.weights(probability, beta, self._sampler)

    def _items(self, n: int, found: ReplayBatch | NDArray[np.uint8]) -> ItemBytes:
        return self._layout.item_bytes(found) if isinstance(found, ReplayBatch) else self._layout.items(found, n)


def positions(found: Keys, asked: Keys) -> Keys:
    """Returns the position in `asked` of each key of `found`, which is a part of it; each position once."""
    if len(found) == len(asked):
        return np.arange(len(asked))
    order, rank = np.argsort(asked, kind="stable"), np.argsort(found, kind="stable")
    ascending = found[rank]
    equal_before = np.arange(len(found)) - np.searchsorted(ascending, ascending)
    places = np.empty(len(found), np.int64)
    places[rank] = order[np.searchsorted(asked[order], ascending) + equal_before]
    return places
