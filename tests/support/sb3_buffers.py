"""Stable-Baselines3's buffers for tests: filled with the same steps as ours, and read row by row."""

import copy

import numpy as np
from gymnasium import spaces
from played_steps import BOX, DICT, DISCRETE, IMAGE, MANY, TORQUE, steps
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer

SPACES = [(BOX, DISCRETE), (BOX, TORQUE), (DISCRETE, MANY), (MANY, DISCRETE), (IMAGE, TORQUE), (DICT, DISCRETE)]


def filled(*buffers, count, seed=0, **how):
    """Gives the same steps to each of the buffers."""
    first = buffers[0]
    for step in steps(first.observation_space, first.action_space, first.n_envs, count, seed, **how):
        for buffer in buffers:
            buffer.add(*copy.deepcopy(step))
    return buffers if len(buffers) > 1 else first


def flat(values):
    return values if isinstance(values, dict) else {"": values}


def rows_of(samples):
    """Yields each sample as bytes, by the name of its part."""
    for i in range(len(samples.rewards)):
        row = {}
        for part, value in samples._asdict().items():
            if part in ("discounts", "weights", "keys") or value is None:
                continue
            row |= {part + name: tensor[i].numpy().tobytes() for name, tensor in flat(value).items()}
        yield row


def known_by_reward(samples):
    return {row["rewards"]: row for row in rows_of(samples)}


def everything_of(theirs):
    """What Stable-Baselines3's buffer holds: each position in each environment, which it draws at random."""
    return known_by_reward(theirs._get_samples(np.repeat(np.arange(theirs.size()), 60)))


def own_class(space):
    return DictReplayBuffer if isinstance(space, spaces.Dict) else ReplayBuffer


def step_of(obs, next_obs, reward=1.0, done=False, **info):
    """The arguments of `add` for one environment whose observations are single numbers."""
    values = (np.full((1, 3), obs, np.float32), np.full((1, 3), next_obs, np.float32))
    return *values, np.array([0]), np.array([reward], np.float32), np.array([done]), [info]
