"""Batches as blocks of bytes, which the object store carries without looking into them."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.cuda.packing import DRAWN, Packing
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.spec import Column, Field, Path, Ragged, nest
from torchreplay.schema.tensor_info import ALIGNMENT

KEPT = 16
"""Blocks that wait to be used again, at most."""

RESERVED: Final[Mapping[Path, Field]] = {("key",): Field((), torch.int64), **DRAWN}

MOST_ELEMENTS: Final = int(np.iinfo(np.int32).max)
"""Of a ragged field in a batch: offsets are int32."""


@dataclass(frozen=True, slots=True)
class RaggedItems:
    """Items that have values of any length, without a copy of these."""

    block: NDArray[np.uint8]  # all else, as of items without such values
    lengths: tuple[NDArray[np.int64], ...]  # `[n]` or `[n, T]`, of fields that have the same ones
    of: tuple[int, ...]  # of each ragged field, in the order of a batch: which lengths it has
    values: tuple[NDArray[np.uint8], ...]  # of each, `[elements, bytes]`, one value after the other


Block: TypeAlias = NDArray[np.uint8] | RaggedItems
"""Items of one shard, on their way."""

Chosen: TypeAlias = tuple[RaggedItems, NDArray[np.int64]]
"""Items, and which of them are taken."""


class RecycledMemory:
    """Memory that is used again when the last tensor over it is garbage: fresh pages cost more than the copies do."""

    def __init__(self) -> None:
        self._idle: deque[NDArray[np.uint8]] = deque(maxlen=KEPT)

    def take(self, nbytes: int, spare: int = 0) -> torch.Tensor:
        """Returns uint8 `[nbytes]` of any content; new memory has so many bytes more, for another time."""
        memory = np.empty(0, np.uint8)
        while len(memory) < nbytes:
            try:
                memory = self._idle.pop()
            except IndexError:
                memory = np.empty(nbytes + spare, np.uint8)
        lent = memory[:nbytes]  # torch holds this object for as long as a tensor needs the memory
        weakref.finalize(lent, self._idle.append, memory).atexit = False
        return torch.from_numpy(lent)


class Layout:
    """Where in a block the tensors of a batch lie."""

    def __init__(self, outputs: Mapping[Path, Column]) -> None:
        self._outputs = list(outputs)
        self._ragged = {path: column for path, column in outputs.items() if isinstance(column, Ragged)}
        fixed = {path: column for path, column in outputs.items() if isinstance(column, Field)}
        self._fields = fields = {**fixed, **RESERVED}
        self._packing = lru_cache(64)(lambda n: Packing(fields, n))
        self._memory = RecycledMemory()
        self._item_sizes = [field.nbytes for field in fields.values()]

    @property
    def is_ragged(self) -> bool:
        """Whether batches have values of any length. Then they are of memory of their own, and none is drawn into."""
        return bool(self._ragged)

    @property
    def item_sizes(self) -> list[int]:
        """Bytes of an item in each of the tensors of one shape, in the order of a block."""
        return self._item_sizes

    def block_bytes(self, n: int) -> int:
        """Returns the bytes of a block for `n` items, without values of any length."""
        return max(ALIGNMENT, self._packing(n).nbytes)  # a view of no memory is refused

    def batch_over(self, block: torch.Tensor, n: int) -> ReplayBatch:
        """Returns a batch of `n` items whose tensors are the memory of `block`, of as many or more."""
        return ReplayBatch(nest(self._packing(n).tensors(block)))

    def new_block(self, n: int) -> torch.Tensor:
        """Returns a block for `n` items, uint8, of any content, in memory of its own."""
        nbytes = self.block_bytes(n)
        return self._memory.take(nbytes, nbytes // 8)

    def new_batch(self, n: int) -> ReplayBatch:
        """Returns a batch of `n` items of any content, in memory of its own."""
        return self.batch_over(self.new_block(n), n)

    def tensors(self, batch: ReplayBatch) -> list[torch.Tensor]:
        """Returns a batch's tensors of one shape, in the order of a block: key, weight and probability are the last."""
        return [_at(batch, path) for path in self._fields]

    @staticmethod
    def as_tensor(block: Block) -> torch.Tensor:
        """Returns a block as a tensor, without values of any length. That of Ray's object store is copied."""
        fixed = block.block if isinstance(block, RaggedItems) else block
        return torch.from_numpy(fixed if fixed.flags.writeable else fixed.copy())

    def item_bytes(self, batch: ReplayBatch) -> list[NDArray[np.uint8]]:
        """Returns the bytes of the items in each of a batch's tensors of one shape, `[n, bytes]`, as in a block."""
        return [_bytes_of(tensor, len(tensor)) for tensor in self.tensors(batch)]

    def packed(self, batch: ReplayBatch) -> Block:
        """Returns the items of a batch as a block. Values of any length stay the batch's memory."""
        return self._ragged_items(batch) if self._ragged else self._block(batch)

    def _block(self, batch: ReplayBatch) -> NDArray[np.uint8]:
        n = len(batch["key"])
        block = self.new_block(n)
        for target, source in zip(self.tensors(self.batch_over(block, n)), self.tensors(batch), strict=True):
            target.copy_(source)
        return block.numpy()

    def _ragged_items(self, batch: ReplayBatch) -> RaggedItems:
        first: dict[int, int] = {}  # fields that have the same lengths have one tensor of offsets
        lengths: list[NDArray[np.int64]] = []
        of = []
        for path in self._ragged:
            offsets = _at(batch["offsets"], path)
            if id(offsets) not in first:
                first[id(offsets)] = len(lengths)
                lengths.append(_at(batch["lengths"], path).numpy())
            of.append(first[id(offsets)])
        values = [_at(batch, path) for path in self._ragged]
        return RaggedItems(self._block(batch), tuple(lengths), tuple(of), tuple(_bytes_of(v, len(v)) for v in values))

    def within(self, parts: Sequence[Chosen], budget: Mapping[str, int], order: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which of the chosen items stay within a budget, bool `[n]`.

        Args:
            parts: Those items.
            budget: The most elements of ragged fields, by name.
            order: Those items, counted over all parts, in a random order: the first ones stay, and always one.
        """
        names = ["/".join(path) for path in self._ragged]
        most = len(order)
        for name, elements in budget.items():
            at = names.index(name)
            each = np.concatenate([_elements(items.lengths[items.of[at]])[which] for items, which in parts])
            most = min(most, max(1, int(np.searchsorted(each[order].cumsum(), elements, side="right"))))
        stays = np.zeros(len(order), bool)
        stays[order[:most]] = True
        return stays

    def picked(self, batch: ReplayBatch, which: NDArray[np.int64]) -> ReplayBatch:
        """Returns items of a batch, in memory of their own."""
        picked = self.fixed(batch, which)
        return self.with_values(picked, [(self._ragged_items(batch), which)]) if self._ragged else picked

    def fixed(self, batch: ReplayBatch, which: NDArray[np.int64] | NDArray[np.bool_]) -> ReplayBatch:
        """Returns items of a batch, without values of any length, in memory of their own."""
        sources = self.item_bytes(batch)
        picked = self.new_batch(len(sources[0][which]))
        for target, source in zip(self.item_bytes(picked), sources, strict=True):
            target[:] = source[which]
        return picked

    def with_values(self, batch: ReplayBatch, parts: Sequence[Chosen]) -> ReplayBatch:
        """Returns a batch with values of any length, those of the chosen items, and where they begin and end.

        Raises:
            OverflowError: There are more elements of a ragged field than int32 offsets can say.
        """
        none: list[NDArray[np.int64]] = [np.empty(0, np.int64) for _ in self._ragged]
        of = parts[0][0].of if parts else tuple(range(len(none)))
        chosen = [[each[which] for each in items.lengths] for items, which in parts] or [none]
        lengths = [np.concatenate(each) for each in zip(*chosen, strict=True)]
        totals = [int(each.sum()) for each in lengths]
        if max(totals) > MOST_ELEMENTS:
            raise OverflowError(
                f"a batch of {len(batch['key']):,} items has {max(totals):,} elements of a ragged field, and offsets "
                f"are int32: draw smaller batches"
            )
        packing = Packing(self._ragged, 0, {path: totals[group] for path, group in zip(self._ragged, of, strict=True)})
        values = packing.tensors(self._memory.take(max(ALIGNMENT, packing.nbytes), packing.nbytes // 8))
        for place, tensor in enumerate(values.values()):
            target, at = _bytes_of(tensor, len(tensor)), 0
            for items, which in parts:
                for source in _runs(items.values[place], items.lengths[of[place]], which):
                    target[at : at + len(source)] = source
                    at += len(source)
        bounds = [np.concatenate([[0], each.ravel().cumsum()]).astype(np.int32) for each in lengths]
        offsets, sizes = [torch.from_numpy(each) for each in bounds], [torch.from_numpy(each) for each in lengths]
        entries = {path: values[path] if path in values else _at(batch, path) for path in self._outputs}
        whole = ReplayBatch(nest(entries))
        for name, tensors in (("offsets", offsets), ("lengths", sizes)):
            whole[name] = nest({path: tensors[group] for path, group in zip(self._ragged, of, strict=True)})
        return whole | {name: batch[name] for (name,) in RESERVED}


def _runs(
    values: NDArray[np.uint8], lengths: NDArray[np.int64], which: NDArray[np.int64]
) -> Iterator[NDArray[np.uint8]]:
    """Yields the values of chosen items, those of neighbours together."""
    ends = np.concatenate([[0], _elements(lengths).cumsum()])
    breaks = np.flatnonzero(np.diff(which) != 1) + 1
    for run in np.split(which, breaks) if len(which) else []:
        yield values[ends[run[0]] : ends[run[-1] + 1]]


def _elements(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns how many elements each item has, of all its steps."""
    elements: NDArray[np.int64] = lengths.sum(tuple(range(1, lengths.ndim)))
    return elements


def _bytes_of(tensor: torch.Tensor, n: int) -> NDArray[np.uint8]:
    """Returns the memory of a tensor of first dimension `n`, `[n, bytes]`."""
    flat = tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)
    return flat.numpy().reshape(n, tensor.dtype.itemsize * math.prod(tensor.shape[1:]))


def _at(batch: Any, path: Path) -> torch.Tensor:
    tensor: torch.Tensor = reduce(lambda level, name: level[name], path, batch)
    return tensor
