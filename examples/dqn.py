"""Double DQN with prioritized replay on CartPole-v1, in one process and one loop.

The environments write each observation once; the n-step returns are made when a batch is drawn. The learner draws by
priority, and feeds the TD errors back. Runs with the same seed are the same. The curves go to TensorBoard.

    python examples/dqn.py --seed 1
    tensorboard --logdir runs
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr


@dataclass
class Args:
    """Double DQN with prioritized replay on CartPole-v1."""

    seed: int = 0
    """seed of the network, the draws, the environments and the evaluations"""
    total_steps: int = 10_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 250
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """greedy episodes in an evaluation"""
    solved_at: float = 475.0
    """mean return of an evaluation that ends the run"""
    tensorboard: bool = True
    """whether to write curves to runs/dqn-seed<seed>"""

    num_envs: int = 16
    """environments, which take one step each for a learner step"""
    explore_steps: int = 500
    """learner steps over which epsilon falls from 1 to its end"""
    epsilon: float = 0.05
    """share of random actions in the end"""
    n_step: int = 5
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""

    capacity: int = 50_000
    """observations that the buffer holds"""
    learning_starts: int = 1_000
    """transitions in the buffer before the first learner step"""
    alpha: float = 0.6
    """how strongly TD errors are preferred: 0 uniform, 1 proportional"""
    beta: float = 0.4
    """initial correction of that bias, annealed to 1 over total_steps"""

    batch_size: int = 256
    """transitions in a batch"""
    learning_rate: float = 2e-3
    """of Adam"""
    target_rate: float = 0.02
    """how much of the network goes into the target network with each learner step"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


class QNetwork(nn.Sequential):
    """Action values of CartPole's states, `[..., 4]` to `[..., 2]`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def td_errors(q: nn.Module, target: nn.Module, batch: tr.ReplayBatch) -> Tensor:
    """Returns the errors that double DQN (van Hasselt et al. 2016) makes small, `[B]`."""
    with torch.no_grad():
        best = q(batch["next_obs"]).argmax(-1, keepdim=True)
        value = target(batch["next_obs"]).gather(-1, best).squeeze(-1)
        goal = batch["reward"] + batch["discount"] * value  # the discount is 0 where the episode terminated
    return goal - q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def evaluate(q: nn.Module, episodes: int, seed: int) -> np.ndarray:
    """Returns the returns of greedy episodes, which are played side by side."""
    envs = gym.make_vec("CartPole-v1", num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, rewards, terminated, truncated, _ = envs.step(q(torch.from_numpy(obs)).argmax(-1).numpy())
        returns += rewards * running
        running &= ~(terminated | truncated)
    return returns


def main(args: Args) -> None:
    """Learns CartPole."""
    torch.set_num_threads(1)  # as fast as it gets with a network this small
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    envs = gym.make_vec("CartPole-v1", num_envs=args.num_envs)
    buffer = tr.ReplayBuffer(
        tr.spec_from_env(envs),
        args.capacity,
        view=tr.Transitions(args.n_step, args.gamma),
        sampler=tr.Prioritized(args.alpha, tr.LinearSchedule(args.beta, 1.0, args.total_steps)),
        seed=args.seed,
        name="CartPole",
    )
    q = QNetwork()
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)
    curves = SummaryWriter(f"runs/dqn-seed{args.seed}", purge_step=0) if args.tensorboard else None
    monitor = tr.Monitor(buffer, curves)

    began, step = time.monotonic(), 0
    writer = buffer.writer(envs)
    obs, _ = envs.reset(seed=args.seed)
    writer.reset(obs=obs)
    while step < args.total_steps:
        with torch.no_grad():
            action = q(torch.from_numpy(obs)).argmax(-1).numpy()
        random = rng.random(args.num_envs) < max(args.epsilon, 1 - step / args.explore_steps)
        action = np.where(random, rng.integers(2, size=args.num_envs), action)
        obs, reward, terminated, truncated, _ = envs.step(action)
        # Scaled by 1 - gamma, returns lie in [0, 1].
        reward = (1 - args.gamma) * reward
        writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        if buffer.num_items < args.learning_starts:
            continue

        step += 1
        batch = buffer.sample(args.batch_size)
        td_error = td_errors(q, target, batch)
        optimizer.zero_grad()
        (batch["weight"] * td_error.square()).mean().backward()
        optimizer.step()
        buffer.update_priorities(batch, td_error)
        for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
            slow.data.lerp_(fast.data, args.target_rate)

        monitor.step(step)
        if step % args.eval_every == 0:
            mean_return = evaluate(q, args.eval_episodes, seed=args.seed + step).mean()
            solved = bool(mean_return >= args.solved_at)
            stats, seconds = buffer.stats(), time.monotonic() - began
            line = {"step": step, "mean_return": mean_return, "rows": stats.inserted, "seconds": round(seconds, 1)}
            print(json.dumps(line | {"solved": solved}), flush=True)
            if curves:
                curves.add_scalar("charts/mean_return", mean_return, step)
                curves.flush()
            if solved:
                break


if __name__ == "__main__":
    main(tyro.cli(Args))
