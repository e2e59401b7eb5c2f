"""The arithmetic of drawing from several buffers as if they were one: totals, counts, probabilities, weights, keys.

`docs/sharding_in_depth.md` derives the formulas. Nothing here knows Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import Prioritized, Sampler
from torchreplay.validation import as_numbers

KEY_BITS = 48
"""Of a key, the low ones are the shard's own: at a million rows a second they last nine years."""

MAX_SHARDS = 1 << 15
"""Numbers of shards that fit above them in a positive int64; a shard that takes a lost one's place has a new one."""


_KEY_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32)


@dataclass(frozen=True, slots=True)
class GlobalDistribution:
    """What is drawn from: the trees of several shards, each as it was when its candidates were drawn."""

    parts: tuple[TreeSummary, ...]

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return sum([part.total for part in self.parts])

    @property
    def shares(self) -> list[float]:
        """Each part's share of that."""
        total = self.total
        return [part.total / total for part in self.parts]

    @property
    def drawable(self) -> int:
        """N, the number of items that can be drawn."""
        return sum(part.drawable for part in self.parts)

    @property
    def smallest(self) -> float:
        """The smallest positive leaf of all."""
        return min((part.smallest for part in self.parts if part.drawable), default=0.0)

    def most(self, n: int) -> list[int]:
        """Returns how many of `n` items can come from each part at most, for all random numbers.

        The n strata have equal parts of the total. An interval as long as x of them touches at most floor(x) + 2.
        """
        shares = zip(self.parts, self.shares, strict=True)
        return [min(n, int(n * share) + 2) if part.total else 0 for part, share in shares]

    def counts(self, n: int, chance: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns how many of `n` items come from each part.

        One item is drawn from each of n equal strata of [0, total), in which the parts lie one after the other
        (Schaul et al. 2016, appendix B.2.1). `chance`, uniform in [0, 1), says where in its stratum each target lies.
        """
        ends = np.cumsum([part.total for part in self.parts])
        targets = (np.arange(n) + chance) * (ends[-1] / n)
        last = int(np.flatnonzero([part.total > 0 for part in self.parts])[-1])  # a target may round up to the end
        which = np.minimum(np.searchsorted(ends, targets, side="right"), last)
        return np.bincount(which, minlength=len(self.parts)).astype(np.int64)

    def weigh(self, batch: ReplayBatch, shares: NDArray[np.float64], beta: float, sampler: Sampler) -> None:
        """Turns items' probabilities within their shards into those of the union, and sets their weights.

        `shares` is float64 `[n]`: each item's shard's share of the total.
        """
        probability = batch["probability"].numpy().astype(np.float64) * shares
        batch["probability"].numpy()[:] = probability
        batch["weight"].numpy()[:] = self.weights(probability, beta, sampler)

    def weights(self, probability: NDArray[np.float64], beta: float, sampler: Sampler) -> NDArray[np.float32]:
        """Returns the weights (N P(i))^-beta of items with these P(i) in the union (Schaul et al. 2016, section 3.4).

        Divided as the sampler says: by the largest one possible in the union, that of its smallest leaf; by the largest
        one given; or by nothing.
        """
        if not isinstance(sampler, Prioritized):
            return np.ones(len(probability), np.float32)
        least = {
            "buffer": self.smallest / self.total,
            "batch": float(probability.min()),
            "none": 1.0 / self.drawable,
        }[sampler.weights]
        return ((least / probability) ** beta).astype(np.float32)


def candidates(totals: Sequence[float], n: int, slack: float) -> list[int]:
    """Returns how many candidates to ask of each shard for a batch of `n`, given what their totals were last.

    Args:
        totals: Of each shard, 0 where nothing is known: enough are asked for to learn its total.
        n: Items in the batch.
        slack: By which share a shard's part of the total may have grown since.
    """
    whole = sum(totals)
    if len(totals) == 1 or not whole:
        return [n] * len(totals)
    return [min(n, int(n * (total / whole) * (1 + slack)) + 3) for total in totals]


def chosen(chance: np.random.Generator, given: int, count: int) -> NDArray[np.int64]:
    """Returns which `count` of `given` candidates are taken, each set of so many being equally likely, ascending."""
    if count == given:
        return np.arange(given)
    stays = np.ones(given, np.bool_)
    stays[chance.choice(given, given - count, replace=False, shuffle=False)] = False
    return np.flatnonzero(stays)


def as_keys(given: Any) -> NDArray[np.int64]:
    """Returns keys as users give them, integers `[n]`, as int64.

    Raises:
        ValueError: They are something else.
    """
    tensor = as_numbers("the keys", given, "int64 [n], such as batch['key']")
    if tensor.shape == (0,) or tensor.dtype in _KEY_DTYPES:  # an empty list says no dtype
        tensor = tensor.long()
    if tensor.dtype != torch.int64 or tensor.ndim != 1:
        raise ValueError(f"the keys are {tensor.dtype} {list(tensor.shape)}: expected int64 [n]")
    keys: NDArray[np.int64] = tensor.cpu().numpy()
    return keys


def pack(number: int) -> int:
    """Returns what to add to a shard's own keys to make them the union's."""
    return number << KEY_BITS


def unpack(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the shard's number and its own key for each of the union's `keys`."""
    return keys >> KEY_BITS, keys & ((1 << KEY_BITS) - 1)
