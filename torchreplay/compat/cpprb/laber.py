"""`LaBERmean`, `LaBERlazy`, `LaBERmax`: cpprb's forms of `torchreplay.LaBER`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

import torchreplay as tr


class LaBERmean:
    """Down-samples a large batch; weights are mean(p) / p.

    Args:
        batch_size: Transitions to keep.
        m: The large batch has `m * batch_size`.
        eps: What is added to the priorities.

    Attributes:
        batch_size: Transitions to keep.
        idx: The places in the large batch.
        eps: What is added to the priorities.

    Raises:
        ValueError: `batch_size` or `m` is not positive, or `eps` is negative.
    """

    mode: ClassVar[Literal["mean", "lazy", "max"]] = "mean"

    def __init__(self, batch_size: int, m: int = 4, *, eps: float = 1e-6) -> None:
        if m <= 0:
            raise ValueError(f"m is {m}: expected a positive number")
        self.batch_size = int(batch_size)
        self._laber = tr.LaBER(self.batch_size, self.mode, eps=eps)
        self.eps, self.idx = self._laber.eps, np.arange(int(self.batch_size * m))

    def __call__(self, *, priorities: Any, **batch: Any) -> dict[str, NDArray[Any]]:
        """Returns the transitions taken.

        Args:
            priorities: One for each transition of the large batch.
            **batch: The large batch's columns.

        Returns:
            The columns, `weights`, and `indexes`: the places in the large batch.

        Raises:
            ValueError: There are not `m * batch_size` priorities, or one is negative, NaN or infinite.
        """
        p = np.asarray(priorities)
        if p.shape != self.idx.shape:
            raise ValueError(f"priorities have shape {p.shape}: expected {self.idx.shape}, batch_size times m")
        if (p < 0).any():
            raise ValueError(f"priority {p.min()} is negative: expected numbers >= 0")
        taken = self._laber({"columns": batch, "indexes": self.idx}, p)
        return {**taken["columns"], "weights": taken["weight"].numpy(), "indexes": taken["indexes"]}


class LaBERlazy(LaBERmean):
    """Down-samples a large batch; weights are sum(p) / p."""

    mode = "lazy"


class LaBERmax(LaBERmean):
    """Down-samples a large batch; weights are those of `LaBERmean`, divided by the largest of the batch."""

    mode = "max"
