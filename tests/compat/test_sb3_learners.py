"""`compat.sb3`: priorities, and Stable-Baselines3's learners with them."""

import io
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from played_steps import BOX, DISCRETE
from sb3_buffers import filled
from stable_baselines3 import DDPG, DQN, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import VecNormalize

from torchreplay.compat.sb3 import (
    PrioritizedDQN,
    PrioritizedReplayBuffer,
    PrioritizedSAC,
    PrioritizedTD3,
    SharedHerReplayBuffer,
    SharedReplayBuffer,
)

# Priorities


def test_a_prioritized_sample_has_weights_and_keys_in_columns():
    buffer = filled(PrioritizedReplayBuffer(30, BOX, DISCRETE, n_envs=2, device="cpu"), count=9)
    batch = buffer.sample(7)
    assert batch.weights.shape == batch.rewards.shape == batch.dones.shape == (7, 1)
    assert batch.weights.dtype == torch.float32
    assert batch.keys.shape == (7,)


def test_large_td_errors_are_drawn_more_often_with_smaller_weights():
    buffer = filled(PrioritizedReplayBuffer(10, BOX, DISCRETE, device="cpu", alpha=1.0, beta=1.0), count=10)
    keys = buffer.shared.keys()
    buffer.update_priorities(keys, np.where(np.arange(10) == 3, 9.0, 1.0).reshape(-1, 1))
    batch = buffer.sample(1800)
    large = batch.rewards.ravel() == 4.0
    assert abs(int(large.sum()) - 900) <= 1  # draws are stratified
    assert batch.weights[large].unique().tolist() == pytest.approx([1 / 9])
    assert batch.weights[~large].unique().tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("errors", [[math.nan] * 4, [math.inf] * 4, [1.0] * 3])
def test_bad_td_errors_are_refused(errors):
    buffer = filled(PrioritizedReplayBuffer(10, BOX, DISCRETE, device="cpu"), count=10)
    with pytest.raises(ValueError):
        buffer.update_priorities(buffer.sample(4), torch.tensor(errors))
    with pytest.raises(ValueError):
        buffer.update_priorities(np.array([99]), [1.0])


# Learners


def parameters(model):
    return torch.cat([p.detach().ravel() for p in model.policy.parameters()])


def learner(kind, env, **how):
    policy = {"net_arch": [16]}
    more = {"batch_size": 16, "learning_starts": 20, "buffer_size": 200, "seed": 3, "device": "cpu"}
    return kind("MlpPolicy", env, policy_kwargs=policy, **(more | how))


LEARNERS = [
    (DQN, PrioritizedDQN, "CartPole-v1"),
    (SAC, PrioritizedSAC, "Pendulum-v1"),
    (TD3, PrioritizedTD3, "Pendulum-v1"),
]


