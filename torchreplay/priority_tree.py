"""The priority tree as a class: exact proportional sampling over float32 priorities."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import torch

from torchreplay.validation import as_numbers, checked_int

MAX_CAPACITY = 2**31
STEP_LIMIT = 2**48  # of streams and steps: together they fill the generator's counter
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class PriorityTree:
    """Samples indices in proportion to their priorities: P(i) = p_i / sum(p), exactly, at any capacity.

    Sums are kept as integers, multiples of `grid_step`, so nothing drifts and an index of priority zero is never drawn.
    The step follows the priorities: what they are multiplied by changes no draw. A priority below half a step counts as
    one; at a capacity of a million one that is 2^-36 of the largest keeps its proportion within 2 %. Priorities beyond
    the normal float32 numbers (1.2e-38 to 3.4e38) are stored as the nearest such number. Draws come from a
    counter-based generator of the tree's own and never touch torch's; the same seed and the same calls give the same
    draws.

    All of the tree is one CPU tensor, `memory`, on which `torch.ops.torchreplay.tree_*` work too. A tree is not
    synchronised: it belongs to one thread at a time. It can be copied and pickled.

    Args:
        capacity: Number of indices, 1 to 2**31. All priorities are zero at first.
        seed: Of the draws, 0 to 2^63 - 1. None: a random one.

    Attributes:
        memory: uint8 `[bytes]`.
        capacity: Number of indices.
        seed: Of the draws.
        step: Number of draws made; the next call of `sample` is draw `step`, and setting it back repeats draws.

    Raises:
        ValueError: `capacity` or `seed` is out of range.

    Example:
        >>> tree = tr.PriorityTree(capacity=8, seed=0)
        >>> tree.set(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 2.0]))
        >>> index, probability = tree.sample(4)
        >>> tree.total, tree.min, tree.count
        (8.0, 1.0, 4)
    """

    def __init__(self, capacity: int, *, seed: int | None = None) -> None:
        self.capacity = checked_int("capacity", capacity, 1, MAX_CAPACITY)
        self.seed = secrets.randbits(63) if seed is None else checked_int("seed", seed, 0, 2**63 - 1)
        self.step = 0
        nbytes, self._leaves_offset = _ops().tree_layout(self.capacity)
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def set(self, index: int | torch.Tensor, priority: float | torch.Tensor) -> None:
        """Sets the priorities of some indices; of duplicate indices the last one wins. O(log capacity) each.

        Args:
            index: One index, or an integer tensor of any shape.
            priority: One priority for all of them, or a tensor of the shape of `index`: finite and not negative. Zero
                takes an index out of the draw.

        Raises:
            ValueError: An index is out of range, a priority is negative, NaN or infinite, or the shapes differ.
                Nothing is set.

        Example:
            >>> tree.set(0, 5.0)
            >>> tree.set([1, 2], torch.tensor([0.5, 0.0]))  # index 2 is drawn no more
            >>> tree.get([0, 1, 2])
            tensor([5.0000, 0.5000, 0.0000])
        """
        indices = _indices(index)
        given = priority if isinstance(priority, torch.Tensor) else np.asarray(priority)  # numbers in full
        priorities = as_numbers("priority", given, "a number, or a tensor of the shape of index")
        if priorities.dtype.is_complex or priorities.dtype == torch.bool:
            raise ValueError(f"priority has dtype {priorities.dtype}, expected a real one")
        if priorities.dim() == 0:
            priorities = priorities.expand(indices.shape)
        if priorities.shape != indices.shape:
            raise ValueError(
                f"priority has shape {tuple(priorities.shape)}, expected {tuple(indices.shape)}, the shape of index"
            )
        values = _within_float32(priorities.detach()).reshape(-1).contiguous()
        _ops().tree_set(self.memory, self.capacity, indices.reshape(-1).contiguous(), values)

    def get(self, index: int | torch.Tensor) -> torch.Tensor:
        """The stored priorities of some indices.

        Args:
            index: One index, or an integer tensor of any shape.

        Returns:
            float32 tensor of the shape of `index`.

        Raises:
            ValueError: An index is out of range.

        Example:
            >>> tree.get(torch.tensor([2, 0]))
            tensor([3., 1.])
            >>> tree[2]
            tensor(3.)
        """
        indices = _indices(index)
        priorities: torch.Tensor = _ops().tree_get(self.memory, self.capacity, indices.reshape(-1).contiguous())
        return priorities.reshape(indices.shape)

    def __getitem__(self, index: int | torch.Tensor) -> torch.Tensor:
        try:
            return self.get(index)
        except ValueError as error:
            raise IndexError(str(error)) from None

    def __len__(self) -> int:
        return self.capacity

    def sample(self, n: int, *, stream: int = 0, step: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws `n` indices with replacement, stratified (Schaul et al. 2016, appendix B.2.1). O(n log capacity).

        Args:
            n: Number of indices.
            stream: Draws of different streams, 0 to 2**48 - 1, are independent: one a worker, for example.
            step: Number of the draw, 0 to 2**48 - 1. None: the next one, counted in `self.step`.

        Returns:
            The indices, int64 `[n]`, in ascending order, and their probabilities, float32 `[n]`.

        Raises:
            ValueError: `n`, `stream` or `step` is out of range, or no priority is positive.

        Example:
            >>> index, probability = tree.sample(1000)
            >>> probability[index == 2][0]  # 3 of 8
            tensor(0.3750)
        """
        n = checked_int("n", n, 1, 2**31 - 1)
        stream = checked_int("stream", stream, 0, STEP_LIMIT - 1)
        number = checked_int("step", self.step if step is None else step, 0, STEP_LIMIT - 1)
        index, probability = _ops().tree_sample(self.memory, self.capacity, n, self.seed, stream, number)
        if step is None:
            self.step += 1
        return index, probability

    def find(self, target: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices at which the running sum of the priorities first exceeds the targets.

        Args:
            target: One number, or a tensor of any shape, within [0, total).

        Returns:
            The indices, int64, and their probabilities, float32, of the shape of `target`.

        Raises:
            ValueError: A target is out of range or NaN, or no priority is positive.

        Example:
            >>> index, probability = tree.find(torch.tensor([0.5, 1.0, 7.9]))
            >>> index
            tensor([0, 1, 3])
        """
        targets = as_numbers("target", target, "a number, or a tensor of numbers", torch.float64)
        total = self.total
        outside = ~((targets >= 0) & (targets < total))
        if outside.any():
            raise ValueError(
                f"{int(outside.sum())} of {targets.numel()} targets lie outside [0, {total}), "
                f"the first is {float(targets[outside].reshape(-1)[0])}"
            )
        units = int(_ops().tree_total(self.memory, self.capacity))
        # A float64 just below the total can round up to it on the grid.
        grid = (targets / self.grid_step).to(torch.int64).clamp_(max=units - 1).reshape(-1).contiguous()
        index, probability = _ops().tree_find(self.memory, self.capacity, grid)
        return index.reshape(targets.shape), probability.reshape(targets.shape)

    def rebuild(self) -> None:
        """Computes sums, count and minimum from `leaves`, and the `grid_step` that fits them. O(capacity).

        Example:
            >>> tree.leaves[4:] = 1.0
            >>> tree.rebuild()
            >>> tree.total
            12.0
        """
        _ops().tree_rebuild(self.memory, self.capacity)

    @property
    def leaves(self) -> torch.Tensor:
        """The priorities themselves, a float32 `[capacity]` view of `memory`. Call `rebuild` after writing to it."""
        return self.memory[self._leaves_offset :][: 4 * self.capacity].view(torch.float32)

    @property
    def grid_step(self) -> float:
        """The unit in which priorities are summed: a power of two that follows them."""
        return float(_ops().tree_unit(self.memory, self.capacity))

    @property
    def total(self) -> float:
        """Sum of the priorities, exact up to the rounding to float64."""
        return int(_ops().tree_total(self.memory, self.capacity)) * self.grid_step

    @property
    def min(self) -> float:
        """Smallest positive priority, exactly; infinity when there is none. O(1)."""
        return float(_ops().tree_min(self.memory, self.capacity))

    @property
    def count(self) -> int:
        """Number of positive priorities. O(1)."""
        return int(_ops().tree_count(self.memory, self.capacity))

    def state_dict(self) -> dict[str, Any]:
        """Everything that draws depend on: `leaves` (a float32 copy), `grid` (int64 `[2]`), `seed` and `step`.

        Example:
            >>> torch.save(tree.state_dict(), "tree.pt")
        """
        grid = _ops().tree_grid(self.memory, self.capacity)
        return {"leaves": self.leaves.clone(), "grid": grid, "seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state that `state_dict` returned; one without a `grid` gets that which fits its leaves.

        Raises:
            ValueError: Another key is missing, the capacity is another, the grid is none, or a leaf is negative, NaN or
                infinite. Nothing is loaded.

        Example:
            >>> other = tr.PriorityTree(capacity=8)
            >>> other.load_state_dict(tree.state_dict())
            >>> torch.equal(other.sample(4)[0], tree.sample(4)[0])
            True
        """
        given: Any = state
        missing = {"leaves", "seed", "step"} - (given.keys() if isinstance(given, dict) else set())
        if missing:
            raise ValueError(f"the state has no {', '.join(sorted(missing))}; expected what state_dict() returned")
        leaves = as_numbers("leaves", state["leaves"], f"float32 [{self.capacity}]", torch.float32)
        if leaves.shape != (self.capacity,):
            raise ValueError(f"the state has leaves of shape {tuple(leaves.shape)}, expected ({self.capacity},)")
        if not bool(((leaves >= 0) & leaves.isfinite()).all()):
            raise ValueError("the state has leaves that are negative or not finite")
        seed = checked_int("seed", state["seed"], 0, 2**63 - 1)
        step = checked_int("step", state["step"], 0, STEP_LIMIT - 1)
        grid = as_numbers("grid", state.get("grid", torch.zeros(2, dtype=torch.int64, device="cpu")), "int64 [2]")
        if grid.dtype != torch.int64 or grid.shape != (2,):
            raise ValueError(f"the state has a grid of {grid.dtype} {tuple(grid.shape)}, expected int64 (2,)")
        self.leaves.copy_(leaves)
        _ops().tree_restore(self.memory, self.capacity, grid.contiguous())
        self.seed, self.step = seed, step

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(len(state["leaves"]), seed=state["seed"])  # type: ignore[misc]  # the usual way to fill a new object
        self.load_state_dict(state)

    def __repr__(self) -> str:
        return f"PriorityTree(capacity={self.capacity}, count={self.count}, total={self.total:.6g}, min={self.min:.6g})"


def _ops() -> Any:
    # Loaded on first use: the operators would double the time of `import torchreplay`.
    import torchreplay.ops  # noqa: F401

    return torch.ops.torchreplay


def _indices(index: int | torch.Tensor) -> torch.Tensor:
    indices = as_numbers("index", index, "an integer, or a tensor of integers")
    if indices.dtype not in INTEGERS and indices.numel():  # an empty list says no dtype
        raise ValueError(f"index has dtype {indices.dtype}, expected an integer dtype")
    return indices.to(torch.int64)


def _within_float32(values: torch.Tensor) -> torch.Tensor:
    """Returns them as float32: numbers beyond its normal ones as the nearest such number of the same sign."""
    if values.dtype == torch.float64:
        limits = torch.finfo(torch.float32)
        nearest = torch.copysign(values.abs().clamp(limits.tiny, limits.max), values)
        values = torch.where(values.isfinite() & (values != 0), nearest, values)
    return values.to(torch.float32)
