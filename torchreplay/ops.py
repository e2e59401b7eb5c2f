"""Registers `torch.ops.torchreplay.*`, also for `torch.compile`. The first use of an operator imports this module.

The operators work on a priority tree's memory, a one-dimensional uint8 CPU tensor of `tree_layout(capacity)[0]` bytes,
filled with zeros when new. `torchreplay.PriorityTree` is the same with a class around it. Below, `tree` stands for the
two arguments `memory, capacity`.

- `tree_layout(capacity) -> (int, int)`: bytes of the memory, and where its float32 leaves begin.
- `tree_set(tree, index, priority)`: sets leaves, int64 and float32 `[n]`; of duplicates the last one wins.
- `tree_get(tree, index)`: leaves, float32 `[n]`.
- `tree_sample(tree, n, seed, stream, step)`: a stratified draw with replacement: index, int64 `[n]`, and probability,
  float32 `[n]`; a pure function of its arguments.
- `tree_find(tree, target)`: index and probability of the leaves that hold targets in grid units, int64 `[n]` in
  `[0, tree_total)`.
- `tree_unit(tree)`: one grid unit, a power of two; float64 scalar.
- `tree_rebuild(tree)`: chooses the grid that fits the leaves, and computes everything else from them.
- `tree_grid(tree)`: the part of the grid that does not follow from the leaves, int64 `[2]`.
- `tree_restore(tree, grid)`: `tree_rebuild`, but in the grid that `tree_grid` returned, if it holds the leaves.
- `tree_total(tree)`, `tree_count(tree)`, `tree_min(tree)`: the sum in grid units (int64), the number of positive leaves
  (int64) and the smallest (float32, infinity if none), as scalar tensors.

The others work on a replay buffer that this process has attached; `Ring` is the same with a class around it. Below,
`ring` is the int64 `[4]` tensor that `ring_attach` returns: identity of the buffer, process, stream of draws and number
of the next draw.

- `ring_attach(fd, nonce)`: attaches the buffer behind a descriptor and starts a stream of draws.
- `ring_detach(nonce)`: undoes one `ring_attach`.
- `ring_sample(ring, beta, fields, key, weight, probability)`: draws a batch into the tensors given. `beta` is a float64
  scalar tensor (a number would be compiled in), `fields` a list of contiguous `[n, *shape]` tensors, one for each field
  in the spec's order; `key` is int64 `[n]`, `weight` and `probability` are float32 `[n]`.
- `ring_update_priorities(ring, key, td)`: feeds TD errors, `[n]` of any real dtype, back to the items of the keys.
- `ring_size(ring)`: the number of rows held, an int64 scalar tensor.

All of them declare to change `ring`, so that `torch.compile` keeps each of them, in the order written.

Bad arguments raise `ValueError` and change nothing. The tree's operators take no lock, and trust that the memory is a
tree's. A ring tensor belongs to one thread at a time; the buffer behind it is shared as always.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchreplay.buffer.replay_buffer import ReplayBuffer, local_sampler
from torchreplay.schema.batch_plan import GOALS, BatchPlan
from torchreplay.schema.samplers import Schedule
from torchreplay.schema.spec import fixed_fields, flatten, has_versions, nest
from torchreplay.segment.closeable import Closeable
from torchreplay.segment.process_hooks import open_rings
from torchreplay.validation import checked_instance, checked_int

torch.ops.load_library(str(Path(__file__).with_name("_ops.abi3.so")))  # type: ignore[no-untyped-call]
vars(torch.ops).pop("torchreplay", None)  # what stood for them, and has other threads wait for this import


def _fake_find(memory: Tensor, capacity: int, target: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(target), target.new_empty(target.shape, dtype=torch.float32)


def _fake_sample(memory: Tensor, capacity: int, n: int, seed: int, stream: int, step: int) -> tuple[Tensor, Tensor]:
    return memory.new_empty(n, dtype=torch.int64), memory.new_empty(n, dtype=torch.float32)


def _nothing(*_: Any) -> None:
    return None


def _of_shape(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda memory, *_: memory.new_empty(shape, dtype=dtype)


# What torch.compile and meta tensors need to know: shapes and dtypes of the results.
FAKES: dict[str, Callable[..., Any]] = {
    "tree_set": _nothing,
    "tree_get": lambda memory, capacity, index: index.new_empty(index.shape, dtype=torch.float32),
    "tree_find": _fake_find,
    "tree_sample": _fake_sample,
    "tree_rebuild": _nothing,
    "tree_restore": _nothing,
    "tree_grid": _of_shape((2,), torch.int64),
    "tree_unit": _of_shape((), torch.float64),
    "tree_total": _of_shape((), torch.int64),
    "tree_count": _of_shape((), torch.int64),
    "tree_min": _of_shape((), torch.float32),
    "ring_sample": _nothing,
    "ring_update_priorities": _nothing,
    "ring_size": _of_shape((), torch.int64),
}

for _name, _fake in FAKES.items():
    torch.library.register_fake(f"torchreplay::{_name}", _fake)


class Ring(Closeable):
    """A replay buffer as the operators see it: draws and takes TD errors inside compiled functions.

    Takes part in the buffer as a learner of its own, with its own stream of draws; a forked child goes on with another.
    Nothing waits: a draw that the limiter does not admit yet raises. A ring belongs to one thread at a time. Outside of
    compiled functions `buffer.sample` and `buffer.update_priorities` do the same in less time.

    Example:
        >>> ring = Ring(buffer)
        >>> @torch.compile(fullgraph=True)
        ... def train_step(beta: float) -> torch.Tensor:
        ...     batch = ring.sample(256, beta)
        ...     td = model(batch["obs"]) - batch["reward"]
        ...     ring.update_priorities(batch["key"], td)
        ...     return (batch["weight"] * td.square()).mean()

    Args:
        buffer: What to draw from. It may be closed before the ring is.

    Attributes:
        state: int64 `[4]`, what the operators take as `ring`.

    Raises:
        TypeError: `buffer` is no `ReplayBuffer`.
        ValueError: Its rows have ragged fields, or a policy version.
        RuntimeError: The buffer is closed.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        checked_instance("buffer", buffer, ReplayBuffer, "torchreplay.ReplayBuffer")
        fields = fixed_fields(flatten(buffer.spec), "torchreplay.ops")
        if has_versions(fields):
            raise ValueError(
                "the spec has a field 'policy_version', and the operators know no ages: draw with buffer.sample(), or "
                "give the field another name"
            )
        plan = buffer.view.plan(fields)
        outputs = fields if plan is None else plan.outputs
        self._paths = tuple(outputs)
        self._fields = tuple((field.shape, field.dtype) for field in outputs.values())
        sampler = local_sampler(buffer)
        self._finish = sampler.config.finish
        self._beta = buffer.sampler.beta
        nonce = sampler.nonce
        self.state: Tensor = torch.ops.torchreplay.ring_attach(sampler.segment.fd, nonce, *_numbers(plan))
        self._detach = weakref.finalize(self, torch.ops.torchreplay.ring_detach, nonce)
        open_rings.add(self)

    def sample(self, batch_size: int, beta: float | Tensor | None = None) -> dict[str, Any]:
        """Draws a batch, stratified and with replacement.

        Args:
            batch_size: Number of items, B.
            beta: Exponent of the weights: a number or a scalar CPU tensor. It may change from call to call without
                another compilation; None: the sampler's own, unless that is a schedule.

        Returns:
            The fields, each `[B, *shape]`, nested as in the spec, or what the buffer's view makes of them. Also `key`
            int64 `[B]`, and `weight` and `probability` float32 `[B]`. All are on the CPU.

        Raises:
            ValueError: `batch_size` or `beta` is out of range, or the ring is closed.
            RuntimeError: The draw would have to wait, or the buffer was stopped.
        """
        n = checked_int("batch_size", batch_size, 1, 1 << 24)
        exponent = _exponent(self._beta if beta is None else beta)
        fields = [torch.empty((n, *shape), dtype=dtype, device="cpu") for shape, dtype in self._fields]
        key = torch.empty(n, dtype=torch.int64, device="cpu")
        weight, probability = (torch.empty(n, dtype=torch.float32, device="cpu") for _ in range(2))
        torch.ops.torchreplay.ring_sample(self.state, exponent, fields, key, weight, probability)
        batch = nest(dict(zip(self._paths, fields, strict=True)))
        if self._finish is not None:
            self._finish(batch)
        return {**batch, "key": key, "weight": weight, "probability": probability}

    def update_priorities(self, key: Tensor, td: Tensor) -> None:
        """Feeds TD errors back to exactly the items they were computed from, as `ReplayBuffer.update_priorities`.

        Args:
            key: int64 `[B]`, `batch["key"]`.
            td: TD errors `[B]` of any real dtype, on any device; their absolute values are taken.

        Raises:
            ValueError: A shape does not fit, an error is NaN or infinite, a key was never issued, or the ring is
                closed; nothing is applied.
        """
        if td.is_floating_point() and td.itemsize == 1:  # which the operator does not read
            td = td.float()
        torch.ops.torchreplay.ring_update_priorities(self.state, key, td.detach().cpu())

    def size(self) -> Tensor:
        """Returns the number of rows held, an int64 scalar tensor."""
        size: Tensor = torch.ops.torchreplay.ring_size(self.state)
        return size

    def close(self) -> None:
        """Detaches from the buffer. Idempotent; happens by itself when the ring is garbage."""
        self._detach()

    def __repr__(self) -> str:
        _, process, stream, step = self.state.tolist()
        names = ", ".join("/".join(path) for path in self._paths)
        closed = "" if self._detach.alive else ", closed"
        return f"Ring(fields: {names}, process {process}, stream {stream}, {step} draws made{closed})"


def _numbers(plan: BatchPlan | None) -> tuple[Tensor, Tensor]:
    if plan is None:
        return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.float64, device="cpu")
    numbers = [
        plan.steps,
        GOALS.index(plan.goal),
        plan.discount_field,
        *(number for output in plan.native for number in output),
    ]
    factors = torch.tensor([plan.gamma, plan.share], dtype=torch.float64, device="cpu")
    return torch.tensor(numbers, device="cpu"), factors


def _exponent(beta: Schedule | Tensor) -> Tensor:
    if isinstance(beta, Tensor):
        return beta.detach().to(torch.float64)
    if callable(beta):
        raise ValueError(f"beta is the schedule {beta}: pass the number or scalar tensor that it is now")
    if not isinstance(beta, int | float):
        raise ValueError(f"beta is {beta!r}: expected a number, or a scalar tensor")
    # A sum, since torch.compile keeps a number variable in arithmetic, but compiles it in where it fills a tensor.
    return torch.zeros((), dtype=torch.float64, device="cpu") + beta
