"""Looking into a buffer's memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from torchreplay.buffer.local_sampler import LocalSampler
from torchreplay.buffer.stats import Stats
from torchreplay.schema.limiters import from_native
from torchreplay.schema.samplers import LARGEST_PRIORITY, Sampler, Uniform, priorities_of
from torchreplay.schema.spec import nest
from torchreplay.validation import checked_int

_GET_BASE: Any = torch.Tensor._base.__get__  # type: ignore[union-attr]  # of the class it is a descriptor


class StorageView(torch.Tensor):
    """A tensor over the shared memory of a buffer, which refuses to be pickled; so do slices and views of it.

    torch would copy the memory to a shared file of its own and silently point this tensor there. What is computed from
    it is a plain tensor.
    """

    @classmethod
    def over(cls, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`'s memory as a view of this type."""
        return tensor.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if torch.compiler.is_compiling() or func == _GET_BASE:
                return result  # torch 2.11 follows `_base` until it is None
            memory = {place(given) for given in tree_leaves((args, kwargs)) if isinstance(given, cls)} - {None}

            def guarded(part: Any) -> Any:
                return cls.over(part) if type(part) is torch.Tensor and place(part) in memory else part

            return type(result)(map(guarded, result)) if type(result) in (tuple, list) else guarded(result)

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.clone()

    def share_memory_(self) -> StorageView:
        """Returns the tensor, whose memory is shared as it is."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a view of a buffer's shared memory cannot be pickled: pickle the buffer, or view.clone()")


def place(tensor: torch.Tensor) -> int | None:
    """Returns where the memory begins that a tensor is a view of; None if it has none, as sparse ones and wrappers."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def smallest_priority(leaf: float, sampler: Sampler) -> float:
    """Returns the raw priority of the smallest leaf, as `priorities_of` does; 0 when there is none."""
    if not leaf:
        return 0.0
    if isinstance(sampler, Uniform) or not sampler.alpha:
        return 1.0
    largest = math.log(LARGEST_PRIORITY)
    return max(0.0, math.exp(min(math.log(leaf) / sampler.alpha, largest)) - sampler.eps)


def histograms(
    leaves: torch.Tensor, keys1: torch.Tensor, head: int, bins: int, sampler: Sampler
) -> dict[str, torch.Tensor]:
    """Returns the histograms that `ReplayBuffer.histograms` documents.

    Args:
        leaves: float32 `[capacity]`, 0 for slots that cannot be drawn.
        keys1: int64 `[capacity]`, key + 1 of each slot's row, 0 for none.
        head: The next key.
        bins: Number of bins.
        sampler: The buffer's.
    """
    priorities = priorities_of(leaves[(leaves > 0) & (keys1 > 0)].double(), sampler)  # other rows are being restored
    positive = priorities.clamp(min=getattr(sampler, "eps", 1.0))  # 0 has no logarithm
    ages = (head - keys1[keys1 > 0]).double()
    low, high = (math.log10(positive.min()), math.log10(positive.max())) if len(positive) else (0.0, 0.0)
    # A range of no width would put everything beside its only value.
    priority_range = (low, high) if high > low else (low - 0.5, low + 0.5)
    age_range = (0.0, float(ages.max()) if len(ages) else 1.0)
    return {
        "priority_edges": torch.logspace(*priority_range, bins + 1, dtype=torch.float64, device="cpu"),
        # Clamped: logarithms of the extremes may differ from the edges in the last bit.
        "priority": torch.histc(positive.log10().clamp(*priority_range), bins, *priority_range).long(),
        "age_edges": torch.linspace(*age_range, bins + 1, dtype=torch.float64, device="cpu"),
        "age": torch.histc(ages, bins, *age_range).long(),
    }


class Inspection:
    """What is in a buffer.

    Args:
        sampler: Of the buffer.
    """

    def __init__(self, sampler: LocalSampler) -> None:
        self._segment, self._config = sampler.segment, sampler.config

    def stats(self) -> Stats:
        """Returns what has happened so far, over all processes."""
        values = self._segment.stats()
        values["priority_min"] = smallest_priority(values.pop("smallest_leaf"), self._config.sampler)
        return Stats.of(values)

    def histograms(self, bins: int) -> dict[str, torch.Tensor]:
        """Returns what `ReplayBuffer.histograms` does."""
        bins = checked_int("bins", bins, 1, 1 << 20)
        head = self._segment.stats()["rows_written"]
        return histograms(self._segment.column(-1), self._segment.column(-2), head, bins, self._config.sampler)

    def keys(self, rows: bool) -> torch.Tensor:
        """Returns what `ReplayBuffer.keys` does."""
        keys1 = self._segment.column(-2)
        there = keys1 > 0 if rows else (self._segment.column(-1) > 0) & (keys1 > 0)
        return torch.sort(keys1[there] - 1).values

    def priorities(self, keys: torch.Tensor) -> torch.Tensor:
        """Returns the raw priorities of the items anchored at `keys`, int64 `[n]`; NaN for those that are not there."""
        slots = keys % self._config.capacity
        leaves, keys1 = self._segment.column(-1)[slots], self._segment.column(-2)[slots]
        raw = priorities_of(leaves.double(), self._config.sampler).float()
        return torch.where((keys1 == keys + 1) & (leaves > 0), raw, math.nan)

    def storage(self) -> dict[str, Any]:
        """Returns tensors over the shared memory itself, nested as the spec."""
        return nest({path: StorageView.over(self._segment.column(i)) for i, path in enumerate(self._config.fields)})

    def summary(self, path: Path | None) -> str:
        """Returns the buffer's text; `path` is its file."""
        stats = self.stats()
        where = "shared" if path is None else f"in {path}"
        names = ", ".join("/".join(path) for path in self._config.fields)
        named = "" if self._config.name is None else f"{self._config.name!r}, "
        return (
            f"ReplayBuffer({named}{stats.size:,}/{stats.capacity:,} rows, fields: {names}, "
            f"{stats.nbytes / 2**20:,.1f} MiB {where}, {self._config.view}, {self._config.sampler}, "
            f"{from_native(*self._segment.limiter)}, "
            f"{stats.writers} writers{', stopped' if stats.stopped else ''})"
        )
