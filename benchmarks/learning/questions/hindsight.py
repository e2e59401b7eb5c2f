"""Hindsight: each strategy of Andrychowicz et al. (2017, https://arxiv.org/abs/1707.01495), with `examples/her.py`."""

from functools import partial

from benchmarks.learning.cell import Question
from benchmarks.learning.examples import play

LENGTH = ("--total-steps", "10000", "--eval-every", "500")
STRATEGIES = ("future", "final", "episode", "none")

HINDSIGHT = Question(
    "hindsight",
    "Hindsight: which reached place becomes the goal",
    "learner steps",
    "success rate of 100 greedy episodes",
    {
        "Reacher-v5": {
            strategy: partial(play, name="her", flags=(*LENGTH, "--strategy", strategy), x="step", y="success_rate")
            for strategy in STRATEGIES
        }
    },
)
