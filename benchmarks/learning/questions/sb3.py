"""The same agent and seeds with Stable-Baselines3's own buffer, with ours, and with prioritized replay."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from benchmarks.learning.cell import Point, Question
from torchreplay.compat.sb3 import PrioritizedDQN, PrioritizedSAC, SharedReplayBuffer

EPISODES = 10
"""Greedy episodes in an evaluation."""
CARTPOLE: dict[str, Any] = {  # settings that are known to solve it within 50,000 steps
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1_000,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}
LUNARLANDER: dict[str, Any] = {  # settings that are known to solve it within 100,000 steps; here they have half
    "learning_rate": 6.3e-4,
    "batch_size": 128,
    "buffer_size": 50_000,
    "learning_starts": 1_000,
    "target_update_interval": 250,
    "train_freq": 4,
    "gradient_steps": 4,
    "exploration_fraction": 0.24,
    "exploration_final_eps": 0.1,
    "policy_kwargs": {"net_arch": [256, 256]},
}
CONTROL: dict[str, Any] = {"learning_rate": 1e-3, "learning_starts": 1_000, "buffer_size": 100_000}

Learner = Callable[..., OffPolicyAlgorithm]


class _Evaluations(BaseCallback):
    """Evaluates the greedy policy now and then, outside the run's time."""

    def __init__(self, env: str, seed: int, every: int) -> None:
        super().__init__()
        self._every, self._env = every, make_vec_env(env, seed=10_000 + seed)
        self._seconds, self._since = 0.0, time.perf_counter()
        self.points: list[Point] = []

    def _on_step(self) -> bool:
        if self.num_timesteps % self._every == 0:
            self._seconds += time.perf_counter() - self._since
            score, _ = evaluate_policy(self.model, self._env, EPISODES)
            self.points.append(Point(self.num_timesteps, float(np.mean(score)), self._seconds))
            self._since = time.perf_counter()
        return True


def learn(
    seed: int, env: str, learner: Learner, steps: int, settings: dict[str, Any], evaluations: int = 20
) -> Iterable[Point]:
    """Returns the mean return of greedy episodes against environment steps, so many times in a run."""
    model = learner("MlpPolicy", env, seed=seed, device="cpu", **settings)
    judge = _Evaluations(env, seed, steps // evaluations)
    model.learn(steps, callback=judge)
    return judge.points


def _task(
    env: str, steps: int, settings: dict[str, Any], own: Learner, prioritized: Learner | None, evaluations: int = 20
) -> dict[str, Any]:
    shared = settings | {"replay_buffer_class": SharedReplayBuffer}
    run = partial(learn, env=env, steps=steps, evaluations=evaluations)
    variants = {
        "Stable-Baselines3's buffer": partial(run, learner=own, settings=settings),
        "torchreplay, uniform": partial(run, learner=own, settings=shared),
    }
    if prioritized is not None:
        variants["torchreplay, prioritized"] = partial(run, learner=prioritized, settings=settings)
    return variants


PEERS = Question(
    "peers",
    "The same agent with Stable-Baselines3's buffer and with torchreplay's",
    "environment steps",
    f"mean return of {EPISODES} greedy episodes",
    {
        "DQN CartPole-v1": _task("CartPole-v1", 50_000, CARTPOLE, DQN, PrioritizedDQN),
        "SAC Pendulum-v1": _task("Pendulum-v1", 8_000, CONTROL, SAC, PrioritizedSAC),
        "DQN LunarLander-v3": _task("LunarLander-v3", 50_000, LUNARLANDER, DQN, None, evaluations=10),
        "SAC Reacher-v5": _task("Reacher-v5", 8_000, CONTROL, SAC, None, evaluations=10),
    },
)
