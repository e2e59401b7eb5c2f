"""`compat.sb3`: what is drawn from buffers beside Stable-Baselines3's own, step by step."""

import numpy as np
import pytest
import torch
from played_steps import BOX, DICT, DISCRETE, TORQUE
from sb3_buffers import SPACES, everything_of, filled, flat, known_by_reward, own_class, step_of
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecNormalize

from torchreplay.compat.sb3 import (
    SharedNStepReplayBuffer,
    SharedReplayBuffer,
)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(("observation", "action"), SPACES)
@pytest.mark.parametrize("handle", [True, False])
def test_what_is_drawn_is_what_the_peer_holds(observation, action, n_envs, handle):
    set_random_seed(0)
    arguments = {"n_envs": n_envs, "handle_timeout_termination": handle, "device": "cpu"}
    theirs = own_class(observation)(20 * n_envs, observation, action, **arguments)
    ours = SharedReplayBuffer(20 * n_envs, observation, action, **arguments)
    filled(theirs, ours, count=31)
    expected, drawn = everything_of(theirs), known_by_reward(ours.sample(2000))
    assert len(expected) == 20 * n_envs
    assert drawn == expected
    assert ours.size() == theirs.size()
    assert (ours.pos, ours.full) == (theirs.pos, theirs.full)


@pytest.mark.parametrize(("observation", "action"), SPACES)
def test_samples_have_the_types_shapes_and_dtypes_of_the_peer(observation, action):
    theirs = own_class(observation)(20, observation, action, device="cpu")
    ours = SharedReplayBuffer(20, observation, action, device="cpu")
    filled(theirs, ours, count=9)
    theirs, ours = theirs.sample(7), ours.sample(7)
    assert type(ours) is type(theirs)
    assert type(ours) in (ReplayBufferSamples, DictReplayBufferSamples)
    for value, other in zip(ours, theirs, strict=True):
        for tensor, peer in zip(flat(value).values(), flat(other).values(), strict=True):
            assert tensor is peer is None or (tensor.shape, tensor.dtype) == (peer.shape, peer.dtype)


@pytest.mark.parametrize("observation", [BOX, DICT, DISCRETE])
def test_observations_stored_once_come_back_as_those_stored_twice(observation):
    both = SharedReplayBuffer(300, observation, DISCRETE, n_envs=3, device="cpu")
    once = SharedReplayBuffer(300, observation, DISCRETE, n_envs=3, device="cpu", optimize_memory_usage=True)
    filled(both, once, count=50)
    assert known_by_reward(once.sample(3000)) == known_by_reward(both.sample(3000))
    assert "next_obs" not in once.shared.spec


@pytest.mark.parametrize("n_steps", [2, 3, 5])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_n_step_returns_are_those_of_the_peer(n_envs, n_steps):
    arguments = {"n_envs": n_envs, "n_steps": n_steps, "gamma": 0.9, "device": "cpu"}
    theirs = NStepReplayBuffer(90 * n_envs, BOX, DISCRETE, **arguments)
    ours = SharedNStepReplayBuffer(90 * n_envs, BOX, DISCRETE, **arguments)
    filled(theirs, ours, count=40)
    batch = ours.sample(3000)
    expected = theirs._get_samples(np.repeat(np.arange(theirs.size()), 60))
    of_start = {tuple(obs.tolist()): i for i, obs in enumerate(expected.observations)}
    found = torch.tensor([of_start[tuple(obs.tolist())] for obs in batch.observations])
    assert len(found.unique()) > 36 * n_envs
    assert torch.allclose(batch.rewards, expected.rewards[found])
    assert torch.equal(batch.dones, expected.dones[found])
    assert torch.equal(batch.actions, expected.actions[found])
    assert torch.equal(batch.next_observations, expected.next_observations[found])
    goes_on = 1 - batch.dones
    assert torch.allclose(batch.discounts * goes_on, expected.discounts[found] * goes_on)


def test_an_n_step_buffer_of_dicts_is_no_error():
    buffer = filled(SharedNStepReplayBuffer(60, DICT, DISCRETE, device="cpu", n_steps=2), count=20)
    batch = buffer.sample(8)
    assert isinstance(batch, DictReplayBufferSamples)
    assert batch.discounts.shape == (8, 1)


