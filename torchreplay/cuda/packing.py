"""A batch's tensors in one block of memory, so that they travel in one copy, or one message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.spec import ELEMENTS, Column, Field, Path, Ragged, has_versions, nest
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
        self._places = _places((dtype, shape, offset) for dtype, shape, offset, _ in self.infos)

    def tensors(self, block: torch.Tensor) -> dict[Path, torch.Tensor]:
        """Returns the tensors in a block, by path.

        Each has a version counter of its own, as tensors of separate memory have: changing one in place is nothing to
        an autograd graph that has saved another.

        Args:
            block: uint8 `[nbytes]`, the whole of its storage, on any device.
        """
        return dict(zip(self._paths, self._unpack(block, self._places), strict=True))


class Values(NamedTuple):
    """Where the values of a ragged field lie in a block, and how many there are."""

    at: int
    elements: int
    offsets_at: int
    lengths_at: int
    steps: int
    """Values of an item; 0: it has one, and no dimension for it."""


class Drawn(NamedTuple):
    """What a draw says of a batch with values of any length."""

    items: int
    nbytes: int
    """From the start of the block up to the end of what lies there."""
    values: Sequence[tuple[int, int, int, int, int]]
    """`Values` of each ragged field."""
    block: torch.Tensor | None
    """uint8 `[nbytes]`, which has them where the block that was given was too small."""


class RaggedPacking:
    """The tensors of values of any length in a block: their places are others in each batch.

    Args:
        fields: The ragged ones of a batch, by path.
    """

    def __init__(self, fields: Mapping[Path, Ragged]) -> None:
        self._unpack = torch.ops.torchreplay._unpack.default
        self._fields = fields

    def values(self, block: torch.Tensor, drawn: Drawn) -> dict[Path, torch.Tensor]:
        """Returns the values, and their offsets at ("offsets", *path). Fields of one length share these.

        Args:
            block: uint8, the whole of its storage, on any device.
            drawn: What lies there.
        """
        found = [Values(*values) for values in drawn.values]
        infos = [
            (field.dtype, (values.elements, *field.shape), values.at)
            for field, values in zip(self._fields.values(), found, strict=True)
        ]
        sizes = {values.offsets_at: drawn.items * max(values.steps, 1) + 1 for values in found}
        infos += [(torch.int32, (size,), at) for at, size in sizes.items()]
        tensors = self._unpack(block, _places(infos))
        offsets = dict(zip(sizes, tensors[len(found) :], strict=True))
        return dict(zip(self._fields, tensors, strict=False)) | {
            ("offsets", *path): offsets[values.offsets_at] for path, values in zip(self._fields, found, strict=True)
        }

    def lengths(self, block: torch.Tensor, drawn: Drawn) -> dict[Path, torch.Tensor]:
        """Returns how long the values are, at ("lengths", *path), in memory of their own.

        Args:
            block: As for `values`, on the CPU.
            drawn: What lies there.
        """
        found = [Values(*values) for values in drawn.values]
        shapes = [(drawn.items, values.steps) if values.steps else (drawn.items,) for values in found]
        places = ((torch.int64, shape, values.lengths_at) for shape, values in zip(shapes, found, strict=True))
        tensors = self._unpack(block, _places(places))
        return {("lengths", *path): own.clone() for path, own in zip(self._fields, tensors, strict=True)}


def _places(infos: Iterable[tuple[torch.dtype, tuple[int, ...], int]]) -> torch.Tensor:
    """Returns tensors of such dtypes and shapes, which begin at such bytes, in the form that `_unpack` takes."""
    places: list[int] = []
    for dtype, shape, offset in infos:
        strides = (math.prod(shape[d + 1 :]) for d in range(len(shape)))
        places += [ELEMENTS.index(dtype), offset // dtype.itemsize, len(shape), *shape, *strides]
    return torch.tensor(places, dtype=torch.int64, device="cpu")


def batch_of(tensors: Mapping[Path, torch.Tensor], key: torch.Tensor) -> ReplayBatch:
    """Returns the batch, nested and in the order of one that `sample` returns.

    Args:
        tensors: The fields, where offsets and lengths of ragged ones lie, and those of `drawn_with`, by path.
        key: int64 `[B]`.
    """
    batch = ReplayBatch(nest(tensors))
    batch["key"] = key
    for (name,) in (path for path in {**DRAWN, **AGE} if path in tensors):
        batch[name] = batch.pop(name)
    return batch
