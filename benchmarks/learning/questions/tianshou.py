"""The same agent with Tianshou's buffers and with ours: its DQN, collectors and trainer, eight environments."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, ReplayBuffer
from tianshou.data import PrioritizedVectorReplayBuffer as TianshouPrioritized
from tianshou.data import VectorReplayBuffer as TianshouUniform
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net

from benchmarks.learning.cell import Point, Question
from torchreplay.compat.tianshou import PrioritizedVectorReplayBuffer, SharedVectorReplayBuffer

ENV, STEPS, EVALUATIONS, EPISODES = "CartPole-v1", 20_000, 10, 20
ENVS = 8
CAPACITY = 20_000
LEARNING_STARTS = 1_000
PRIORITIZED = {"alpha": 0.6, "beta": 0.4}


def _environments(n: int, seed: int) -> DummyVectorEnv:
    envs = DummyVectorEnv([partial(gym.make, ENV) for _ in range(n)])
    envs.seed(seed)
    return envs


def _dqn() -> "DQN[Any]":
    space = gym.make(ENV).action_space
    net = Net(state_shape=4, action_shape=2, hidden_sizes=[128, 128])
    policy = DiscreteQLearningPolicy(model=net, action_space=space, eps_training=0.1, eps_inference=0.0)
    optim = AdamOptimizerFactory(lr=3e-4)
    return DQN(policy=policy, optim=optim, gamma=0.99, n_step_return_horizon=3, target_update_freq=500)


def play(seed: int, buffer: Callable[..., ReplayBuffer]) -> Iterable[Point]:
    """Yields the mean return of greedy episodes against environment steps.

    Args:
        seed: Of the network, the environments and the draws.
        buffer: Makes one; called with `random_seed`.
    """
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - Tianshou explores by it
    dqn = _dqn()
    collector = Collector[Any](dqn, _environments(ENVS, 1_000 * seed), buffer(random_seed=seed), exploration_noise=True)
    judge = Collector[Any](dqn, _environments(EPISODES, 10_000 + 1_000 * seed))
    collector.reset()
    collector.collect(n_step=LEARNING_STARTS, random=True)
    trainer = dqn.create_trainer(
        OffPolicyTrainerParams(
            training_collector=collector,
            test_collector=judge,
            max_epochs=EVALUATIONS,
            epoch_num_steps=STEPS // EVALUATIONS,
            collection_step_num_env_steps=ENVS,
            test_step_num_episodes=EPISODES,
            update_step_num_gradient_steps_per_sample=0.5,
            batch_size=64,
            show_progress=False,
            verbose=False,
        )
    )
    trainer.reset()
    seconds = 0.0
    for epoch in range(1, EVALUATIONS + 1):
        start = time.perf_counter()
        judged = trainer.execute_epoch().test_collect_stat
        assert judged is not None  # of a trainer with a test collector
        seconds += time.perf_counter() - start - judged.collect_time
        yield Point(epoch * STEPS / EVALUATIONS, float(judged.returns.mean()), seconds)


TIANSHOU = Question(
    "tianshou",
    "The same agent with Tianshou's buffers and with torchreplay's",
    "environment steps",
    f"mean return of {EPISODES} greedy episodes",
    {
        f"DQN {ENV}": {
            variant: partial(play, buffer=partial(kind, CAPACITY, ENVS, **settings))
            for variant, kind, settings in (
                ("Tianshou, uniform", TianshouUniform, {}),
                ("torchreplay, uniform", SharedVectorReplayBuffer, {}),
                ("Tianshou, prioritized", TianshouPrioritized, PRIORITIZED),
                ("torchreplay, prioritized", PrioritizedVectorReplayBuffer, PRIORITIZED),
            )
        }
    },
)
