"""Batches as one block of bytes, which the object store carries without looking into it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from functools import lru_cache, reduce
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.cuda.packing import DRAWN, Packing
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.spec import Field, Path, nest
from torchreplay.schema.tensor_info import ALIGNMENT

KEPT = 4
"""Blocks that wait to be used again, at most."""

RESERVED: Final[Mapping[Path, Field]] = {("key",): Field((), torch.int64), **DRAWN}

ItemBytes: TypeAlias = list[NDArray[np.uint8]]
"""Of each tensor of a batch the bytes of its items, `[n, bytes]`."""


class RecycledMemory:
    """Memory that is used again when the last tensor over it is garbage: fresh pages cost more than the copies do."""

    def __init__(self) -> None:
        self._idle: deque[NDArray[np.uint8]] = deque(maxlen=KEPT)

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns uint8 `[nbytes]` of any content."""
        memory = np.empty(0, np.uint8)
        while len(memory) < nbytes:
            try:
                memory = self._idle.pop()
            except IndexError:
                memory = np.empty(nbytes, np.uint8)
        lent = memory[:nbytes]  # torch holds this object for as long as a tensor needs the memory
        weakref.finalize(lent, self._idle.append, memory).atexit = False
        return torch.from_numpy(lent)


class Layout:
    """Where in a block the tensors of a batch lie."""

    def __init__(self, outputs: Mapping[Path, Field]) -> None:
        self._fields = fields = {**outputs, **RESERVED}
        self._packing = lru_cache(64)(lambda n: Packing(fields, n))
        self._memory = RecycledMemory()

    def batch_over(self, block: torch.Tensor, n: int) -> ReplayBatch:
        """Returns a batch of `n` items whose tensors are the memory of `block`, of as many or more."""
        return ReplayBatch(nest(self._packing(n).tensors(block)))

    def new_block(self, n: int) -> torch.Tensor:
        """Returns a block for `n` items, uint8, of any content, in memory of its own."""
        return self._memory.take(max(ALIGNMENT, self._packing(n).nbytes))  # a view of no memory is refused

    def new_batch(self, n: int) -> ReplayBatch:
        """Returns a batch of `n` items of any content, in memory of its own."""
        return self.batch_over(self.new_block(n), n)

    def copy(self, source: NDArray[np.uint8], given: int, which: NDArray[np.int64], room: ItemBytes, at: int) -> None:
        """Copies chosen items of a block into a batch.

        Args:
            source: The block.
            given: How many items it has.
            which: Those to copy.
            room: The batch's.
            at: Where the first one goes; the others follow.
        """
        for info, target in zip(self._packing(given).infos, room, strict=True):
            rows = source[info.offset : info.offset + info.nbytes].reshape(given, -1)
            np.take(rows, which, axis=0, out=target[at : at + len(which)], mode="clip")  # another mode would copy twice

    def item_bytes(self, batch: ReplayBatch) -> ItemBytes:
        """Returns the memory of a batch's tensors, in the order of a block."""
        n = len(batch["key"])
        tensors = [_at(batch, path) for path in self._fields]
        return [(t if t.dtype == torch.uint8 else t.view(torch.uint8)).numpy().reshape(n, -1) for t in tensors]


def keep(room: ItemBytes, which: NDArray[np.int64]) -> None:
    """Moves chosen items, ascending, to the front of a batch, in any order: the last ones fill the free places."""
    moved = which[np.searchsorted(which, len(which)) :]
    vacant = np.setdiff1d(np.arange(len(which)), which, assume_unique=True)
    for rows in room:
        rows[vacant] = rows[moved]


def _at(batch: Any, path: Path) -> torch.Tensor:
    tensor: torch.Tensor = reduce(lambda level, name: level[name], path, batch)
    return tensor
