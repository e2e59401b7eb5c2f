"""Ape-X (Horgan et al. 2018): seconds until CartPole-v1 is solved against explorers, where a step takes 4 ms."""

import math
import time
from collections.abc import Iterable
from functools import partial

import gymnasium as gym
import numpy as np
import torch

import torchreplay as tr
from benchmarks.learning.cell import Point, Question
from benchmarks.learning.double_dqn import FIELDS, GAMMA, Learner, network, scaled
from torchreplay.ray import ExplorerContext, ExplorerPool

STEP_SECONDS = 0.004
EXPLORERS_TRIED = (1, 2, 4, 8, 16)
SOLVED_AT = 475.0
N_STEP = 3
BATCH_SIZE = 128
CAPACITY = 50_000
EVALUATE_EVERY = 50
MOST_SECONDS = 600.0
"""Of a run, after which it counts as one that never solves the task."""


class Slow(gym.Wrapper):
    """An environment whose step takes real time, without a processor: a simulator elsewhere, or a robot."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        """Steps, and waits."""
        due = time.perf_counter() + STEP_SECONDS
        obs, reward, terminated, truncated, info = self.env.step(action)
        time.sleep(max(0.0, due - time.perf_counter()))
        return obs, scaled(float(reward)), terminated, truncated, info


@torch.no_grad()
def explore(ctx: ExplorerContext) -> None:
    """Plays with an epsilon of its own until the learner has finished."""
    torch.set_num_threads(1)
    env, policy = Slow(gym.make("CartPole-v1")), network()
    rng, writer = np.random.default_rng(ctx.seed), ctx.writer()
    # With one explorer the base; with many they spread as Horgan et al. spread them.
    epsilon = 0.4 ** (1 + 7 * ctx.index / max(ctx.num_explorers - 1, 1)) if ctx.num_explorers > 1 else 0.1
    obs, _ = env.reset(seed=ctx.seed)
    writer.reset(obs=obs)
    while not ctx.stopped:
        ctx.pull_weights(policy)
        greedy = rng.random() >= epsilon
        action = int(policy(torch.from_numpy(obs)).argmax()) if greedy else int(rng.integers(2))
        obs, reward, terminated, truncated, _ = env.step(action)
        writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        if terminated or truncated:
            obs, _ = env.reset()
            writer.reset(obs=obs)


def seconds_to_solve(seed: int, explorers: int) -> float:
    """Returns seconds from when all explorers play to the evaluation that solves the task; infinity: none did."""
    learner = Learner(seed)
    weights = tr.SharedWeights(learner.q)
    with (
        tr.ReplayBuffer(
            FIELDS,
            CAPACITY,
            sampler=tr.Prioritized(alpha=0.6, beta=0.4),
            view=tr.Transitions(n_step=N_STEP, gamma=GAMMA),
            limiter=tr.SamplesPerInsert(32.0, min_size=500, tolerance=0.5),
            seed=seed,
        ) as buffer,
        ExplorerPool(explore, explorers, buffer, weights=weights, seed=seed, backend="process") as pool,
    ):
        while any(explorer.rows == 0 for explorer in pool.stats()):  # processes take seconds to start
            pool.check()
            time.sleep(0.01)
        start = time.perf_counter()
        for batch in tr.ReplayDataset(buffer, BATCH_SIZE):
            buffer.update_priorities(batch, learner.learn(batch))
            if learner.steps % 10 == 0:
                weights.publish(learner.q)
            seconds = time.perf_counter() - start
            if learner.steps % EVALUATE_EVERY == 0 and learner.evaluate(seed) >= SOLVED_AT:
                break
            if seconds > MOST_SECONDS:
                seconds = math.inf
                break
        buffer.stop()
    return seconds


def play(seed: int, counts: Iterable[int] = EXPLORERS_TRIED) -> Iterable[Point]:
    """Yields (explorers, seconds until it is solved)."""
    for explorers in counts:
        seconds = seconds_to_solve(seed, explorers)
        yield Point(explorers, seconds, seconds)


EXPLORERS = Question(
    "explorers",
    "Ape-X: time to solve CartPole-v1, environment steps of 4 ms",
    "explorers",
    "seconds until solved",
    {"CartPole-v1": {"torchreplay": partial(play)}},
    log_x=True,
    log_y=True,
)
