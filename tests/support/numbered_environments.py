"""Environments whose observations say which environment, episode and step they are of, and a policy to match."""

import gymnasium
import numpy as np

LENGTHS = [[2, 5, 1, 3], [4, 1, 2], [3, 1, 1, 6]]
ACTIONS = 1000


class Numbered(gymnasium.Env):
    """Environment i: its episodes have the lengths of row i, and end by termination and by truncation in turns."""

    def __init__(self, number, nested=False):
        self.number = number
        self.nested = nested
        self.episode = -1
        self.t = 0
        where = gymnasium.spaces.Box(0, 1000, (3,), np.float32)
        inner = gymnasium.spaces.Dict({"step": gymnasium.spaces.Discrete(1000)})
        self.observation_space = gymnasium.spaces.Dict({"where": where, "inner": inner}) if nested else where
        self.action_space = gymnasium.spaces.Discrete(ACTIONS)

    def _observation(self):
        where = np.array([self.number, self.episode, self.t], np.float32)
        return {"where": where, "inner": {"step": self.t}} if self.nested else where

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.t = 0
        return self._observation(), {}

    def step(self, action):
        assert action == action_at(self.number, self.episode, self.t), "the action of another observation"
        self.t += 1
        ends = self.t == LENGTHS[self.number][self.episode % len(LENGTHS[self.number])]
        reward = reward_of(self.number, self.episode, self.t)
        return self._observation(), reward, ends and self.episode % 2 == 0, ends and self.episode % 2 == 1, {}


def action_at(number, episode, t):
    return int(number * 300 + episode * 10 + t) % ACTIONS


def reward_of(number, episode, t):
    return float(number + episode / 4 + t / 64)


def environments(kind, mode, nested=False):
    """A vector environment of three; `kind` is gymnasium.vector.SyncVectorEnv or AsyncVectorEnv."""
    makers = [lambda number=number: Numbered(number, nested) for number in range(3)]
    return kind(makers, autoreset_mode=mode)


def policy(where):
    """The action for each row of observations (number, episode, step)."""
    return np.array([action_at(*row) for row in np.asarray(where)])
