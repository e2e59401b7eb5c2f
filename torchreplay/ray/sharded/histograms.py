"""One histogram made of several that have different edges."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchreplay.buffer.inspection import histograms
from torchreplay.schema.samplers import Uniform


def merged_histograms(each: Sequence[dict[str, torch.Tensor]], bins: int) -> dict[str, torch.Tensor]:
    """Returns histograms as `ReplayBuffer.histograms` does, over the range that all of `each` span together."""
    if not each:
        return histograms(torch.empty(0), torch.empty(0, dtype=torch.int64), 0, bins, Uniform())
    merged = {}
    for name, logarithmic in (("priority", True), ("age", False)):
        counts = [h[name] for h in each]
        edges = [h[f"{name}_edges"].log10() if logarithmic else h[f"{name}_edges"] for h in each]
        filled = [edge for edge, count in zip(edges, counts, strict=True) if count.sum()] or edges
        low, high = float(min(edge[0] for edge in filled)), float(max(edge[-1] for edge in filled))
        common = torch.linspace(low, high, bins + 1, dtype=torch.float64)
        total = torch.zeros(bins, dtype=torch.int64)
        for edge, count in zip(edges, counts, strict=True):
            middle = (edge[1:] + edge[:-1]) / 2
            total.index_add_(0, torch.bucketize(middle, common[1:-1]).clamp(max=bins - 1), count)
        merged[name], merged[f"{name}_edges"] = total, 10.0**common if logarithmic else common
    return merged
