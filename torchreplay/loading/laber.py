"""Large Batch Experience Replay: draw a large batch, keep the items that matter now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from torchreplay.buffer.base import MAX_BATCH
from torchreplay.schema.batch import ReplayBatch
from torchreplay.validation import as_float, as_numbers, checked_choice, checked_instance, checked_int

Mode: TypeAlias = Literal["mean", "max", "lazy"]
MODES: tuple[Mode, ...] = ("mean", "max", "lazy")
ARRAYS = (torch.Tensor, np.ndarray)
CONTAINERS = (Mapping, list, tuple)


class LaBER:
    """Down-samples a large batch by priorities computed just now (Lahire et al. 2022, https://arxiv.org/abs/2110.01528).

    An item j of the M is taken, with replacement, with probability P(j) = p_j / sum p, where p = |priority| + eps. Its
    weight corrects for that:

    - `"mean"`: mean(p) / p_j = 1 / (M P(j)). The mean of weighted terms is an unbiased estimate of the large batch's
      mean. What the paper recommends.
    - `"max"`: the same, divided by the largest of the batch, so weights are at most 1.
    - `"lazy"`: 1 / P(j), which is M times the weight of `"mean"`.

    The large batch's own weights (1 where it was drawn uniformly) are multiplied in, before the division by the
    largest: with `Prioritized` draws the two corrections make one.

    Args:
        batch_size: Items to keep.
        mode: `"mean"`, `"max"` or `"lazy"`.
        seed: Of the draws; None: a random one. torch's global generator is neither read nor moved.
        eps: What is added to |priority|, so that every item can be taken; 0: items of priority 0 are never taken.

    Attributes:
        generator: The CPU generator of the draws, whose state can be saved and restored.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> buffer = tr.ReplayBuffer({"error": tr.Field()}, capacity=1000)
        >>> keys = buffer.extend(error=torch.randn(1000))
        >>> laber = tr.LaBER(64)
        >>> large = buffer.sample(256)  # the paper draws 4 times as many, uniformly
        >>> batch = laber(large, large["error"])  # TD errors, or another surrogate of the gradient's norm
        >>> loss = (batch["weight"] * batch["error"] ** 2).mean()
    """

    def __init__(self, batch_size: int, mode: Mode = "mean", *, seed: int | None = None, eps: float = 1e-6) -> None:
        self.batch_size = checked_int("batch_size", batch_size, 1, MAX_BATCH)
        checked_choice("mode", mode, MODES)
        self.mode = mode
        self.eps = as_float("eps", eps)
        if not 0.0 <= self.eps < float("inf"):
            raise ValueError(f"eps is {self.eps}: expected a finite number >= 0")
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(checked_int("seed", seed, 0, (1 << 64) - 1))

    def __call__(self, large: Mapping[str, Any], priority: Any) -> ReplayBatch:
        """Returns the items taken, on the devices they are on.

        Args:
            large: A batch of M items, at least `batch_size`, or another mapping with one entry of M values at least.
                Entries of your own may be tensors and arrays `[M, ...]`, lists and tuples of M values, or dicts, lists
                and tuples of such. Where there is no `weight`, every item's is 1.
            priority: M numbers of any real dtype, on any device; their absolute values are taken.

        Returns:
            A batch with the entries of `large`, memory of its own, and the weights of the draw. `key` still names the
            items for `update_priorities`; `probability` remains that of the item's draw from the buffer. An item taken
            twice is there twice.

        Raises:
            ValueError: `large` is too small, or an entry of it has not one part for each item. Or `priority` is not M
                finite numbers. Or all priorities and eps are 0.
            TypeError: `large` is no mapping.
        """
        checked_instance("the large batch", large, Mapping, "a torchreplay.ReplayBatch or another mapping")
        p = self._positive(_size(large), priority)
        chosen = torch.multinomial(p, self.batch_size, replacement=True, generator=self.generator)
        there = cache(chosen.to)  # one copy to a device
        small = ReplayBatch({name: _taken(name, value, there, len(p)) for name, value in large.items()})
        small.source = getattr(large, "source", None)
        drawn = small.get("weight", torch.ones(self.batch_size, device="cpu"))
        before = as_numbers("weight", drawn, f"[{self.batch_size}] numbers")
        weight = before.double() * self._correction(p, chosen).to(before.device).reshape(before.shape)
        if self.mode == "max":
            weight /= weight.max().clamp_min(torch.finfo(torch.float64).tiny)  # all 0 stay 0
        small["weight"] = weight.float()
        return small

    def _positive(self, n: int, priority: Any) -> torch.Tensor:
        if n < self.batch_size:
            raise ValueError(f"the large batch has {n} items: expected at least {self.batch_size}")
        given = as_numbers("priority", priority, f"{n} real numbers, one an item").detach()
        if given.is_complex():
            raise ValueError(f"priority has dtype {given.dtype}: expected real numbers")
        p = given.to("cpu", torch.float64).abs()
        if p.shape != (n,):
            raise ValueError(f"the priorities have shape {list(p.shape)}: expected [{n}], one an item")
        bad = p.isfinite().logical_not().nonzero()
        if len(bad):
            raise ValueError(f"{len(bad)} of {len(p)} priorities are NaN or infinite, the first at index {int(bad[0])}")
        p += self.eps
        if not p.any():
            raise ValueError("all priorities are 0, and so is eps: no item can be taken")
        return p / p.max()  # a factor changes neither probabilities nor weights, and the sum is finite

    def _correction(self, p: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return (p.sum() if self.mode == "lazy" else p.mean()) / p[chosen]

    def __repr__(self) -> str:
        return f"LaBER({self.batch_size}, mode={self.mode!r}, eps={self.eps})"


def _taken(name: str, value: Any, there: Callable[[torch.device], torch.Tensor], n: int) -> Any:
    """Returns the parts that items taken have in an entry of a batch, in memory of their own.

    Args:
        name: The entry's.
        value: The entry, with a part for each item; or several of them in a dict, a list or a tuple.
        there: Returns the indices of the items taken, on a device.
        n: Items in the batch.
    """
    if isinstance(value, Mapping):
        return {key: _taken(f"{name}/{key}", v, there, n) for key, v in value.items()}
    several = isinstance(value, list | tuple) and any(isinstance(v, ARRAYS + CONTAINERS) for v in value)
    if several and (len(value) != n or all(_length(v) == n for v in value)):
        return getattr(value, "_make", type(value))(_taken(f"{name}/{i}", v, there, n) for i, v in enumerate(value))
    if _length(value) != n:
        given = f"of shape {list(value.shape)}" if isinstance(value, ARRAYS) else f"{value!r:.200}"
        raise ValueError(f"entry {name!r} of the large batch is {given}: expected one part for each of the {n} items")
    if isinstance(value, torch.Tensor):
        return value[there(value.device)]
    chosen = there(torch.device("cpu"))
    if isinstance(value, np.ndarray):
        return value[chosen.numpy()]
    parts = [value[i] for i in chosen.tolist()]
    return parts if isinstance(value, list) else tuple(parts)


def _size(large: Mapping[str, Any]) -> int:
    """Returns the number of items, which the keys of a batch say, or its first entry that has parts."""
    lengths = [len(large["key"])] if "key" in large else _lengths(large)
    if not lengths:
        raise ValueError("the large batch has no entry with a part for each item: expected tensors [M, ...]")
    return lengths[0]


def _lengths(large: Mapping[str, Any]) -> list[int]:
    """Returns the lengths of the entries that have parts."""
    found = [_lengths(value) if isinstance(value, Mapping) else [_length(value)] for value in large.values()]
    return [length for lengths in found for length in lengths if length is not None]


def _length(value: Any) -> int | None:
    if isinstance(value, ARRAYS):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None
