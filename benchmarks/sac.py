"""Stable-Baselines3's SAC on LunarLanderContinuous-v3: ``python -m benchmarks.sac --seed N``, a process of its own.

The numbers are those of ``examples/sac_continuous.py``: networks, rates, 5-step returns, one learner step to four
environment steps. It prints one JSON object once 20 deterministic episodes in a row reach 200 on average, or when its
steps are over.
"""

import argparse
import json
import time

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

SOLVED, EPISODES = 200.0, 20
STEPS_PER_UPDATE, START_STEPS = 4, 4_000
EVAL_EVERY = 2_000
"""Learner steps."""
ENVIRONMENT = "LunarLanderContinuous-v3"


class Judge(BaseCallback):
    """Evaluates as often as the example, and ends the training."""

    def __init__(self) -> None:
        super().__init__()
        self._start = time.monotonic()
        self._env = Monitor(gym.make(ENVIRONMENT))
        self.mean_return, self.seconds = -np.inf, 0.0

    def _on_step(self) -> bool:
        self.seconds = time.monotonic() - self._start
        if self.n_calls % (EVAL_EVERY * STEPS_PER_UPDATE) == 0 and self.n_calls > START_STEPS:
            returns, _ = evaluate_policy(self.model, self._env, EPISODES)
            self.mean_return, self.seconds = float(np.mean(returns)), time.monotonic() - self._start
        return self.mean_return < SOLVED


def main() -> None:
    """Trains, and prints how long it took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sac", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=150_000, help="learner steps at most")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the example: beside other work, two threads that wait for each other are far slower
    judge = Judge()
    model = SAC(
        "MlpPolicy",
        gym.make(ENVIRONMENT),
        learning_rate=1e-3,
        learning_starts=START_STEPS,
        batch_size=128,
        tau=0.01,
        train_freq=STEPS_PER_UPDATE,
        n_steps=5,
        policy_kwargs={"net_arch": [128, 128]},
        seed=options.seed,
        device="cpu",
    )
    model.learn(START_STEPS + STEPS_PER_UPDATE * options.total_steps, judge)
    figures = {"seconds": judge.seconds, "mean_return": judge.mean_return, "rows": judge.n_calls}
    print(json.dumps(figures | {"step": model._n_updates}))


if __name__ == "__main__":
    main()
