"""Double DQN (van Hasselt et al. 2016, https://arxiv.org/abs/1509.06461) on small tasks, for several questions."""

import math
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchreplay as tr

GAMMA = 0.99
TARGET_EVERY = 50
EPSILON = 0.1


@dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        env: Its name at Gymnasium.
        obs: Length of an observation.
        actions: How many there are.
        scale: Of rewards, so that returns are within [-1, 1], where the Huber loss is quadratic.
        episodes: Greedy ones, in an evaluation.
    """

    env: str
    obs: int
    actions: int
    scale: float
    episodes: int

    @property
    def fields(self) -> dict[str, tr.Field]:
        """What a buffer holds of it."""
        return {
            "obs": tr.Field((self.obs,)),
            "action": tr.Field((), torch.int64),
            "reward": tr.Field(),
            "terminated": tr.Field((), torch.bool),
            "truncated": tr.Field((), torch.bool),
        }

    def network(self) -> nn.Module:
        """Returns a Q network, float32 `[..., obs]` to `[..., actions]`."""
        return nn.Sequential(
            nn.Linear(self.obs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, self.actions)
        )


CARTPOLE = Task("CartPole-v1", 4, 2, 1 - GAMMA, episodes=20)
ACROBOT = Task("Acrobot-v1", 6, 3, 1 - GAMMA, episodes=5)


def act(policy: nn.Module, obs: np.ndarray, epsilon: float, rng: np.random.Generator) -> int:
    """Returns the best action, or with probability `epsilon` a random one."""
    q = policy(torch.from_numpy(obs))
    return int(rng.integers(q.shape[-1])) if rng.random() < epsilon else int(q.argmax())


class Learner(nn.Module):
    """Double DQN.

    Args:
        task: What it learns.
        seed: Of the network.

    Attributes:
        q: The network.
        steps: Updates so far.
    """

    def __init__(self, task: Task, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self._task = task
        self.q, self._target = task.network(), task.network()
        self._target.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=1e-3)
        self.steps = 0

    def loss(self, batch: tr.ReplayBatch) -> tuple[Tensor, Tensor]:
        """Returns the loss and the TD errors `[B]`."""
        with torch.no_grad():
            best = self.q(batch["next_obs"]).argmax(-1, keepdim=True)
            value = self._target(batch["next_obs"]).gather(-1, best).squeeze(-1)
            goal = batch["reward"] + batch["discount"] * value
        q = self.q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        return (batch["weight"] * F.huber_loss(q, goal, reduction="none")).mean(), goal - q.detach()

    def learn(self, batch: tr.ReplayBatch) -> Tensor:
        """Does one update; returns the TD errors `[B]`."""
        loss, errors = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.count()
        return errors

    def count(self) -> None:
        """Counts an update; now and then the target becomes the network."""
        self.steps += 1
        if self.steps % TARGET_EVERY == 0:
            self._target.load_state_dict(self.q.state_dict())

    @torch.no_grad()
    def evaluate(self, seed: int, floor: float = -math.inf) -> float:
        """Returns the mean return of greedy episodes; as soon as it cannot be above `floor`, returns that.

        Args:
            seed: Of the environments, in which no reward is above 0 if there is a floor.
            floor: Below it the mean does not matter.
        """
        envs = gym.make_vec(self._task.env, num_envs=self._task.episodes)
        obs, _ = envs.reset(seed=seed)
        returns, alive = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
        while alive.any():
            obs, reward, terminated, truncated, _ = envs.step(self.q(torch.from_numpy(obs)).argmax(-1).numpy())
            returns += alive * reward
            alive &= ~(terminated | truncated)
            if returns.mean() <= floor:
                return floor
        return float(returns.mean())


class Explorer:
    """Plays a task into a buffer, with the weights that were published last.

    Args:
        buffer: To write into.
        seed: Of the environment and of the random actions.
        task: What it plays.

    Attributes:
        policy: The network that it plays with.
        plays: Whether it is amid an episode.
        terminated: Episodes that ended before their time was up.
    """

    def __init__(self, buffer: tr.ReplayBuffer, seed: int, task: Task = CARTPOLE) -> None:
        self._task, self.policy = task, task.network()
        self.plays, self.terminated = False, 0
        self._env, self._rng = gym.make(task.env), np.random.default_rng(seed)
        self._env.reset(seed=seed)
        self._writer = buffer.writer()
        self._obs: np.ndarray

    @torch.no_grad()
    def step(self) -> None:
        """Plays one step."""
        if not self.plays:
            self._obs, _ = self._env.reset()
            self._writer.reset(obs=self._obs)
        action = act(self.policy, self._obs, EPSILON, self._rng)
        self._obs, reward, terminated, truncated, _ = self._env.step(action)
        ends = {"terminated": terminated, "truncated": truncated}
        self._writer.step(obs=self._obs, action=action, reward=self._task.scale * float(reward), **ends)
        self.plays = not (terminated or truncated)
        self.terminated += terminated

    def state_dict(self) -> dict[str, Any]:
        """Returns what its next steps depend on, between two episodes: its generators."""
        return {"env": self._env.unwrapped.np_random.bit_generator.state, "actions": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was called."""
        self._env.unwrapped.np_random.bit_generator.state = state["env"]
        self._rng.bit_generator.state = state["actions"]
