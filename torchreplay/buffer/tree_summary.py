"""`TreeSummary`: what a draw found, by which the weights of different buffers compare."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from torchreplay.schema.samplers import Normalization, value_of
from torchreplay.validation import as_float, checked_int


class TreeSummary(NamedTuple):
    """The leaves as one draw found them, and the exponent of its weights.

    Attributes:
        total: Sum of the leaves.
        drawable: Number of positive leaves, N.
        smallest: The smallest positive leaf; infinity or 0 where there is none.
        beta: The exponent.
    """

    total: float
    drawable: int
    smallest: float
    beta: float = 0.0

    @classmethod
    def of_state(cls, given: Any) -> TreeSummary:
        """Returns what a state says of a draw: [total, drawable, smallest, beta].

        Raises:
            ValueError: It is something else.
        """
        if not isinstance(given, list | tuple) or len(given) != 4:
            raise ValueError(f"drawn_from is {given!r:.200}: expected [total, drawable, smallest, beta]")
        drawable, beta = checked_int("drawable", given[1], 1), value_of(given[3], 0)
        total, smallest = as_float("total", given[0]), as_float("smallest", given[2])
        if not 0 < smallest <= total < math.inf:
            raise ValueError(f"drawn_from has a total of {total} and a smallest leaf of {smallest}")
        return cls(total, drawable, smallest, beta)

    def log_of_largest(self, weights: Normalization, probability: torch.Tensor) -> float:
        """Returns the logarithm of the (N P)^-beta that weights were divided by (Schaul et al. 2016, section 3.4).

        Args:
            weights: By which one: the largest of the `"buffer"`, of the `"batch"`, or `"none"`.
            probability: P of the batch's items.
        """
        if weights == "none":
            return 0.0
        least = float(probability.min()) if weights == "batch" else self.smallest / self.total
        return -self.beta * math.log(self.drawable * least)
