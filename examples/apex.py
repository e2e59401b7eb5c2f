"""Ape-X double DQN on CartPole-v1: explorers in plain processes or Ray actors, and a plain PyTorch loop.

Distributed Prioritized Experience Replay (Horgan et al. 2018, https://arxiv.org/abs/1803.00933) on one machine. Each of
four explorers has its own epsilon and its own copy of the network. They write each observation once into one shared
buffer. Its first priority is the |TD error| that they found themselves. The n-step returns are made when a batch is
drawn. The learner draws by priority, learns, feeds the new TD errors back, and publishes its weights.

An explorer that raises or is killed is reported and started again; the others do not notice.

    python examples/apex.py --seed 1
    python examples/apex.py --backend ray
    torchreplay watch                      # from another terminal
"""

from __future__ import annotations

import copy
import json
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr
from torchreplay.ray import ExplorerContext, ExplorerPool


@dataclass
class Args:
    """Ape-X double DQN on CartPole-v1: explorers in processes or Ray actors, and a plain loop."""

    seed: int = 0
    """seed of the network, the draws, the explorers and the evaluations"""
    total_steps: int = 30_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 250
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """greedy episodes in an evaluation"""
    solved_at: float = 475.0
    """mean return of an evaluation that ends the run"""
    tensorboard: bool = True
    """whether to write curves to runs/apex-seed<seed>"""

    backend: Literal["process", "ray"] = "process"
    """what explorers are: plain processes, or Ray actors"""
    num_explorers: int = 4
    """explorers"""
    epsilon: float = 0.4
    """base of the explorers' epsilons: epsilon ** (1 + 7 i / (num_explorers - 1))"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""

    capacity: int = 50_000
    """observations that the buffer holds"""
    learning_starts: int = 1_000
    """transitions to wait for before the first learner step"""
    samples_per_insert: float = 16.0
    """how often each transition is drawn on average; whoever is ahead of this waits"""
    alpha: float = 0.6
    """how strongly TD errors are preferred: 0 uniform, 1 proportional"""
    beta: float = 0.4
    """initial correction of that bias, annealed to 1 over total_steps"""

    batch_size: int = 256
    """transitions in a batch"""
    learning_rate: float = 1e-3
    """of Adam"""
    target_every: int = 50
    """learner steps between two copies into the target network"""
    publish_every: int = 10
    """learner steps between two publications of the weights"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


class QNetwork(nn.Sequential):
    """Action values of CartPole's states, `[..., 4]` to `[..., 2]`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    torch.set_num_threads(1)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    rng = np.random.default_rng(ctx.seed)
    epsilon = args.epsilon ** (1 + 7 * ctx.index / max(ctx.num_explorers - 1, 1))
    policy = QNetwork().requires_grad_(False)
    ctx.pull_weights(policy)
    writer = ctx.writer()

    env.reset(seed=ctx.seed)
    while not ctx.stopped:
        obs, _ = env.reset()
        writer.reset(obs=obs)
        q = policy(torch.from_numpy(obs)).numpy()
        window: deque[tuple[float, float]] = deque(maxlen=args.n_step)
        ended = False
        while not ended and not ctx.stopped:
            action = int(rng.integers(2) if rng.random() < epsilon else q.argmax())
            obs, reward, terminated, truncated, info = env.step(action)
            reward = (1 - args.gamma) * float(reward)  # returns then lie in [0, 1], where the Huber loss is quadratic
            window.append((reward, q[action]))
            ended = terminated or truncated

            ctx.pull_weights(policy)  # one atomic read when there is nothing newer
            q = policy(torch.from_numpy(obs)).numpy()
            priority = first_priority(window, 0.0 if terminated else q.max(), ended, args.gamma)
            step = {"action": action, "reward": reward, "terminated": terminated, "truncated": truncated}
            writer.step(obs=obs, priority=priority, **step)
        if ended:
            ctx.record(episode_return=info["episode"]["r"], episode_length=info["episode"]["l"])


def first_priority(window: deque[tuple[float, float]], value: float, ended: bool, gamma: float) -> float:
    """Returns the |TD error| of the transition that a step completes: the one that began n steps ago.

    A step that ends its episode completes all later ones, too. They get one number: the largest.

    Args:
        window: The rewards of the last n steps, and the value of the action that was taken in each.
        value: Of the observation that the last of them led to; 0 where the episode terminated.
        ended: Whether the episode ended there.
        gamma: Discount of one step.
    """
    errors = []
    for reward, q in reversed(window):
        value = reward + gamma * value
        errors.append(abs(value - q))
    return max(errors) if ended else errors[-1]


def td_errors(q: nn.Module, target: nn.Module, batch: tr.ReplayBatch) -> Tensor:
    """Returns the errors that double DQN (van Hasselt et al. 2016) makes small, `[B]`."""
    with torch.no_grad():
        best = q(batch["next_obs"]).argmax(-1, keepdim=True)
        value = target(batch["next_obs"]).gather(-1, best).squeeze(-1)
        goal = batch["reward"] + batch["discount"] * value  # the discount is 0 where the episode terminated
    return goal - q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)


def learn(q: nn.Module, pool: ExplorerPool, buffer: tr.ReplayBuffer, weights: tr.SharedWeights, args: Args) -> None:
    """The learner's loop."""
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)
    curves = SummaryWriter(f"runs/apex-seed{args.seed}", purge_step=0) if args.tensorboard else None
    monitor, began = tr.Monitor(buffer, curves), time.monotonic()
    for step, batch in enumerate(tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps), start=1):
        td_error = td_errors(q, target, batch)
        loss = (batch["weight"] * F.huber_loss(td_error, torch.zeros_like(td_error), reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        buffer.update_priorities(batch, td_error)

        if step % args.target_every == 0:
            target.load_state_dict(q.state_dict())
        if step % args.publish_every == 0:
            weights.publish(q)
        monitor.step(step)
        if step % args.eval_every == 0:
            mean_return = evaluate(q, args.eval_episodes, seed=args.seed + step).mean()
            stats, solved = buffer.stats(), bool(mean_return >= args.solved_at)
            line = {"step": step, "mean_return": mean_return, "rows": stats.inserted}
            line |= {"samples_per_insert": round(stats.samples_per_insert, 2)}
            line |= {"seconds": round(time.monotonic() - began, 1), "solved": solved}
            print(json.dumps(line), flush=True)
            if curves:
                curves.add_scalar("charts/mean_return", mean_return, step)
                for index, explorer in enumerate(pool.stats()):
                    curves.add_scalar(f"charts/mean_return_of_explorer_{index}", explorer.mean_return, step)
                curves.flush()
            if solved:
                break


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
    torch.set_num_threads(1)  # the network is small, and the explorers want the other cores
    torch.manual_seed(args.seed)
    q = QNetwork()
    weights = tr.SharedWeights(q)
    buffer = tr.ReplayBuffer(
        tr.spec_from_env(gym.make("CartPole-v1")),
        args.capacity,
        view=tr.Transitions(args.n_step, args.gamma),
        sampler=tr.Prioritized(args.alpha, tr.LinearSchedule(args.beta, 1.0, args.total_steps)),
        limiter=tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
        seed=args.seed,
        name="CartPole",
    )
    work = partial(explore, args=args)
    with ExplorerPool(work, args.num_explorers, buffer, weights, backend=args.backend, seed=args.seed) as pool:
        learn(q, pool, buffer, weights, args)


if __name__ == "__main__":
    main(tyro.cli(Args))
