"""The priority that new items start from: the largest ever seen, the largest held, or a number.

Two tasks with rare rewards. The Blind Cliffwalk is explored at random here: rows come while the learner draws. It is
played again with one wrong TD error early on. Double DQN plays Acrobot-v1.

Explorer and learner take turns in one thread, so a run depends on its seed alone.
"""

import math
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

import numpy as np

import torchreplay as tr
from benchmarks.learning.cell import Point, Question
from benchmarks.learning.double_dqn import ACROBOT, GAMMA, Explorer, Learner
from benchmarks.learning.questions.cliffwalk import QTable, Transition, step

MAX_SEEN, MAX_HELD = tr.Prioritized(initial="max_seen"), tr.Prioritized(initial="max_held")
ONE = tr.Prioritized(initial=1.0)
OUTLIER = 1e4
"""A TD error that one item of a batch is given. It is corrected when the item is drawn again: at the next update."""
OUTLIER_AT = 10
"""The update that gives it."""

STATES = range(6, 13)
ROWS, BATCH_SIZE = 8, 32
"""Rows that come between two updates of the Cliffwalk, and rows of an update: each is drawn four times on average."""
MOST = 100_000
"""Updates after which a run gives up, and counts as one that never ends."""

STEPS = 8_000
LEARN_FROM = 500
TOLD_EVERY = 500
STEPS_PER_UPDATE, ACROBOT_BATCH_SIZE = 4, 64


def cliffwalk(seed: int, sampler: tr.Prioritized | tr.Uniform, outlier: bool = False) -> Iterable[Point]:
    """Yields (capacity of the ring, updates from the first reward until it is solved) for each number of states."""
    for n in STATES:
        start = time.perf_counter()
        updates = _updates_to_solve(n, seed, sampler, outlier)
        yield Point(capacity(n), updates, time.perf_counter() - start)


def capacity(n: int) -> int:
    """Returns the capacity of a ring that holds two rewarded rows on average."""
    return int(2 ** (n + 2))


def walks(n: int, rng: np.random.Generator) -> Iterator[Transition]:
    """Yields the transitions of random walks, without end: one of 2^n walks is rewarded on average."""
    while True:
        for state in range(n):
            action = int(rng.integers(2))
            yield step(n, state, action)
            if not action:
                break


def _updates_to_solve(n: int, seed: int, sampler: tr.Prioritized | tr.Uniform, outlier: bool) -> float:
    rng = np.random.default_rng([seed, n])
    table, walked = QTable(n, rng), walks(n, rng)
    fields = {"state": tr.Field((), np.int64), "action": tr.Field((), np.int64)}
    updates, rewarded_at = 0, math.inf
    with tr.ReplayBuffer(fields, capacity(n), sampler=sampler, seed=seed) as buffer:
        while not table.solved:
            rows = list(islice(walked, ROWS if updates else BATCH_SIZE))
            if any(row.reward for row in rows):
                rewarded_at = min(rewarded_at, updates)
            buffer.extend(state=[row.state for row in rows], action=[row.action for row in rows])
            batch = buffer.sample(BATCH_SIZE)
            drawn = zip(batch["state"].tolist(), batch["action"].tolist(), strict=True)
            errors = np.array([table.learn(step(n, *pair)) for pair in drawn], np.float32)
            updates += 1
            if outlier and updates == OUTLIER_AT:
                errors[0] = OUTLIER
            if isinstance(sampler, tr.Prioritized):
                buffer.update_priorities(batch, errors)
            if updates - rewarded_at == MOST:
                return math.inf
    return updates - rewarded_at


def acrobot(seed: int, sampler: tr.Prioritized) -> Iterable[Point]:
    """Yields (environment steps, episodes so far in which the goal was reached)."""
    learner, start = Learner(ACROBOT, seed), time.perf_counter()
    with tr.ReplayBuffer(
        ACROBOT.fields, STEPS, sampler=sampler, view=tr.Transitions(n_step=3, gamma=GAMMA), seed=seed
    ) as buffer:
        explorer = Explorer(buffer, seed, ACROBOT)
        for taken in range(1, STEPS + 1):
            explorer.step()
            if taken >= LEARN_FROM and taken % STEPS_PER_UPDATE == 0:
                batch = buffer.sample(ACROBOT_BATCH_SIZE)
                buffer.update_priorities(batch, learner.learn(batch))
                explorer.policy.load_state_dict(learner.q.state_dict())
            if taken % TOLD_EVERY == 0:
                yield Point(taken, explorer.terminated, time.perf_counter() - start)


INITIAL = Question(
    "initial",
    "What new items start from: the Blind Cliffwalk, from the first reward on",
    "rows in the ring",
    "updates until solved",
    {
        "TD errors as they are": {
            "max_seen": partial(cliffwalk, sampler=MAX_SEEN),
            "max_held": partial(cliffwalk, sampler=MAX_HELD),
            "1.0": partial(cliffwalk, sampler=ONE),
            "uniform": partial(cliffwalk, sampler=tr.Uniform()),
        },
        "one TD error of 10,000, then corrected": {
            "max_seen": partial(cliffwalk, sampler=MAX_SEEN, outlier=True),
            "max_held": partial(cliffwalk, sampler=MAX_HELD, outlier=True),
            "1.0": partial(cliffwalk, sampler=ONE, outlier=True),
        },
    },
    log_x=True,
    log_y=True,
)
INITIAL_ACROBOT = Question(
    "initial_acrobot",
    "What new items start from: double DQN on Acrobot-v1",
    "environment steps",
    "episodes so far in which the goal was reached",
    {
        "TD errors as they are": {  # below 1, so that max_seen is 1
            "max_seen": partial(acrobot, sampler=MAX_SEEN),
            "max_held": partial(acrobot, sampler=MAX_HELD),
        }
    },
)
