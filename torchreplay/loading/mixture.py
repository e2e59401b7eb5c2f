"""How one batch is made of several buffers' batches, and its TD errors are divided again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.buffer.base import MAX_BATCH, Replay, source_of
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.cuda.copies import page_locked
from torchreplay.schema.batch import ReplayBatch, joined_offsets
from torchreplay.schema.samplers import Normalization, Prioritized
from torchreplay.validation import as_numbers, column_hint


class Mixture:
    """Buffers whose batches are alike, and how many items of a batch come from each.

    Args:
        shares: The buffers, each with the share of a batch that it gives: positive numbers, in any unit.
        batch_size: Items in a batch.
        device: Where batches go; None leaves them on the CPU.

    Raises:
        ValueError: A share is no positive number or too small for a whole item, or batches would differ.
    """

    def __init__(self, shares: Mapping[Replay, float], batch_size: int, device: torch.device | None) -> None:
        self.buffers = tuple(shares)
        self.counts = whole_items(list(shares.values()), batch_size)
        self._device = device
        counts = torch.tensor(self.counts, device="cpu")
        self._which = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
        self._share = (counts / batch_size)[self._which]
        self._weights = _normalized_alike(self.buffers)
        _require_alike(self.buffers)

    @property
    def _source(self) -> tuple[int, ...]:
        """What batches carry: which buffers these are. Copies of them in a copied dataset are others."""
        return tuple(source_of(buffer).nonce for buffer in self.buffers)

    def batch_of(self, parts: Sequence[ReplayBatch], drawn_from: Sequence[TreeSummary]) -> ReplayBatch:
        """Returns the batch that the buffers' batches make together, in new memory.

        Args:
            parts: The batches.
            drawn_from: What the weights of each were computed from.

        Raises:
            RuntimeError: They are not as large as `counts` says.
        """
        sizes = tuple(part.batch_size for part in parts)
        if sizes != self.counts:
            raise RuntimeError(f"the buffers' batches have {sizes} items: expected {self.counts}")
        _put_on_one_scale(parts, drawn_from, self._weights)
        pinned = self._device is not None and self._device.type == "cuda"
        batch = ReplayBatch(_concatenated(parts, pinned))
        batch.source = self._source
        offsets = joined_offsets(parts)
        if offsets is not None:
            batch["offsets"] = offsets
        batch["probability"] *= self._share
        batch["buffer"] = self._which.clone()
        return batch if self._device is None else batch.to(self._device)

    def feed_back(self, batch: Any, td: Any) -> None:
        """Does what `MixedDataset.update_priorities` does."""
        if not isinstance(batch, Mapping) or not {"key", "buffer"} <= batch.keys():
            raise ValueError(f"the batch is {batch!r:.200}: expected one of this dataset, with 'key' and 'buffer'")
        if getattr(batch, "source", None) not in (None, self._source):
            raise ValueError("the batch was drawn from other buffers: feed its TD errors back to those")
        keys, which = (as_indices(f"batch[{name!r}]", batch[name]) for name in ("key", "buffer"))
        if which.shape != keys.shape:
            raise ValueError(f"batch['buffer'] has shape {list(which.shape)}: expected {list(keys.shape)}, as the keys")
        unknown = which[(which < 0) | (which >= len(self.buffers))]
        if len(unknown):
            raise ValueError(f"batch['buffer'] has a {unknown[0]}: expected 0 to {len(self.buffers) - 1}")
        errors = checked_errors("the TD errors", td, len(keys))
        parts = [np.flatnonzero(which == position) for position in range(len(self.buffers))]
        for position, (buffer, part) in enumerate(zip(self.buffers, parts, strict=True)):
            require_issued(buffer, str(position), keys, part)
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer.update_priorities(keys[part], errors[part])


def whole_items(shares: Sequence[Any], batch_size: int) -> tuple[int, ...]:
    """Returns how many of `batch_size` items each share is, by the method of the largest remainder.

    Of equal remainders the earlier one comes first.

    Raises:
        ValueError: A share is no positive number, or too small for one item.
    """
    exact = [_positive(position, share) for position, share in enumerate(shares)]
    quotas = [batch_size * share / sum(exact) for share in exact]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(counts)), key=lambda position: counts[position] - quotas[position])
    for position in by_remainder[: batch_size - sum(counts)]:
        counts[position] += 1
    if 0 in counts:
        position = counts.index(0)
        enough = math.ceil(batch_size / quotas[position])
        larger = f", or batches of {enough} items or more" if enough <= MAX_BATCH else ""
        raise ValueError(
            f"the share of buffer {position} is {float(quotas[position]):.3g} of {batch_size} items, so no batch would "
            f"have one: give it a larger share{larger}"
        )
    return tuple(counts)


def checked_errors(what: str, td: Any, n: int) -> NDArray[np.float64]:
    """Returns the TD errors, `[n]`.

    Raises:
        ValueError: They are no `n` real numbers, or one is NaN or infinite.
    """
    tensor = as_numbers(what, td, f"a tensor of {n} numbers").detach()
    if tensor.shape != (n,) or tensor.is_complex():
        raise ValueError(
            f"{what} are {tensor.dtype} {list(tensor.shape)}: expected [{n}], a number for each item"
            f"{column_hint(tensor.shape, n)}"
        )
    plain = tensor.cpu() if tensor.dtype in (torch.float32, torch.float64) else tensor.to("cpu", torch.float64)
    errors = plain.numpy().astype(np.float64)
    finite = np.isfinite(errors)
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise ValueError(
            f"{len(bad)} of {n} of {what} are NaN or infinite, the first at index {bad[0]}: nothing was applied; look "
            "for a diverged loss"
        )
    return errors


def require_issued(buffer: Replay, name: str, keys: NDArray[np.int64], part: NDArray[np.int64]) -> None:
    """Checks that a buffer can be fed back to.

    Args:
        buffer: The buffer.
        name: What it is called.
        keys: Of a batch.
        part: At which indices they are the buffer's.

    Raises:
        ValueError: It never issued one of its keys.
        RuntimeError: It is closed.
    """
    bad = source_of(buffer).unissued(keys[part])
    if bad is not None:
        index = part[bad]
        raise ValueError(
            f"key {keys[index]} at index {index} was never issued by buffer {name}, whose it is said to be: nothing "
            f"was applied"
        )


def as_indices(what: str, values: Any) -> NDArray[np.int64]:
    """Returns int64 `[n]` in memory of the CPU.

    Raises:
        ValueError: It is something else.
    """
    tensor = as_numbers(what, values, "int64 [B]")
    if tensor.dtype != torch.int64 or tensor.ndim != 1:
        raise ValueError(f"{what} is {tensor.dtype} {list(tensor.shape)}: expected int64 [B]")
    return tensor.cpu().numpy()


def _positive(position: int, share: Any) -> Fraction:
    try:
        value = float("nan") if isinstance(share, bool) else float(share)
    except (TypeError, ValueError):
        value = float("nan")
    if not 0 < value < math.inf:
        raise ValueError(f"the share of buffer {position} is {share!r}: expected a positive number")
    return Fraction(value)


def _normalized_alike(buffers: Sequence[Replay]) -> Normalization:
    """Returns by what weights are divided; "none" where all are 1."""
    kinds = {buffer.sampler.weights for buffer in buffers if isinstance(buffer.sampler, Prioritized)}
    if len(kinds) > 1:
        names = " and ".join(map(repr, sorted(kinds)))
        raise ValueError(f"the buffers' samplers have weights={names}: expected the same in all that mix")
    return kinds.pop() if kinds else "none"


def _put_on_one_scale(parts: Sequence[ReplayBatch], drawn_from: Sequence[TreeSummary], weights: Normalization) -> None:
    """Multiplies weights, each divided by the largest of its buffer or batch, so that that is the largest of all."""
    largest = [
        drawn.log_of_largest(weights, part["probability"]) for part, drawn in zip(parts, drawn_from, strict=True)
    ]
    for part, value in zip(parts, largest, strict=True):
        scale = math.exp(value - max(largest))
        if scale != 1.0:
            weight = part["weight"].numpy()
            weight *= np.float32(scale)


def _concatenated(parts: Sequence[Mapping[str, Any]], pinned: bool) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(value, dict):
            joined[name] = _concatenated(values, pinned)
        elif pinned and name != "key":
            shape = (sum(map(len, values)), *value.shape[1:])
            joined[name] = torch.cat(values, out=page_locked(shape, value.dtype))
        else:
            joined[name] = torch.cat(values)
    return joined


def _require_alike(buffers: Sequence[Replay]) -> None:
    expected = source_of(buffers[0]).config.outputs()
    for position, buffer in enumerate(buffers[1:], start=1):
        found = source_of(buffer).config.outputs()
        for path in (*expected, *found):
            here, there = expected.get(path), found.get(path)
            if here != there:
                raise ValueError(
                    f"batches of buffer 0 and buffer {position} differ: {'/'.join(path)!r} is {here or 'not there'} in "
                    f"the one and {there or 'not there'} in the other. Give both buffers the same fields and the same "
                    f"kind of view; buffers of different kinds go by name, MixedDataset({{name: buffer}})"
                )
