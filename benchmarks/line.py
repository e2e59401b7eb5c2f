"""A line of the table: one quantity, measured for several candidates in the same rounds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

OURS = "torchreplay"


@dataclass(frozen=True)
class Line:
    """One measured quantity.

    Attributes:
        section: Heading the line stands under.
        name: What was measured.
        unit: Unit of the samples.
        samples: For each candidate one value a round; the k-th values of all candidates belong to the same round.
        higher_is_better: True for rates and fractions, False for times and bytes.
        note: Remark shown below the table.
    """

    section: str
    name: str
    unit: str
    samples: Mapping[str, Sequence[float]]
    higher_is_better: bool = False
    note: str = ""

    def median(self, candidate: str) -> float:
        """Returns the median over the rounds."""
        return statistics.median(self.samples[candidate])

    def spread(self, candidate: str) -> tuple[float, float]:
        """Returns the 10th and the 90th percentile over the rounds."""
        low, high = np.quantile(self.samples[candidate], (0.1, 0.9)).tolist()
        return low, high

    def advantage(self, over: str) -> float:
        """Returns how many times better torchreplay is than another candidate: the median of the rounds' ratios.

        A ratio within a round is free of the machine's slow drifts, which a ratio of medians is not.
        """
        pairs = zip(self.samples[OURS], self.samples[over], strict=True)
        if self.higher_is_better:
            return statistics.median(_quotient(ours, theirs) for ours, theirs in pairs)
        return statistics.median(_quotient(theirs, ours) for ours, theirs in pairs)

    def rivals(self) -> list[str]:
        """Returns the candidates other than torchreplay."""
        return [name for name in self.samples if name != OURS]


def _quotient(value: float, by: float) -> float:
    """Returns ``value / by``, where nothing by nothing is nothing: a candidate that failed has won nothing."""
    if by == 0:
        return float("inf") if value > 0 else 0.0
    return value / by


@dataclass(frozen=True)
class Verdict:
    """What an aim says about a line.

    Attributes:
        text: The aim, e.g. ``"<= 0.4 us"`` or ``">= 30x cpprb"``.
        met: Whether the measured value reaches it.
    """

    text: str
    met: bool


@dataclass(frozen=True)
class Aim:
    """What a line must reach.

    Attributes:
        bound: The value to reach: an upper bound, or a lower one where higher is better.
        over: Candidate over which ``bound`` is the least advantage; None for a bound on torchreplay's own value.
    """

    bound: float
    over: str | None = field(default=None)

    def judge(self, line: Line) -> Verdict | None:
        """Returns the verdict on a line, or None where the candidate it speaks of was not measured."""
        if OURS not in line.samples or (self.over is not None and self.over not in line.samples):
            return None
        if self.over is not None:
            return Verdict(f">= {self.bound:g}x {self.over}", line.advantage(self.over) >= self.bound)
        if line.higher_is_better:
            return Verdict(f">= {self.bound:g} {line.unit}".rstrip(), line.median(OURS) >= self.bound)
        return Verdict(f"<= {self.bound:g} {line.unit}", line.median(OURS) <= self.bound)
