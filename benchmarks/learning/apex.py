"""What every Ape-X run shares, whatever its replay buffer: the slow environment, epsilons, the learner's loop."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import numpy as np
from torch import Tensor, nn

from benchmarks.learning.double_dqn import ACROBOT, Learner

TASK = ACROBOT
STEP_SECONDS = 0.004
SOLVED_AT = -100.0
"""Mean return of the last evaluations."""
EVALUATIONS = 3
HOPELESS = -200.0
"""An evaluation ends when its mean falls to this. The best is about -60, so the mean of three stays below -100."""
N_STEP = 3
BATCH_SIZE = 128
SAMPLES_PER_INSERT = 16.0
CAPACITY = 50_000
MIN_ROWS = 500
PUBLISH_EVERY = 10
EVALUATE_EVERY = 100
MOST_SECONDS = 600.0
"""Of a run, after which it counts as one that never solves the task."""


class Slow(gym.Wrapper):
    """A task whose step takes real time, without a processor: a simulator elsewhere, or a robot."""

    def __init__(self) -> None:
        super().__init__(gym.make(TASK.env))

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        """Steps, and waits."""
        due = time.perf_counter() + STEP_SECONDS
        obs, reward, terminated, truncated, info = self.env.step(action)
        time.sleep(max(0.0, due - time.perf_counter()))
        return obs, TASK.scale * float(reward), terminated, truncated, info


def epsilon_of(index: int, explorers: int) -> float:
    """Returns an explorer's share of random actions: spread as by Horgan et al., 0.1 for a single one."""
    return float(0.4 ** (1 + 7 * index / (explorers - 1))) if explorers > 1 else 0.1


def seconds_until_solved(
    learner: Learner,
    batches: Iterable[Any],
    feed_back: Callable[[Any, Tensor], None],
    publish: Callable[[nn.Module], object],
    seed: int,
) -> float:
    """Learns until the last evaluations solve the task.

    Args:
        learner: Who learns.
        batches: Prioritized ones, without end.
        feed_back: Takes a batch and its TD errors.
        publish: Gives explorers new weights.
        seed: Of the evaluations.

    Returns:
        Seconds from the call on; infinity where it takes too long.
    """
    start, scores = time.perf_counter(), deque([-math.inf], EVALUATIONS)
    for batch in batches:
        feed_back(batch, learner.learn(batch))
        if learner.steps % PUBLISH_EVERY == 0:
            publish(learner.q)
        seconds = time.perf_counter() - start
        if learner.steps % EVALUATE_EVERY == 0:
            scores.append(learner.evaluate(seed, HOPELESS))
            if np.mean(scores) >= SOLVED_AT:
                return seconds
        if seconds > MOST_SECONDS:
            break
    return math.inf
