"""Stable-Baselines3's DQN on CartPole-v1, with prioritized replay and explorers in other processes.

The model plays and learns as it always does. Explorer processes write into the memory of its replay buffer meanwhile:
`model.replay_buffer.shared` goes to them as an argument. They play with the model's newest weights.

    python examples/sb3.py --seed 1
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from torch import nn

import torchreplay as tr
from torchreplay.compat.sb3 import PrioritizedDQN


@dataclass
class Args:
    """Stable-Baselines3's DQN on CartPole-v1, with explorers in other processes."""

    seed: int = 0
    """seed of the model, the explorers and the evaluations"""
    total_steps: int = 30_000
    """steps that the model plays at most; the run ends earlier once it is solved"""
    eval_every: int = 1_000
    """steps of the model between two evaluations"""
    eval_episodes: int = 10
    """greedy episodes in an evaluation"""
    solved_at: float = 475.0
    """mean return of an evaluation that ends the run"""
    tensorboard: bool = True
    """whether to write curves to runs/sb3-seed<seed>"""

    num_explorers: int = 2
    """explorer processes"""
    epsilon: float = 0.1
    """share of random actions that explorers take"""
    publish_every: int = 64
    """steps of the model between two publications of its weights"""

    buffer_size: int = 100_000
    """transitions that the buffer holds"""
    n_steps: int = 3
    """steps of the returns"""
    gamma: float = 0.99
    """discount of one step"""
    learning_starts: int = 500
    """steps of the model before it begins to learn"""
    min_items: int = 2_000
    """transitions to wait for before the first update, those of the explorers included"""
    train_freq: int = 16
    """steps of the model between two bouts of learning"""
    gradient_steps: int = 8
    """updates in a bout"""
    batch_size: int = 256
    """transitions in a batch"""
    learning_rate: float = 1e-3
    """of Adam"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


def explore(index: int, buffer: tr.ReplayBuffer, weights: tr.SharedWeights, q_net: nn.Module, args: Args) -> None:
    """Plays until the buffer is stopped; runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the model, which stops the buffer
    torch.set_num_threads(1)
    rng = np.random.default_rng([args.seed, index])
    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=int(rng.integers(2**31)))
    with contextlib.suppress(tr.Stopped), torch.no_grad(), buffer.writer() as writer:
        writer.reset(obs=obs)
        while not buffer.stopped:
            weights.pull(q_net)  # one atomic read when there is nothing newer
            greedy = int(q_net(torch.from_numpy(obs)[None]).argmax())
            action = int(rng.integers(2)) if rng.random() < args.epsilon else greedy
            obs, reward, terminated, truncated, _ = env.step(action)
            reward = (1 - args.gamma) * reward
            writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
            if terminated or truncated:
                obs, _ = env.reset()
                writer.reset(obs=obs)


class PublishAndEvaluate(BaseCallback):
    """Publishes the model's weights, logs how the buffer is doing, and prints what the greedy policy reaches."""

    def __init__(self, weights: tr.SharedWeights, args: Args) -> None:
        super().__init__()
        self._weights, self._args = weights, args
        self._env = Monitor(gym.make("CartPole-v1"))
        self._env.reset(seed=args.seed)
        self._start = time.perf_counter()

    def _on_training_start(self) -> None:
        self._monitor = tr.Monitor(self.model.replay_buffer.shared, self._log)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.logger.record(name, value)
        self.logger.dump(step)

    def _on_step(self) -> bool:
        """Returns whether to go on."""
        self._monitor.step(self.num_timesteps)
        if self.num_timesteps % self._args.publish_every == 0:
            self._weights.publish(self.model.q_net)
        return self.num_timesteps % self._args.eval_every != 0 or self._evaluate() < self._args.solved_at

    def _evaluate(self) -> float:
        mean_return = float(evaluate_policy(self.model, self._env, self._args.eval_episodes)[0])
        line = {
            "step": self.num_timesteps,
            "mean_return": round(mean_return, 2),
            "rows": self.model.replay_buffer.shared.next_key,
            "seconds": round(time.perf_counter() - self._start, 1),
            "solved": mean_return >= self._args.solved_at,
        }
        print(json.dumps(line), flush=True)
        self._log({"charts/mean_return": mean_return}, self.num_timesteps)
        return mean_return


def main(args: Args) -> None:
    """Learns CartPole."""
    torch.set_num_threads(1)  # the network is small, and the explorers want the other cores
    # Scaled by 1 - gamma, returns lie in [0, 1].
    env = gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: (1 - args.gamma) * reward)
    names = ("seed", "buffer_size", "n_steps", "gamma", "learning_starts", "train_freq", "gradient_steps", "batch_size")
    model = PrioritizedDQN(
        "MlpPolicy",
        env,
        learning_rate=args.learning_rate,
        target_update_interval=100,
        exploration_fraction=0.1,
        policy_kwargs={"net_arch": [128, 128]},
        device="cpu",
        **{name: getattr(args, name) for name in names},
    )
    if args.tensorboard:
        model.set_logger(configure(f"runs/sb3-seed{args.seed}", ["tensorboard"]))
    buffer, weights = model.replay_buffer.shared, tr.SharedWeights(model.q_net)
    buffer.limiter = tr.MinSize(args.min_items)
    context = multiprocessing.get_context("spawn")
    explorers = [
        context.Process(target=explore, args=(index, buffer, weights, copy.deepcopy(model.q_net), args), daemon=True)
        for index in range(args.num_explorers)
    ]
    for explorer in explorers:
        explorer.start()
    try:
        model.learn(args.total_steps, callback=PublishAndEvaluate(weights, args))
    finally:
        buffer.stop()
        for explorer in explorers:
            explorer.join()


if __name__ == "__main__":
    main(tyro.cli(Args))
