"""How long and how large a run is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Sizes of one run of the benchmarks.

    Attributes:
        rounds: Rounds each candidate of a line is measured for.
        seconds: Aimed length of one round of one candidate, in seconds.
        shrink: Divisor of every capacity.
        contest_rounds: Rounds of the contest between processes.
        contest_seconds: Measured seconds of one such round.
        kills: Deaths of explorers, and of learners, after which the others are asked whether they can go on.
    """

    rounds: int
    seconds: float
    shrink: int
    contest_rounds: int
    contest_seconds: float
    kills: int

    def capacity(self, full: int) -> int:
        """Returns the capacity to use where a full run takes ``full`` rows."""
        return max(full // self.shrink, 1024)


FULL = Plan(rounds=61, seconds=0.002, shrink=1, contest_rounds=5, contest_seconds=2.0, kills=20)
QUICK = Plan(rounds=9, seconds=0.002, shrink=10, contest_rounds=1, contest_seconds=0.5, kills=3)
