"""Steps as Stable-Baselines3's learners hand them to a buffer: random, and each known by its reward."""

import numpy as np
from gymnasium import spaces

BOX = spaces.Box(-5, 5, (3,), np.float32)
DISCRETE = spaces.Discrete(4)
MANY = spaces.MultiDiscrete([3, 9])
IMAGE = spaces.Box(0, 255, (1, 6, 6), np.uint8)
DICT = spaces.Dict(vector=BOX, picture=IMAGE, number=DISCRETE)
TORQUE = spaces.Box(-1, 1, (2,), np.float64)


def draw(space, n_envs, rng):
    if isinstance(space, spaces.Dict):
        return {name: draw(part, n_envs, rng) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Box) and space.dtype != np.uint8:
        return rng.uniform(-1, 1, (n_envs, *space.shape)).astype(space.dtype)
    bound = getattr(space, "n", getattr(space, "nvec", 3))
    return rng.integers(0, bound, (n_envs, *space.shape)).astype(space.dtype)


def choose(chosen, new, old):
    """`new` for the chosen environments, `old` for the others."""
    if isinstance(new, dict):
        return {name: choose(chosen, new[name], old[name]) for name in new}
    return np.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def steps(observation_space, action_space, n_envs, count, seed=0, ends=0.2):
    """Yields `count` times the arguments of `add`; rewards are 1, 2, 3, ... in the order of the rows."""
    rng = np.random.default_rng(seed)
    obs = draw(observation_space, n_envs, rng)
    for t in range(count):
        next_obs, first = draw(observation_space, n_envs, rng), draw(observation_space, n_envs, rng)
        done = rng.random(n_envs) < ends
        cut = done & (rng.random(n_envs) < 0.5)
        reward = np.arange(1, n_envs + 1, dtype=np.float32) + t * n_envs
        infos = [{"TimeLimit.truncated": bool(c)} for c in cut]
        yield obs, next_obs, draw(action_space, n_envs, rng), reward, done, infos
        obs = choose(done, first, next_obs)
