"""Registers `torch.ops.torchreplay.*`: import this module to use the operators, also under `torch.compile`.

The operators work on a priority tree's memory, a one-dimensional uint8 CPU tensor of `tree_layout(capacity)[0]` bytes,
filled with zeros when new. `torchreplay.PriorityTree` is the same with a class around it. Below, `tree` stands for the
two arguments `memory, capacity`.

- `tree_layout(capacity) -> (int, int, float)`: bytes of the memory, where its float32 leaves begin, the grid step.
- `tree_set(tree, index, priority)`: sets leaves, int64 and float32 `[n]`; of duplicates the last one wins.
- `tree_get(tree, index)`: leaves, float32 `[n]`.
- `tree_sample(tree, n, seed, stream, step)`: a stratified draw with replacement: index, int64 `[n]`, and probability,
  float32 `[n]`; a pure function of its arguments.
- `tree_find(tree, target)`: index and probability of the leaves that hold targets in grid units, int64 `[n]` in
  `[0, tree_total)`.
- `tree_rebuild(tree)`: clamps the leaves and computes everything else from them.
- `tree_total(tree)`, `tree_count(tree)`, `tree_min(tree)`: the sum in grid units (int64), the number of positive leaves
  (int64) and the smallest (float32, infinity if none), as scalar tensors.

Bad arguments raise `ValueError` and change nothing. The operators take no lock, and trust that the memory is a tree's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

torch.ops.load_library(str(Path(__file__).with_name("_ops.abi3.so")))  # type: ignore[no-untyped-call]


def _changes_memory(memory: Tensor, capacity: int, *_: Tensor) -> None:
    return None


def _fake_get(memory: Tensor, capacity: int, index: Tensor) -> Tensor:
    return index.new_empty(index.shape, dtype=torch.float32)


def _fake_find(memory: Tensor, capacity: int, target: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(target), target.new_empty(target.shape, dtype=torch.float32)


def _fake_sample(memory: Tensor, capacity: int, n: int, seed: int, stream: int, step: int) -> tuple[Tensor, Tensor]:
    return memory.new_empty(n, dtype=torch.int64), memory.new_empty(n, dtype=torch.float32)


def _fake_integer(memory: Tensor, capacity: int) -> Tensor:
    return memory.new_empty((), dtype=torch.int64)


def _fake_float(memory: Tensor, capacity: int) -> Tensor:
    return memory.new_empty((), dtype=torch.float32)


# What torch.compile and meta tensors need to know: shapes and dtypes of the results.
FAKES: dict[str, Callable[..., Any]] = {
    "tree_set": _changes_memory,
    "tree_get": _fake_get,
    "tree_find": _fake_find,
    "tree_sample": _fake_sample,
    "tree_rebuild": _changes_memory,
    "tree_total": _fake_integer,
    "tree_count": _fake_integer,
    "tree_min": _fake_float,
}

for _name, _fake in FAKES.items():
    torch.library.register_fake(f"torchreplay::{_name}", _fake)
