"""Double DQN (van Hasselt et al. 2016, https://arxiv.org/abs/1509.06461) on CartPole-v1, for several questions."""

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchreplay as tr

FIELDS = {
    "obs": tr.Field((4,)),
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}
GAMMA = 0.99
EPISODES = 20
"""Greedy ones, in an evaluation."""
TARGET_EVERY = 50


def scaled(reward: float) -> float:
    """Returns a reward so that returns are within [0, 1], where the Huber loss is quadratic."""
    return (1 - GAMMA) * reward


def network() -> nn.Module:
    """Returns a Q network for CartPole's states, float32 `[..., 4]` to `[..., 2]`."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


class Learner:
    """Double DQN.

    Args:
        seed: Of the network.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.q, self._target = network(), network()
        self._target.load_state_dict(self.q.state_dict())
        self._optimizer = torch.optim.Adam(self.q.parameters(), lr=1e-3)
        self.steps = 0

    def learn(self, batch: tr.ReplayBatch) -> Tensor:
        """Does one update; returns the TD errors `[B]`."""
        with torch.no_grad():
            best = self.q(batch["next_obs"]).argmax(-1, keepdim=True)
            value = self._target(batch["next_obs"]).gather(-1, best).squeeze(-1)
            goal = batch["reward"] + batch["discount"] * value
        q = self.q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        loss = (batch["weight"] * F.huber_loss(q, goal, reduction="none")).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.steps += 1
        if self.steps % TARGET_EVERY == 0:
            self._target.load_state_dict(self.q.state_dict())
        errors: Tensor = goal - q.detach()
        return errors

    @torch.no_grad()
    def evaluate(self, seed: int) -> float:
        """Returns the mean return of greedy episodes."""
        envs = gym.make_vec("CartPole-v1", num_envs=EPISODES)
        obs, _ = envs.reset(seed=seed)
        returns, alive = np.zeros(EPISODES), np.ones(EPISODES, bool)
        while alive.any():
            obs, _, terminated, truncated, _ = envs.step(self.q(torch.from_numpy(obs)).argmax(-1).numpy())
            returns += alive
            alive &= ~(terminated | truncated)
        return float(returns.mean())
