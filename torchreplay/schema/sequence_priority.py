"""One priority for a sequence of TD errors."""

from __future__ import annotations

import torch

from torchreplay.validation import as_float, checked_instance


def sequence_priority(td: torch.Tensor, mask: torch.Tensor, eta: float = 0.9) -> torch.Tensor:
    """Returns the priority of each sequence: eta * max |td| + (1 - eta) * mean |td| over its real steps.

    Kapturowski et al. 2019 (R2D2, https://openreview.net/forum?id=r1lyTjAqYX), section 2.3. Feed it back with
    `buffer.update_priorities(batch, priority)`. Where no TD errors were computed for the burn-in, leave it out of the
    mask too: `sequence_priority(td, batch["mask"][:, burn_in:])`.

    Args:
        td: TD errors `[B, L]` of any float dtype, on any device; what stands outside the mask does not matter, be it
            NaN. No gradient passes.
        mask: bool `[B, L]`, True on real steps.
        eta: The share of the maximum, 0 to 1.

    Returns:
        `[B]` on the device of `td`, float32 (float64 for float64 TD errors: half precision is for storage, not for
        sums); 0 for sequences without a real step.

    Raises:
        ValueError: A shape or a dtype is another, or `eta` is outside 0 to 1.
        TypeError: `td` or `mask` is no tensor.

    Example:
        >>> td = torch.tensor([[1.0, -3.0, 9.0]])
        >>> tr.sequence_priority(td, torch.tensor([[True, True, False]]))  # 0.9 * 3 + 0.1 * 2
        tensor([2.9000])
    """
    eta = as_float("eta", eta)
    if not 0.0 <= eta <= 1.0:
        raise ValueError(f"eta is {eta}: expected 0 to 1")
    for name, given in (("td", td), ("mask", mask)):
        checked_instance(name, given, torch.Tensor, "a torch.Tensor [B, L]")
    if td.ndim != 2 or td.shape[1] == 0 or not td.is_floating_point():
        raise ValueError(f"td is {td.dtype} {list(td.shape)}: expected floats [B, L]")
    if mask.shape != td.shape or mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}: expected torch.bool {list(td.shape)}, as td")
    size = td.detach().to(torch.float64 if td.dtype == torch.float64 else torch.float32).abs()
    size = torch.where(mask, size, 0.0)
    mean = size.sum(1) / mask.sum(1).clamp(min=1)
    return torch.lerp(mean, size.amax(1), eta)
