"""Ape-X with torchreplay's buffer; `apex_peers` has it with those of others."""

import time

import numpy as np
import torch

import torchreplay as tr
from benchmarks.learning import apex
from benchmarks.learning.double_dqn import GAMMA, Learner, act
from torchreplay.explorers import ExplorerContext, ExplorerPool


@torch.no_grad()
def explore(ctx: ExplorerContext) -> None:
    """Plays with an epsilon of its own until the learner has finished."""
    torch.set_num_threads(1)
    env, policy = apex.Slow(), apex.TASK.network()
    rng, writer = np.random.default_rng(ctx.seed), ctx.writer()
    epsilon = apex.epsilon_of(ctx.index, ctx.num_explorers)
    obs, _ = env.reset(seed=ctx.seed)
    writer.reset(obs=obs)
    buffer = ctx.buffer
    assert isinstance(buffer, tr.ReplayBuffer)  # of one policy, and on one machine
    while buffer.stats().writers < ctx.num_explorers and not ctx.stopped:  # all begin together, as the peers' do
        time.sleep(0.01)
    while not ctx.stopped:
        ctx.pull_weights(policy)
        action = act(policy, obs, epsilon, rng)
        obs, reward, terminated, truncated, _ = env.step(action)
        writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        if terminated or truncated:
            obs, _ = env.reset()
            writer.reset(obs=obs)


def with_torchreplay(seed: int, explorers: int) -> float:
    """Returns seconds until it is solved, with explorers that are processes."""
    learner = Learner(apex.TASK, seed)
    weights = tr.SharedWeights(learner.q)
    with (
        tr.ReplayBuffer(
            apex.TASK.fields,
            apex.CAPACITY,
            sampler=tr.Prioritized(alpha=0.6, beta=0.4),
            view=tr.Transitions(n_step=apex.N_STEP, gamma=GAMMA),
            limiter=tr.SamplesPerInsert(apex.SAMPLES_PER_INSERT, min_size=apex.MIN_ROWS, tolerance=0.5),
            seed=seed,
        ) as buffer,
        ExplorerPool(explore, explorers, buffer, weights=weights, seed=seed) as pool,
    ):
        while buffer.stats().writers < explorers:  # processes take seconds to start
            pool.check()
            time.sleep(0.01)
        seconds = apex.seconds_until_solved(
            learner, tr.ReplayDataset(buffer, apex.BATCH_SIZE), buffer.update_priorities, weights.publish, seed
        )
        buffer.stop()
    return seconds
