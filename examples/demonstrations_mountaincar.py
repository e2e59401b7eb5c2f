"""Double DQN on MountainCar-v0, with demonstrations mixed into every batch: experience alone hardly finds the goal.

The car is too weak to climb its hill: it must swing back and forth, and here it is told only when it is at the top, by
a reward of 1. Random actions hardly ever get there within an episode's 200 steps. A driver who just pushes the way the
car rolls does; a few of its episodes, in a buffer of their own, are enough. Half of each batch comes from them and half
from what the learner's own policy does (as in RLPD, Ball et al. 2023, https://arxiv.org/abs/2302.02948), each buffer by
its own priorities (as in R2D3, Paine et al. 2019, https://arxiv.org/abs/1909.01387), and the TD errors of both go back
by `dataset.update_priorities`. `--share 0` draws from experience alone.

    python examples/demonstrations_mountaincar.py --seed 1
    python examples/demonstrations_mountaincar.py --seed 1 --share 0
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from command_line import parse
from torch import Tensor, nn

import torchreplay as tr


@dataclass
class Args:
    """Double DQN on MountainCar-v0 with demonstrations in every batch."""

    seed: int = 0
    """seed of the network, the draws, the episodes and the evaluations"""
    total_steps: int = 6_000
    """learner steps at most, each after one step of every car; the run ends earlier once it is solved"""
    eval_every: int = 500
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """greedy episodes in an evaluation"""
    solved_at: float = -115.0
    """mean return of an evaluation that ends the run; the driver gets about -120, no policy more than about -90"""

    share: float = 0.5
    """share of each batch that is demonstrations; 0: none"""
    demonstrations: int = 4_000
    """steps that the driver demonstrates"""
    num_envs: int = 1
    """cars that explore side by side: with eight, chance finds the goal for those who wait"""
    epsilon: float = 0.1
    """share of an explorer's actions, and of the driver's, that are uniform"""
    learning_starts: int = 1_000
    """steps of every car, with uniform actions, before the first learner step"""

    capacity: int = 100_000
    """observations that the buffer of experience holds"""
    n_step: int = 5
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""
    alpha: float = 0.6
    """how strongly TD errors are preferred: 0 uniform, 1 proportional"""
    beta: float = 0.4
    """initial correction of that bias, annealed to 1 over total_steps"""
    batch_size: int = 128
    """transitions in a batch"""
    learning_rate: float = 1e-3
    """of Adam"""
    target_every: int = 100
    """learner steps between two copies into the target network"""


SPEC = {
    "obs": tr.Field((2,)),
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}
Policy = Callable[[Tensor], Tensor]  # observations [n, 2] to actions [n]


class QNetwork(nn.Module):
    """Action values of states, `[..., 2]` to `[..., 3]`: gamma to the number of steps to the goal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))

    def forward(self, obs: Tensor) -> Tensor:
        """Returns the values; position and velocity come at a scale of about one."""
        return self.layers((obs - torch.tensor([-0.3, 0.0])) / torch.tensor([0.9, 0.07]))

    @torch.no_grad()
    def act(self, obs: Tensor) -> Tensor:
        """Returns the greedy actions."""
        return self(obs).argmax(-1)


def drive(obs: Tensor) -> Tensor:
    """The driver: pushes the way the car rolls."""
    return torch.where(obs[:, 1] < 0, 0, 2)


class Cars:
    """Cars side by side that write what they do into a buffer.

    Args:
        buffer: Where to.
        num_envs: How many.
        seed: Of their episodes.
    """

    def __init__(self, buffer: tr.ReplayBuffer, num_envs: int, seed: int) -> None:
        self.envs = gym.make_vec("MountainCar-v0", num_envs=num_envs)
        self.writer = buffer.writer(lanes=num_envs)
        self.obs, _ = self.envs.reset(seed=seed)
        self.writer.reset(obs=self.obs)

    def step(self, policy: Policy, epsilon: float) -> None:
        """Takes one step with each car, a share of `epsilon` of them at random."""
        action = policy(torch.from_numpy(self.obs))
        action = torch.where(torch.rand(len(action)) < epsilon, torch.randint(3, action.shape), action)
        self.obs, _, terminated, truncated, _ = self.envs.step(action.numpy())
        reward = terminated.astype(np.float32)  # instead of the environment's own, which is -1 in every step
        self.writer.step(obs=self.obs, action=action, reward=reward, terminated=terminated, truncated=truncated)


