"""The Blind Cliffwalk: learner steps until it is solved, against the size of the replay memory.

Schaul et al. 2016, https://arxiv.org/abs/1511.05952, section 3.1 and appendix B.1. In each of n states one action is
right and leads on, the other one ends the episode. Only the last right action is rewarded, with 1. The memory holds
every sequence of actions once: 2^(n + 1) - 2 transitions. Tabular Q-learning takes one of them at a time. The
step size is 1/4, gamma is 1 - 1/n. A run ends when the mean squared error of all action values is below 1e-3.
"""

import math
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

import torchreplay as tr
from benchmarks.learning.cell import Point, Question

STEP_SIZE = 0.25
SOLVED = 1e-3
STATES = range(2, 17)
MOST = 10_000_000
"""Learner steps after which a run gives up, and counts as one that never ends."""


Chooser = Callable[..., Generator[int, float, None]]
"""Yields the index of the transition to learn from, and is sent its TD error."""


class Transition(NamedTuple):
    """A step; actions are numbered so that 1 is right."""

    state: int
    action: int
    reward: float
    next_state: int  # n: the episode has ended


def step(n: int, state: int, action: int) -> Transition:
    """Returns what an action does."""
    last = state == n - 1
    return Transition(state, action, float(action and last), state + 1 if action and not last else n)


def memory(n: int, rng: np.random.Generator) -> list[Transition]:
    """Returns the transitions of all 2^n sequences of actions, in random order."""
    found = []
    for actions in product((0, 1), repeat=n):
        for state, action in enumerate(actions):
            found.append(step(n, state, action))
            if not action:
                break
    return [found[i] for i in rng.permutation(len(found))]


class QTable:
    """The action values, and what they should be.

    Args:
        n: States.
        rng: Of the initial values.
    """

    def __init__(self, n: int, rng: np.random.Generator) -> None:
        self._gamma = 1 - 1 / n
        self._n = n
        self.values: list[list[float]] = [*rng.normal(0.0, 0.1, (n, 2)).tolist(), [0.0, 0.0]]
        self._truth = [[0.0, self._gamma ** (n - 1 - state)] for state in range(n)]
        self._errors = [[self._error(s, a) for a in (0, 1)] for s in range(n)]
        self.squared = sum(map(sum, self._errors))

    def td_error(self, t: Transition) -> float:
        """Returns the TD error of a transition."""
        return t.reward + self._gamma * max(self.values[t.next_state]) - self.values[t.state][t.action]

    def learn(self, t: Transition) -> float:
        """Learns from a transition; returns the TD error that it had."""
        error = self.td_error(t)
        self.values[t.state][t.action] += STEP_SIZE * error
        squared = self._error(t.state, t.action)
        self.squared += squared - self._errors[t.state][t.action]
        self._errors[t.state][t.action] = squared
        return error

    def gain(self, t: Transition) -> float:
        """Returns by how much learning from a transition would reduce the squared error."""
        after = self.values[t.state][t.action] + STEP_SIZE * self.td_error(t)
        error: float = self._errors[t.state][t.action]
        return error - float((after - self._truth[t.state][t.action]) ** 2)

    @property
    def solved(self) -> bool:
        """Whether the mean squared error is small."""
        return self.squared < SOLVED * 2 * self._n

    def _error(self, state: int, action: int) -> float:
        return float((self.values[state][action] - self._truth[state][action]) ** 2)


def replayed(
    transitions: list[Transition], seed: int, table: QTable, sampler: tr.Prioritized | tr.Uniform
) -> Generator[int, float, None]:
    """Yields the index of the transition to learn from; is sent its TD error."""
    size = len(transitions)
    with tr.ReplayBuffer({"index": tr.Field((), np.int64)}, size, sampler=sampler, seed=seed) as buffer:
        buffer.extend(index=np.arange(size))
        while True:
            batch = buffer.sample(1)
            error = yield int(batch["index"])
            if isinstance(sampler, tr.Prioritized):
                buffer.update_priorities(batch, np.array([error], np.float32))


def oracle(transitions: list[Transition], seed: int, table: QTable) -> Generator[int, float, None]:
    """Yields the index of the transition that takes most off the squared error: greedy, and knows the truth."""
    distinct = {transition: index for index, transition in enumerate(transitions)}
    while True:
        yield distinct[max(distinct, key=table.gain)]


def play(seed: int, choose: Chooser) -> Iterable[Point]:
    """Yields (transitions in the memory, learner steps until it is solved) for each number of states."""
    for n in STATES:
        rng = np.random.default_rng([seed, n])
        transitions, table, start = memory(n, rng), QTable(n, rng), time.perf_counter()
        steps = _steps_to_solve(table, transitions, choose(transitions, seed, table))
        yield Point(len(transitions), steps, time.perf_counter() - start)
        if steps == math.inf:
            return


def _steps_to_solve(table: QTable, transitions: list[Transition], chosen: Generator[int, float, None]) -> float:
    steps, index = 0, next(chosen)
    while not table.solved:
        if steps == MOST:
            return math.inf
        error = table.learn(transitions[index])
        steps += 1
        index = chosen.send(error)
    return steps


def _with(sampler: tr.Prioritized | tr.Uniform) -> Callable[[int], Iterable[Point]]:
    return partial(play, choose=partial(replayed, sampler=sampler))


CLIFFWALK = Question(
    "cliffwalk",
    "Blind Cliffwalk (Schaul et al. 2016): what replay must find",
    "transitions in the replay memory",
    "learner steps until solved",
    {
        "Blind Cliffwalk": {
            "uniform": _with(tr.Uniform()),
            "prioritized, alpha 0.6": _with(tr.Prioritized(alpha=0.6, weights="none")),
            "prioritized, alpha 1": _with(tr.Prioritized(alpha=1.0, weights="none")),
            "oracle": partial(play, choose=oracle),
        }
    },
    log_x=True,
    log_y=True,
)