@pytest.mark.parametrize(("theirs", "ours", "env"), LEARNERS)
def test_with_equal_weights_an_update_is_that_of_the_peer(theirs, ours, env):
    models = [learner(kind, env) for kind in (theirs, ours)]
    buffer = PrioritizedReplayBuffer(64, models[0].observation_space, models[0].action_space, device="cpu", alpha=0.0)
    filled(buffer, count=40)
    batches = [buffer.sample(16) for _ in range(4)]
    fed_back = []
    for model in models:
        drawn = iter(batches)
        model.replay_buffer = SimpleNamespace(
            sample=lambda *_, drawn=drawn, **__: next(drawn), update_priorities=lambda b, td: fed_back.append((b, td))
        )
        model._setup_learn(10)
        torch.manual_seed(0)
        model.train(gradient_steps=4, batch_size=16)
    assert torch.allclose(parameters(models[0]), parameters(models[1]), atol=1e-6)
    assert not torch.equal(parameters(models[0]), parameters(learner(theirs, env)))
    assert [b for b, _ in fed_back] == batches
    logs = [model.logger.name_to_value for model in models]
    assert logs[0].keys() == logs[1].keys()
    for name, value in logs[0].items():
        assert name.startswith("time") or logs[1][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_a_sample_of_weight_0_teaches_nothing():
    model = learner(PrioritizedDQN, "CartPole-v1")
    buffer = filled(PrioritizedReplayBuffer(64, model.observation_space, model.action_space, device="cpu"), count=40)
    batch = buffer.sample(16)
    model.replay_buffer = SimpleNamespace(
        sample=lambda *_, **__: batch._replace(weights=torch.zeros(16, 1)), update_priorities=lambda *_: None
    )
    model._setup_learn(10)
    before = parameters(model)
    model.train(gradient_steps=2, batch_size=16)
    assert torch.equal(parameters(model), before)


@pytest.mark.parametrize(("kind", "env"), [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (DDPG, "Pendulum-v1")])
@pytest.mark.parametrize("how", [{}, {"optimize_memory_usage": True}])
def test_a_learner_learns_saves_loads_and_learns_on(kind, env, how):
    model = learner(kind, env, replay_buffer_class=SharedReplayBuffer, train_freq=2, **how)
    model.learn(40)
    file = io.BytesIO()
    model.save_replay_buffer(file)
    file.seek(0)
    size = model.replay_buffer.size()
    model.load_replay_buffer(file)
    assert model.replay_buffer.size() == size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peer warns that it truncates the last trajectory
        model.learn(20)
    assert model.replay_buffer.size() == 60


@pytest.mark.parametrize(("kind", "env"), [row[1:] for row in LEARNERS])
def test_a_prioritized_learner_learns_saves_and_loads_itself(kind, env, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = learner(kind, VecNormalize(make_vec_env(env, n_envs=2, seed=0)), n_steps=3, gamma=0.9)
    assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == (3, 0.9)
    model.learn(60)
    shared = model.replay_buffer.shared
    assert len(shared.priorities(shared.keys()).unique()) > 5
    model.save(tmp_path / "model")
    loaded = kind.load(tmp_path / "model", env=model.get_env())
    assert torch.equal(parameters(loaded), parameters(model))
    assert loaded.replay_buffer.n_steps == 3
    loaded.learn(30)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_model_that_the_peer_saved_learns_on_with_prioritized_replay(n_steps, tmp_path):
    theirs = DQN("MlpPolicy", "CartPole-v1", learning_starts=20, n_steps=n_steps, gamma=0.9, seed=1).learn(40)
    theirs.save(tmp_path / "model.zip")
    ours = PrioritizedDQN.load(tmp_path / "model.zip", env=theirs.get_env())
    assert type(ours.replay_buffer) is PrioritizedReplayBuffer
    for name, value in theirs.policy.state_dict().items():
        torch.testing.assert_close(ours.policy.state_dict()[name], value)
    assert ours.replay_buffer_kwargs == {"n_steps": n_steps, "gamma": 0.9}
    ours.learn(40)
    assert ours.replay_buffer.shared.stats().updated > 0
    ours.save(tmp_path / "ours.zip")
    assert "_is_loaded" not in vars(PrioritizedDQN.load(tmp_path / "ours.zip", env=theirs.get_env()))


def test_experience_that_the_peer_saved_is_refused_and_the_model_learns_on(tmp_path):
    theirs = DQN("MlpPolicy", "CartPole-v1", learning_starts=20, seed=1).learn(40)
    theirs.save_replay_buffer(tmp_path / "buffer.pkl")
    ours = PrioritizedDQN("MlpPolicy", "CartPole-v1", learning_starts=20, seed=1).learn(40)
    own = ours.replay_buffer
    with pytest.raises(TypeError, match="holds a ReplayBuffer, which takes no TD errors"):
        ours.load_replay_buffer(tmp_path / "buffer.pkl")
    assert ours.replay_buffer is own
    ours.save_replay_buffer(tmp_path / "own.pkl")
    ours.load_replay_buffer(tmp_path / "own.pkl")
    assert ours.replay_buffer.size() == own.size()
    ours.learn(10)


def test_learners_with_the_same_seed_learn_the_same():
    runs = [learner(PrioritizedDQN, "CartPole-v1").learn(60) for _ in range(2)]
    assert torch.equal(*map(parameters, runs))


def test_hindsight_teaches_a_learner_of_several_environments():
    env = make_vec_env(lambda: BitFlippingEnv(n_bits=3, continuous=True), n_envs=2)
    model = SAC("MultiInputPolicy", env, replay_buffer_class=SharedHerReplayBuffer, learning_starts=20, device="cpu")
    model.learn(30)
    assert model.replay_buffer.size() > 5


def test_prioritized_learners_refuse_buffers_that_cannot_be_fed_back_to():
    with pytest.raises(TypeError, match="PrioritizedReplayBuffer"):
        learner(PrioritizedDQN, "CartPole-v1", replay_buffer_class=SharedReplayBuffer)
