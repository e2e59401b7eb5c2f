"""Stable-Baselines3's DQN on CartPole and SAC on Pendulum, with its own buffer and with torchreplay's: learning curves.

python -m benchmarks.sb3_curves --seeds 5 --csv build/sb3_curves.csv --png build/sb3_curves.png
"""

import argparse
import csv
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

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
PENDULUM: dict[str, Any] = {"learning_rate": 1e-3, "learning_starts": 1_000, "buffer_size": 100_000}


class Task(NamedTuple):
    """An environment, its learners by the name of their buffer, and what they are made with."""

    env: str
    learners: dict[str, Callable[..., OffPolicyAlgorithm]]
    settings: dict[str, Any]
    total_steps: int


class Point(NamedTuple):
    """An evaluation: a line of the CSV file."""

    env: str
    buffer: str
    seed: int
    step: int
    mean_return: float
    seconds: float


def _shared(kind: Callable[..., OffPolicyAlgorithm]) -> Callable[..., OffPolicyAlgorithm]:
    return lambda *args, **settings: kind(*args, replay_buffer_class=SharedReplayBuffer, **settings)


TASKS = (
    Task("CartPole-v1", {"own": DQN, "shared": _shared(DQN), "prioritized": PrioritizedDQN}, CARTPOLE, 50_000),
    Task("Pendulum-v1", {"own": SAC, "shared": _shared(SAC), "prioritized": PrioritizedSAC}, PENDULUM, 8_000),
)


class _Evaluations(BaseCallback):
    def __init__(self, task: Task, buffer: str, seed: int, every: int) -> None:
        super().__init__()
        self._task, self._buffer, self._seed, self._every = task, buffer, seed, every
        self._env = make_vec_env(task.env, seed=10_000 + seed)
        self._seconds, self._since = 0.0, time.perf_counter()
        self.points: list[Point] = []

    def _on_step(self) -> bool:
        if self.num_timesteps % self._every == 0:
            self._seconds += time.perf_counter() - self._since
            score, _ = evaluate_policy(self.model, self._env, EPISODES)
            where = (self._task.env, self._buffer, self._seed, self.num_timesteps)
            self.points.append(Point(*where, round(float(np.mean(score)), 2), round(self._seconds, 2)))
            print(*self.points[-1], sep=",", flush=True)
            self._since = time.perf_counter()
        return True


def curves(tasks: Sequence[Task], seeds: int, share: float, evaluations: int) -> Iterator[Point]:
    """Yields the evaluations of every learner; those with the same seed follow each other."""
    torch.set_num_threads(1)
    for task in tasks:
        steps = round(task.total_steps * share)
        for seed in range(seeds):
            for buffer, learner in task.learners.items():
                model = learner("MlpPolicy", task.env, seed=seed, device="cpu", **task.settings)
                callback = _Evaluations(task, buffer, seed, steps // evaluations)
                model.learn(steps, callback=callback)
                yield from callback.points


def draw(points: Sequence[Point], path: Path) -> None:
    """Draws the mean return over the seeds, and the range of all seeds."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    envs = sorted({point.env for point in points})
    figure, axes = pyplot.subplots(1, len(envs), figsize=(5 * len(envs), 3.5), squeeze=False, layout="constrained")
    for axis, env in zip(axes[0], envs, strict=True):
        for buffer in dict.fromkeys(point.buffer for point in points):
            chosen = [point for point in points if (point.env, point.buffer) == (env, buffer)]
            steps = sorted({point.step for point in chosen})
            scores = [[point.mean_return for point in chosen if point.step == step] for step in steps]
            axis.plot(steps, [np.mean(score) for score in scores], label=buffer)
            axis.fill_between(steps, [min(score) for score in scores], [max(score) for score in scores], alpha=0.15)
        axis.set(title=env, xlabel="environment steps", ylabel=f"mean return of {EPISODES} episodes")
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs the learners and writes both files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sb3_curves", description=__doc__)
    parser.add_argument("--env", choices=[task.env for task in TASKS], help="one of the two; else both")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps that a run usually takes")
    parser.add_argument("--evaluations", type=int, default=20, help="of a run")
    parser.add_argument("--csv", type=Path, default=Path("build/sb3_curves.csv"))
    parser.add_argument("--png", type=Path, default=Path("build/sb3_curves.png"))
    options = parser.parse_args()
    tasks = [task for task in TASKS if options.env in (None, task.env)]
    points = list(curves(tasks, options.seeds, options.share, options.evaluations))
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        csv.writer(file).writerows([Point._fields, *points])
    draw(points, options.png)


if __name__ == "__main__":
    main()
