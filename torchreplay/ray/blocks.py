"""Batches as one block of bytes, which the object store carries without looking into it."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.batch import ReplayBatch
from torchreplay.spec import Field, Path, nest

ALIGNMENT = 64
KEPT = 4
"""Blocks that wait to be used again, at most."""

RESERVED: Final[Mapping[Path, Field]] = {
    ("key",): Field((), torch.int64),
    ("weight",): Field((), torch.float32),
    ("probability",): Field((), torch.float32),
}


class RecycledMemory:
    """Memory that is used again when the last tensor over it is garbage: fresh pages cost more than the copies do."""

    def __init__(self) -> None:
        self._idle: deque[NDArray[np.uint8]] = deque(maxlen=KEPT)

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns uint8 `[nbytes]` of any content."""
        memory = np.empty(0, np.uint8)
        while len(memory) != nbytes:
            try:
                memory = self._idle.pop()
            except IndexError:
                memory = np.empty(nbytes, np.uint8)
        lent = memory[:]  # torch holds this object for as long as a tensor needs the memory
        weakref.finalize(lent, self._idle.append, memory).atexit = False
        return torch.from_numpy(lent)


class Layout:
    """Where in a block the tensors of a batch lie: one after the other, each on a cache line of its own.

    Args:
        outputs: The batch's fields by path.
    """

    def __init__(self, outputs: Mapping[Path, Field]) -> None:
        self._fields: dict[Path, Field] = {**outputs, **RESERVED}
        self._memory = RecycledMemory()
        self._item_bytes = [math.prod(f.shape) * f.dtype.itemsize for f in self._fields.values()]

    def nbytes(self, n: int) -> int:
        """Returns the size of a block for `n` items."""
        return sum(_rounded(n * size) for size in self._item_bytes)

    def batch_over(self, block: torch.Tensor, n: int) -> ReplayBatch:
        """Returns a batch of `n` items whose tensors are the memory of `block`, uint8 `[nbytes(n)]` or more."""
        tensors = {}
        for (path, field), (start, size) in zip(self._fields.items(), self._places(n), strict=True):
            tensors[path] = block[start : start + size].view(field.dtype).view(n, *field.shape)
        return ReplayBatch(nest(tensors))

    def merged(self, parts: Iterable[tuple[NDArray[np.uint8], int, NDArray[np.int64]]], n: int) -> ReplayBatch:
        """Returns a batch of its own memory with chosen items of several blocks, in their order.

        Args:
            parts: A block, how many items it has, and which of them to take; `n` in all.
            n: Items in the batch.
        """
        block = self._memory.take(self.nbytes(n))
        target, at = block.numpy(), 0
        for source, given, which in parts:
            for (start, _), (origin, _), size in zip(
                self._places(n), self._places(given), self._item_bytes, strict=True
            ):
                rows = source[origin : origin + given * size].reshape(given, size)
                room = target[start + at * size : start + (at + len(which)) * size].reshape(len(which), size)
                np.take(rows, which, axis=0, out=room, mode="clip")  # another mode would copy twice
            at += len(which)
        return self.batch_over(block, n)

    def _places(self, n: int) -> Iterator[tuple[int, int]]:
        start = 0
        for size in self._item_bytes:
            yield start, n * size
            start += _rounded(n * size)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
