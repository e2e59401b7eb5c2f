"""Looking into a buffer's memory."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from torchreplay.schema.samplers import Sampler, priorities_of

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
