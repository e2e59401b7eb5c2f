"""A batch's tensors in one block of memory, so that they travel in one copy, or one message."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.spec import ELEMENTS, Column, Field, Path, has_versions, nest
from torchreplay.schema.tensor_info import pack

DRAWN: Mapping[Path, Field] = {("weight",): Field(), ("probability",): Field()}
"""What a batch has beside its fields and keys."""

AGE: Mapping[Path, Field] = {("age",): Field((), torch.int64)}
"""And where rows have a policy version."""


def drawn_with(fields: Mapping[Path, Column]) -> Mapping[Path, Field]:
    """Returns what batches of rows with these fields have beside their fields and keys."""
    return {**DRAWN, **AGE} if has_versions(fields) else DRAWN


class Packing:
    """Where each of some tensors lies in a block of memory.

    Args:
        fields: What is packed, by path.
        batch_size: Items of each, B.
        sizes: The first dimension of those that have another one, by path.

    Attributes:
        infos: Where they lie, in the order of `fields`.
        nbytes: Of the block.
    """

    def __init__(self, fields: Mapping[Path, Column], batch_size: int, sizes: Mapping[Path, int] | None = None) -> None:
        self._unpack = torch.ops.torchreplay._unpack.default
        self._paths = list(fields)
        first = dict.fromkeys(fields, batch_size) | dict(sizes or {})
        self.infos, self.nbytes = pack((field.dtype, (first[path], *field.shape)) for path, field in fields.items())
        places: list[int] = []
        for dtype, shape, offset, _ in self.infos:
            strides = (math.prod(shape[d + 1 :]) for d in range(len(shape)))
            places += [ELEMENTS.index(dtype), offset // dtype.itemsize, len(shape), *shape, *strides]
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu")

    def tensors(self, block: torch.Tensor) -> dict[Path, torch.Tensor]:
        """Returns the tensors in a block, by path.

        Each has a version counter of its own, as tensors of separate memory have: changing one in place is nothing to
        an autograd graph that has saved another.

        Args:
            block: uint8 `[nbytes]`, the whole of its storage, on any device.
        """
        return dict(zip(self._paths, self._unpack(block, self._places), strict=True))


def batch_of(tensors: Mapping[Path, torch.Tensor], key: torch.Tensor) -> ReplayBatch:
    """Returns the batch, nested and in the order of one that `sample` returns.

    Args:
        tensors: The fields, and those of `drawn_with`, by path.
        key: int64 `[B]`.
    """
    batch = ReplayBatch(nest(tensors))
    batch["key"] = key
    for (name,) in (path for path in {**DRAWN, **AGE} if path in tensors):
        batch[name] = batch.pop(name)
    return batch
