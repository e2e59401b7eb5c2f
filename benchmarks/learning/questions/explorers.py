"""Ape-X (Horgan et al. 2018, https://arxiv.org/abs/1803.00933): seconds to a solution against explorers.

A step of Acrobot-v1 takes 4 ms here. torchreplay's buffer stands beside cpprb's in shared memory and beside a plain
buffer in a Ray actor, with the same network, batches, explorers and ratio of draws to rows.
"""

from collections.abc import Callable, Iterable
from functools import partial

from benchmarks.learning.apex import STEP_SECONDS, TASK
from benchmarks.learning.apex_peers import with_cpprb, with_ray_actor
from benchmarks.learning.apex_torchreplay import with_torchreplay
from benchmarks.learning.cell import Point, Question

EXPLORERS_TRIED = (1, 2, 4, 8, 16)


def play(seed: int, solve: Callable[[int, int], float]) -> Iterable[Point]:
    """Yields (explorers, seconds until it is solved)."""
    for explorers in EXPLORERS_TRIED:
        seconds = solve(seed, explorers)
        yield Point(explorers, seconds, seconds)


EXPLORERS = Question(
    "explorers",
    f"Ape-X: time to solve {TASK.env}, environment steps of {1e3 * STEP_SECONDS:.0f} ms",
    "explorers",
    "seconds until solved",
    {
        TASK.env: {
            "torchreplay": partial(play, solve=with_torchreplay),
            "cpprb, shared memory": partial(play, solve=with_cpprb),
            "a buffer in a Ray actor": partial(play, solve=with_ray_actor),
        }
    },
    log_x=True,
    log_y=True,
)
