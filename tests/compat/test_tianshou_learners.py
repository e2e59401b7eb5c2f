"""Tianshou's learners with buffers of `compat.tianshou`, through its off-policy trainer."""

import gymnasium
import numpy as np
import pytest
import torch
from tianshou.algorithm import DQN, SAC, TD3
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.sac import SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorDeterministic, ContinuousActorProbabilistic, ContinuousCritic

from torchreplay.compat.tianshou import PrioritizedVectorReplayBuffer, SharedReplayBuffer, SharedVectorReplayBuffer

pytestmark = pytest.mark.slow
N = 8
"""Environments."""


def environments(name, n=N):
    return DummyVectorEnv([lambda: gymnasium.make(name) for _ in range(n)])


def trained(algorithm, envs, buffer, steps, updates=2, test_envs=None, stop=None):
    collector = Collector[object](algorithm, envs, buffer, exploration_noise=True)
    collector.reset()
    collector.collect(n_step=N * 64)
    test_collector = None if test_envs is None else Collector[object](algorithm, test_envs)
    return algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            test_collector=test_collector,
            max_epochs=steps // 2000,
            epoch_num_steps=2000,
            collection_step_num_env_steps=N,
            test_step_num_episodes=10,
            update_step_num_gradient_steps_per_sample=updates / N,
            batch_size=64,
            stop_fn=stop,
            show_progress=False,
            verbose=False,
        )
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n_step", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_dqn_learns_cartpole_with_prioritized_replay(n_step):
    """With the network and the values of Tianshou's own test of this environment: every seed reaches the score."""
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 - Tianshou explores by it
    envs, test_envs = environments("CartPole-v1"), environments("CartPole-v1", 10)
    envs.seed(1)
    test_envs.seed(2)
    space = gymnasium.make("CartPole-v1").action_space
    net = Net(state_shape=4, action_shape=2, hidden_sizes=[128, 128, 128])
    policy = DiscreteQLearningPolicy(model=net, action_space=space, eps_training=0.1, eps_inference=0.0)
    dqn = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=1e-3),
        gamma=0.9,
        n_step_return_horizon=n_step,
        target_update_freq=320,
    )
    buffer = PrioritizedVectorReplayBuffer(20_000, N, alpha=0.6, beta=0.4)
    result = trained(dqn, envs, buffer, 60_000, 1, test_envs, stop=lambda score: score >= 195)
    assert result.best_score >= 195  # a random policy gets about 20
    stats = buffer.replay.stats()
    assert stats.updated > 10_000
    assert stats.stale_updates == 0


def continuous(kind, buffer, n_step):
    envs = environments("Pendulum-v1")
    space = gymnasium.make("Pendulum-v1").action_space
    critic = ContinuousCritic(preprocess_net=Net(state_shape=3, action_shape=1, hidden_sizes=[32], concat=True))
    body = Net(state_shape=3, hidden_sizes=[32])
    optim = AdamOptimizerFactory(lr=1e-3)
    common = {"policy_optim": optim, "critic": critic, "critic_optim": optim, "n_step_return_horizon": n_step}
    if kind is TD3:
        actor = ContinuousActorDeterministic(preprocess_net=body, action_shape=1)
        policy = ContinuousDeterministicPolicy(actor=actor, action_space=space)
    else:
        policy = SACPolicy(actor=ContinuousActorProbabilistic(preprocess_net=body, action_shape=1), action_space=space)
    return trained(kind(policy=policy, **common), envs, buffer, 2000)


@pytest.mark.parametrize(
    ("kind", "n_step"),
    [
        (SAC, 1),
        (TD3, 4),
        pytest.param(SAC, 4, marks=pytest.mark.soak),
        pytest.param(TD3, 1, marks=pytest.mark.soak),
    ],
)
def test_sac_and_td3_learn_from_both_kinds_of_buffer(kind, n_step):
    prioritized = PrioritizedVectorReplayBuffer(2_000, N, alpha=0.6, beta=0.4)
    for buffer in (SharedVectorReplayBuffer(2_000, N), prioritized):
        result = continuous(kind, buffer, n_step)
        assert result.update_step == 250  # each after a step of all environments
        assert len(buffer) == 2_000
    assert prioritized.replay.stats().updated == 250 * 2 * 64


def test_collected_episodes_are_those_of_tianshous_own_buffer():
    """Whole episodes, of environments that leave as the number asked for is reached."""
    collected = []
    for buffer in (SharedVectorReplayBuffer(2_000, 3), None):
        envs = environments("CartPole-v1", 3)
        torch.manual_seed(0)
        space = gymnasium.make("CartPole-v1").action_space
        net = Net(state_shape=4, action_shape=2, hidden_sizes=[8])
        policy = DiscreteQLearningPolicy(model=net, action_space=space)
        collector = Collector[object](policy, envs, buffer)
        collector.reset(gym_reset_kwargs={"seed": 0})
        stats = collector.collect(n_episode=7)
        collected.append((stats.lens.tolist(), stats.returns.tolist(), np.sort(collector.buffer[:].obs, axis=0)))
    (lens, returns, obs), (their_lens, their_returns, their_obs) = collected
    assert lens == their_lens
    assert returns == their_returns
    assert np.array_equal(obs, their_obs)


def test_one_environment_needs_no_vector_buffer():
    envs = environments("CartPole-v1", 1)
    net = Net(state_shape=4, action_shape=2, hidden_sizes=[8])
    policy = DiscreteQLearningPolicy(model=net, action_space=gymnasium.make("CartPole-v1").action_space)
    collector = Collector[object](policy, envs, SharedReplayBuffer(100))
    collector.reset()
    collector.collect(n_step=150)
    batch, _ = collector.buffer.sample(32)
    assert np.allclose(batch.rew, 1)
    with pytest.raises(ValueError, match="Cannot use SharedReplayBuffer to collect from multiple envs"):
        Collector[object](policy, environments("CartPole-v1", 2), SharedReplayBuffer(100))
