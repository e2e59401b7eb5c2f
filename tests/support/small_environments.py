"""Environments of a few steps: nested observations, goals, and one that fails on request."""

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array


class Rich(gymnasium.Env):
    """Every kind of space, nested; episodes of 1 to 8 steps, the even ones terminated, the odd ones truncated."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (3, 2), np.uint8),
        deep=spaces.Tuple((spaces.Discrete(50), spaces.Box(-9, 9, (2,), np.float64))),
        bits=spaces.MultiBinary(2),
    )
    action_space = spaces.Dict(go=spaces.Discrete(3), turn=spaces.Box(-1, 1, (2,)))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.length = 0, int(self.np_random.integers(1, 9))
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        over, even = self.steps == self.length, self.length % 2 == 0
        return self._observation(), float(self.np_random.normal()), over and even, over and not even, {}

    def _observation(self):
        return {
            "image": self.np_random.integers(0, 256, (3, 2)).astype(np.uint8),
            "deep": (np.int64(self.steps), self.np_random.uniform(-9, 9, 2)),
            "bits": self.np_random.integers(0, 2, 2).astype(np.int8),
        }


class Goal(gymnasium.Env):
    """Walks up a line towards a goal, in observations of the form that goal-conditioned environments have."""

    observation_space = spaces.Dict(
        observation=spaces.Box(-9, 9, (3,)), achieved_goal=spaces.Box(-9, 9, (2,)), desired_goal=spaces.Box(-9, 9, (2,))
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.goal = 0, np.array([self.np_random.integers(1, 9), 0], np.float32)
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        reached = bool(self.steps == self.goal[0])
        return self._observation(), float(reached) - 1, reached, self.steps >= 6 and not reached, {}

    def _observation(self):
        achieved = np.array([self.steps, 0], np.float32)
        noise = self.np_random.uniform(-9, 9, 3).astype(np.float32)
        return {"observation": noise, "achieved_goal": achieved, "desired_goal": self.goal}


class Scripted(gymnasium.Env):
    """Gives what it was made with at step 2 of each episode of 3 steps, and a good observation before and after."""

    action_space = spaces.Discrete(2)

    def __init__(self, obs=None, reward=1.0, space=None):
        self.observation_space = spaces.Box(-1e30, 1e30, (), np.float64) if space is None else space
        self.at_two = np.array(0.5) if obs is None else obs, reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._like(0), {}

    def step(self, action):
        self.steps += 1
        obs, reward = self.at_two if self.steps == 2 else (self._like(self.steps), 0.0)
        return obs, reward, self.steps == 3, False, {}

    def _like(self, number):
        return np.full(self.observation_space.shape, number, self.observation_space.dtype)


class FinalArrays(gymnasium.vector.VectorWrapper):
    """Gives last observations as it gives the others, for all lanes together, as environments written in arrays do."""

    def step(self, actions):
        *given, infos = self.env.step(actions)
        if "final_obs" in infos:
            ended = next(obs for obs in infos["final_obs"] if obs is not None)
            each = [ended if obs is None else obs for obs in infos["final_obs"]]
            space = self.single_observation_space
            infos["final_obs"] = concatenate(space, each, create_empty_array(space, self.num_envs))
        return *given, infos


class Spoken(gymnasium.Env):
    """Observations and actions of any length: texts, sequences, graphs; random in each step."""

    observation_space = spaces.Dict(
        says=spaces.Text(20),
        seen=spaces.Sequence(spaces.Box(-1, 1, (2,))),
        stacked=spaces.Sequence(spaces.Discrete(9), stack=True),
        graph=spaces.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(4)),
        place=spaces.Box(-100, 100, (2,)),
    )
    action_space = spaces.Text(6)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps, self.length = 0, int(self.np_random.integers(3, 7))
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        over, good = self.steps == self.length, self.length % 2 == 0
        return self.observation_space.sample(), float(self.np_random.normal()), over and good, over and not good, {}
