"""What stale draws and stale policies cost: batches drawn ahead, and weights published late.

Explorer and learner take turns in one thread, so a run depends on its seed alone.
"""

import time
from collections.abc import Iterable
from functools import partial

import torchreplay as tr
from benchmarks.learning.cell import Point, Question
from benchmarks.learning.double_dqn import CARTPOLE, GAMMA, Explorer, Learner

STEPS = 20_000
LEARN_FROM = 1_000
EVALUATE_EVERY = 1_000
BATCH_SIZE = 64
PREFETCHES = (0, 2, 4, 16)
PUBLISHED_EVERY = (1, 10, 100, 1_000)


def play(seed: int, prefetch: int = 0, publish_every: int = 1) -> Iterable[Point]:
    """Yields (environment steps, mean return of greedy episodes); the learner does one update a step."""
    learner, seconds = Learner(CARTPOLE, seed), 0.0
    with tr.ReplayBuffer(
        CARTPOLE.fields, STEPS, sampler=tr.Prioritized(), view=tr.Transitions(n_step=3, gamma=GAMMA), seed=seed
    ) as buffer:
        explorer, since = Explorer(buffer, seed), time.perf_counter()
        for _ in range(LEARN_FROM):
            explorer.step()
        batches = iter(tr.ReplayDataset(buffer, BATCH_SIZE, prefetch=prefetch))
        for step in range(LEARN_FROM, STEPS):
            batch = next(batches)
            buffer.update_priorities(batch, learner.learn(batch))
            if learner.steps % publish_every == 0:
                explorer.policy.load_state_dict(learner.q.state_dict())
            explorer.step()
            if (step + 1) % EVALUATE_EVERY == 0:
                seconds += time.perf_counter() - since
                yield Point(step + 1, learner.evaluate(seed), seconds)
                since = time.perf_counter()


STALENESS = Question(
    "staleness",
    "What stale draws and stale policies cost: double DQN on CartPole-v1",
    "environment steps",
    f"mean return of {CARTPOLE.episodes} greedy episodes",
    {
        "batches drawn ahead": {f"prefetch {n}": partial(play, prefetch=n) for n in PREFETCHES},
        "weights published late": {
            f"every {n:,} step{'s' * (n > 1)}": partial(play, publish_every=n) for n in PUBLISHED_EVERY
        },
    },
)
