"""Recurrent replay: stored states, burn-in and the priority of a sequence, with `examples/r2d2.py` on its T-maze.

Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX: figure 2 compares stored states with zero ones, and
section 2.3 has eta.
"""

from collections.abc import Callable, Iterable
from functools import partial

from benchmarks.learning.cell import Point, Question
from benchmarks.learning.examples import play

BURN_IN = 5
LENGTH = ("--total-steps", "1000", "--eval-every", "50")
STARTS = {
    f"stored state, burn-in {BURN_IN}": ("--burn-in", str(BURN_IN)),
    "stored state, no burn-in": ("--burn-in", "0"),
    f"zero state, burn-in {BURN_IN}": ("--no-stored-state", "--burn-in", str(BURN_IN)),
    "zero state, no burn-in": ("--no-stored-state", "--burn-in", "0"),
}
ETAS = ("0", "0.5", "0.9", "1")


def _plays(flags: dict[str, tuple[str, ...]]) -> dict[str, Callable[[int], Iterable[Point]]]:
    return {
        variant: partial(play, name="r2d2", flags=(*LENGTH, *chosen), x="step", y="mean_return")
        for variant, chosen in flags.items()
    }


RECURRENT = Question(
    "recurrent",
    "Recurrent replay: R2D2 on a T-maze",
    "learner steps",
    "mean return of 50 greedy episodes",
    {
        "where the LSTM starts from": _plays(STARTS),
        "share of the largest error in the priority": _plays({f"eta {eta}": ("--eta", eta) for eta in ETAS}),
    },
)
