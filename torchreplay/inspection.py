"""Looking into a buffer's memory."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch


class StorageView(torch.Tensor):
    """A tensor over the shared memory of a buffer, which refuses to be pickled.

    torch would copy the memory to a shared file of its own and silently point this tensor there.
    """

    @classmethod
    def over(cls, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`'s memory as a view of this type."""
        return tensor.as_subclass(cls)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a view of a buffer's shared memory cannot be pickled: pickle the buffer, or view.clone()")


def histograms(leaves: torch.Tensor, keys1: torch.Tensor, head: int, bins: int) -> dict[str, torch.Tensor]:
    """Returns the histograms that `ReplayBuffer.histograms` documents.

    Args:
        leaves: float32 `[capacity]`, 0 for slots that cannot be drawn.
        keys1: int64 `[capacity]`, key + 1 of each slot's row, 0 for none.
        head: The next key.
        bins: Number of bins.
    """
    positive = leaves[leaves > 0].double()
    ages = (head - keys1[keys1 > 0]).double()
    low, high = (math.log10(positive.min()), math.log10(positive.max())) if len(positive) else (0.0, 0.0)
    # A range of no width would put everything beside its only value.
    priority_range = (low, high) if high > low else (low - 0.5, low + 0.5)
    age_range = (0.0, float(ages.max()) if len(ages) else 1.0)
    return {
        "priority_edges": torch.logspace(*priority_range, bins + 1, dtype=torch.float64),
        "priority": torch.histc(positive.log10(), bins, *priority_range).long(),
        "age_edges": torch.linspace(*age_range, bins + 1, dtype=torch.float64),
        "age": torch.histc(ages, bins, *age_range).long(),
    }