def test_no_return_spans_an_episode_that_was_broken_off():
    buffer = SharedNStepReplayBuffer(50, BOX, DISCRETE, device="cpu", n_steps=3, gamma=1.0)
    for t in range(4):
        buffer.add(*step_of(t, t + 1))
    for t in range(10, 14):  # env.reset() in mid-episode
        buffer.add(*step_of(t, t + 1))
    batch = buffer.sample(200)
    reached = {(int(o[0]), int(n[0])) for o, n in zip(batch.observations, batch.next_observations, strict=True)}
    assert reached == {(0, 3), (1, 4), (2, 4), (3, 4), (10, 13), (11, 14)}
    assert not batch.dones.any()


def test_a_time_limit_without_done_ends_an_n_step_return_as_in_the_peer():
    buffer = SharedNStepReplayBuffer(50, BOX, DISCRETE, device="cpu", n_steps=3, gamma=1.0)
    buffer.add(*step_of(0, 1, **{"TimeLimit.truncated": True}))
    buffer.add(*step_of(1, 2, done=True))
    batch = buffer.sample(64)
    ends = {(int(o[0]), int(n[0]), float(d)) for o, n, d in zip(*batch[:1], batch[2], batch.dones, strict=True)}
    assert ends == {(0, 1, 0.0), (1, 2, 1.0)}


def test_an_episode_may_begin_where_another_one_ended():
    buffer = SharedReplayBuffer(50, BOX, DISCRETE, device="cpu", optimize_memory_usage=True)
    buffer.add(*step_of(0, 1, done=True))
    buffer.add(*step_of(1, 2, reward=2.0))
    assert sorted(known_by_reward(buffer.sample(64))) == sorted(np.float32(r).tobytes() for r in (1, 2))


def test_values_of_other_shapes_are_taken_as_the_peer_takes_them():
    theirs, ours = (kind(50, DISCRETE, DISCRETE, device="cpu") for kind in (ReplayBuffer, SharedReplayBuffer))
    once = SharedReplayBuffer(50, DISCRETE, DISCRETE, device="cpu", n_steps=2)
    for buffer in (theirs, ours, once):
        for t in range(3):
            buffer.add(np.array([[t]]), np.array([[t + 1]]), np.array([[1]]), t + 1.0, np.array([0.0]), [{}])
    assert known_by_reward(ours.sample(64)) == everything_of(theirs)
    assert once.sample(64).rewards.unique().tolist() == pytest.approx([1 + 0.99 * 2, 2 + 0.99 * 3])


# VecNormalize


def normalizer(clip_reward=10.0):
    env = VecNormalize(make_vec_env("Pendulum-v1"), clip_reward=clip_reward)
    env.obs_rms.mean, env.obs_rms.var = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])
    env.ret_rms.var = np.array(7.0)
    return env


@pytest.mark.parametrize("n_steps", [1, 3])
def test_samples_are_normalised_as_the_peer_normalises_them(n_steps):
    env = normalizer()
    kinds = (NStepReplayBuffer, SharedNStepReplayBuffer) if n_steps > 1 else (ReplayBuffer, SharedReplayBuffer)
    more = {"n_steps": n_steps} if n_steps > 1 else {}
    theirs, ours = filled(*(kind(30, BOX, TORQUE, device="cpu", **more) for kind in kinds), count=9)
    batch, expected = ours.sample(200, env), theirs._get_samples(np.arange(9), env)
    of_start = {tuple(obs.tolist()): i for i, obs in enumerate(expected.observations)}
    found = [of_start[tuple(obs.tolist())] for obs in batch.observations]
    for name in ("next_observations", "rewards"):
        assert getattr(batch, name).dtype == torch.float32
        assert torch.allclose(getattr(batch, name), getattr(expected, name)[found])


def test_a_normalised_return_is_clipped_where_as_many_clipped_rewards_would_end():
    env = normalizer(clip_reward=0.5)
    buffer = SharedNStepReplayBuffer(30, BOX, DISCRETE, device="cpu", n_steps=3, gamma=0.5)
    for t in range(3):
        buffer.add(*step_of(t, t + 1, reward=1e6))
    assert buffer.sample(4, env).rewards.ravel().tolist() == [0.5 + 0.25 + 0.125] * 4
