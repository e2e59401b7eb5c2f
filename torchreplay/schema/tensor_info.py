"""Several tensors in one block of memory: where each of them lies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

ALIGNMENT = 256
"""Bytes: what CUDA gives memory of its own, so that kernels find every tensor as well aligned as one by itself."""


class TensorInfo(NamedTuple):
    """Where one tensor lies in a block."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in a block, uint8 `[nbytes]` or more."""
        return block[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


def pack(tensors: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[list[TensorInfo], int]:
    """Returns where tensors of such dtypes and shapes lie, one after the other, and the bytes of the block."""
    infos, end = list[TensorInfo](), 0
    for dtype, shape in tensors:
        infos.append(TensorInfo(dtype, shape, end, nbytes := math.prod(shape) * dtype.itemsize))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return infos, end
