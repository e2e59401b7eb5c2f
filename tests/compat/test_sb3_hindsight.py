"""`compat.sb3`: hindsight goals, for Stable-Baselines3's learners."""

import math
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from played_steps import DISCRETE
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from torchreplay.compat.sb3 import (
    SharedHerReplayBuffer,
)


class Corridor(BitFlippingEnv):
    """Goals are numbers on a line; the reward says whether they are the same."""

    def compute_reward(self, achieved, desired, infos):
        assert len(infos) == len(achieved)
        return -(np.asarray(achieved) != np.asarray(desired)).any(axis=-1).astype(np.float32)


PLACE = spaces.Box(-1, 99, (1,), np.float32)
GOALS = spaces.Dict(observation=PLACE, achieved_goal=PLACE, desired_goal=PLACE)


def hindsight(**how):
    env = DummyVecEnv([Corridor])
    return SharedHerReplayBuffer(200, GOALS, DISCRETE, env=env, device="cpu", **how)


def walk(buffer, start, count, ends=True):
    def at(t):
        return {name: np.full((1, 1), -1 if name == "desired_goal" else t, np.float32) for name in GOALS.spaces}

    for t in range(start, start + count):
        done = ends and t == start + count - 1
        info = {"TimeLimit.truncated": done}
        buffer.add(at(t), at(t + 1), np.array([0]), np.array([-1.0]), np.array([done]), [info])


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_another_goal_is_one_that_the_episode_reached(strategy):
    buffer = hindsight(goal_selection_strategy=strategy)
    walk(buffer, 0, 5)
    walk(buffer, 20, 5)
    batch = buffer.sample(4000)
    at, goal = batch.observations["observation"].ravel(), batch.observations["desired_goal"].ravel()
    assert torch.equal(goal, batch.next_observations["desired_goal"].ravel())
    first = at.div(20, rounding_mode="floor") * 20
    other = goal != -1
    low = {"future": at + 1, "final": first + 5, "episode": first}[strategy]
    assert ((goal >= low) & (goal <= first + 5))[other].all()
    assert torch.equal(batch.rewards.ravel(), torch.where(other & (goal == at + 1), 0.0, -1.0))
    assert not batch.dones.any()
    spread = math.sqrt(0.8 * 0.2 / 4000)
    assert abs(other.float().mean() - 0.8) < 4.9 * spread  # false alarm: 1e-6, two-sided


def test_hindsight_waits_for_the_end_of_an_episode_and_says_so():
    buffer = hindsight()
    walk(buffer, 0, 3, ends=False)
    with pytest.raises(RuntimeError, match="larger learning_starts"):
        buffer.sample(4)
    with pytest.warns(UserWarning, match="truncated"):
        buffer.truncate_last_trajectory()
    assert buffer.sample(4).rewards.shape == (4, 1)


def test_a_loaded_hindsight_buffer_needs_an_environment_and_takes_one():
    buffer = hindsight()
    walk(buffer, 0, 3)
    loaded = pickle.loads(pickle.dumps(buffer))
    with pytest.raises(AssertionError, match="set_env"):
        loaded.sample(64)
    loaded.set_env(buffer.env)
    assert loaded.sample(64).rewards.shape == (64, 1)
    with pytest.raises(ValueError, match="already"):
        loaded.set_env(buffer.env)


def test_infos_are_refused():
    with pytest.raises(NotImplementedError, match="copy_info_dict"):
        hindsight(copy_info_dict=True)
    with pytest.raises(NotImplementedError, match="one-step"):
        hindsight(n_steps=3)
    with pytest.raises(KeyError):
        hindsight(goal_selection_strategy="nearest")