def td_errors(q: nn.Module, target: nn.Module, batch: tr.ReplayBatch) -> Tensor:
    """Returns the errors that double DQN (van Hasselt et al. 2016) makes small, `[B]`."""
    with torch.no_grad():
        best = q(batch["next_obs"]).argmax(-1, keepdim=True)
        value = target(batch["next_obs"]).gather(-1, best).squeeze(-1)
        goal = batch["reward"] + batch["discount"] * value
    return goal - q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)


def evaluate(policy: Policy, episodes: int, seed: int) -> np.ndarray:
    """Returns the returns of episodes, minus the number of their steps; they are played side by side."""
    envs = gym.make_vec("MountainCar-v0", num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, rewards, terminated, truncated, _ = envs.step(policy(torch.from_numpy(obs)).numpy())
        returns += rewards * running
        running &= ~(terminated | truncated)
    return returns


def buffers_of(args: Args) -> tuple[tr.ReplayBuffer, tr.ReplayBuffer]:
    """Returns the buffers of experience, still empty, and of demonstrations."""
    sampler = tr.Prioritized(args.alpha, tr.Linear(args.beta, 1.0, args.total_steps))
    view = tr.Transitions(n_step=args.n_step, gamma=args.gamma)
    online = tr.ReplayBuffer(SPEC, args.capacity, sampler=sampler, view=view, seed=args.seed)
    demonstrated = tr.ReplayBuffer(SPEC, args.demonstrations + 1_000, sampler=sampler, view=view, seed=args.seed + 1)
    driven = Cars(demonstrated, num_envs=8, seed=args.seed + 1)
    while len(demonstrated) < args.demonstrations:
        driven.step(drive, args.epsilon)
    return online, demonstrated


def train(args: Args) -> None:
    """Learns to get up the hill."""
    torch.manual_seed(args.seed)
    q = QNetwork()
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)
    online, demonstrated = buffers_of(args)
    shares = {online: 1 - args.share, demonstrated: args.share} if args.share else {online: 1.0}
    # Nothing is drawn ahead: with one process and one thread, runs with the same seed are the same.
    dataset = tr.MixedDataset(shares, args.batch_size, steps=args.total_steps, prefetch=0)
    began = time.monotonic()

    cars = Cars(online, args.num_envs, args.seed)
    for _ in range(args.learning_starts):
        cars.step(q.act, epsilon=1.0)
    for step, batch in enumerate(dataset, start=1):
        td_error = td_errors(q, target, batch)
        loss = (batch["weight"] * F.huber_loss(td_error, torch.zeros_like(td_error), reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        dataset.update_priorities(batch, td_error)

        cars.step(q.act, args.epsilon)
        if step % args.target_every == 0:
            target.load_state_dict(q.state_dict())
        if step % args.eval_every == 0:
            mean_return = evaluate(q.act, args.eval_episodes, seed=args.seed + step).mean().item()
            report(args, step, mean_return, time.monotonic() - began)
            if mean_return >= args.solved_at:
                return


def report(args: Args, step: int, mean_return: float, seconds: float) -> None:
    """Prints an evaluation: for people on a terminal, as a line of JSON elsewhere."""
    if sys.stdout.isatty():
        print(f"{args.share:4.0%} demonstrations   step {step:6,}   mean return {mean_return:7.1f}   {seconds:4.0f} s")
    else:
        line = {"share": args.share, "seed": args.seed, "step": step, "mean_return": round(mean_return, 2)}
        print(json.dumps(line | {"seconds": round(seconds, 2)}), flush=True)


def main(args: Args) -> None:
    """Runs the example."""
    torch.set_num_threads(1)  # the network is small
    train(args)


if __name__ == "__main__":
    main(parse(Args))
