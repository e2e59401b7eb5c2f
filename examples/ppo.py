"""PPO on CartPole-v1 with explorers in other processes, strictly on-policy: every batch is of the learner's own policy.

Proximal Policy Optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347). Two queues go around. The learner
publishes its weights and orders a batch of rollouts. Explorers claim the orders, play, and write each rollout as one
row. Between two batches nobody plays, so no rollout is of an older policy.

An explorer that raises or is killed gives its order back: another one plays it. The dead one is started again.

    python examples/ppo.py --seed 1
    torchreplay watch                      # from another terminal
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr
from torchreplay.explorers import ExplorerContext, ExplorerPool


@dataclass
class Args:
    """PPO on CartPole-v1: explorers in plain processes, which play what the learner orders."""

    seed: int = 0
    """seed of the networks, the explorers, the minibatches and the evaluations"""
    total_steps: int = 300
    """learner steps at most, each of a batch of rollouts; the run ends earlier once it is solved"""
    eval_every: int = 2
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """greedy episodes in an evaluation"""
    solved_at: float = 475.0
    """mean return of an evaluation that ends the run"""
    tensorboard: bool = True
    """whether to write curves to runs/ppo-seed<seed>"""

    num_explorers: int = 2
    """explorer processes"""
    num_envs: int = 8
    """environments of each explorer, side by side"""
    length: int = 64
    """steps of a rollout, in each of its environments"""
    batch_size: int = 4
    """rollouts in a batch"""

    gamma: float = 0.99
    """discount of one step"""
    gae_lambda: float = 0.95
    """how far advantages look ahead: 0 one step, 1 to the end of the episode"""
    epochs: int = 10
    """how often a batch is learned from"""
    minibatch_size: int = 256
    """steps in a minibatch"""
    clip: float = 0.2
    """how far the ratio of the new policy to the old one may leave 1"""
    entropy_cost: float = 0.0
    """weight of the bonus for entropy"""
    learning_rate: float = 1e-3
    """of Adam"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


def spec_of(args: Args) -> dict[str, tr.Field]:
    """Returns the fields of a rollout: of `length` steps in `num_envs` environments, and the observation behind."""
    steps = args.length, args.num_envs
    return {
        "obs": tr.Field((args.length + 1, args.num_envs, 4)),
        "action": tr.Field(steps, torch.int64),
        "log_prob": tr.Field(steps),
        "reward": tr.Field(steps),
        "terminated": tr.Field(steps, torch.bool),
        "mask": tr.Field(steps, torch.bool),  # False for a step that only resets the environment
        "version": tr.Field((), torch.int64),  # of the weights that played
    }


def mlp(outputs: int) -> nn.Sequential:
    """Returns a network of CartPole's states, `[..., 4]` to `[..., outputs]`."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def explore(ctx: ExplorerContext, orders: tr.ReplayBuffer, args: Args) -> None:
    """Plays what is ordered until the learner has finished; runs in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(ctx.seed)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(gym.make_vec("CartPole-v1", num_envs=args.num_envs))
    policy = mlp(2).requires_grad_(False)
    rollout = {name: torch.zeros(field.shape, dtype=field.dtype) for name, field in spec_of(args).items()}
    writer = ctx.writer()
    obs, _ = envs.reset(seed=ctx.seed)
    ended = np.zeros(args.num_envs, dtype=bool)
    while not ctx.stopped:
        with orders.claim(1):  # if this process dies here, another one gets the order
            ctx.pull_weights(policy)
            for t in range(args.length):
                rollout["obs"][t], rollout["mask"][t] = torch.from_numpy(obs), torch.from_numpy(~ended)
                log_probs = policy(rollout["obs"][t]).log_softmax(-1)
                action = torch.multinomial(log_probs.exp(), 1)
                rollout["action"][t] = action.squeeze(-1)
                rollout["log_prob"][t] = log_probs.gather(-1, action).squeeze(-1)
                obs, reward, terminated, truncated, infos = envs.step(action.squeeze(-1).numpy())
                rollout["reward"][t] = (1 - args.gamma) * torch.from_numpy(reward)  # returns then lie in [0, 1]
                rollout["terminated"][t] = torch.from_numpy(terminated)
                ended = terminated | truncated
                if ended.any():
                    played = infos["episode"]
                    ctx.record(episode_return=played["r"][ended], episode_length=played["l"][ended])
            rollout["obs"][args.length] = torch.from_numpy(obs)
            rollout["version"].fill_(ctx.weights.pulled_version)
            writer.append(**rollout)


def collect(orders: tr.ReplayBuffer, rollouts: tr.ReplayBuffer, version: int, args: Args) -> dict[str, Tensor]:
    """Orders a batch of rollouts of the newest weights, and returns it.

    An explorer may die between its last line and the end of its claim. Then its order is played twice. The rollout too
    many comes first in the next batch, is of an older version there, and is left out.
    """
    orders.extend(version=torch.full((args.batch_size,), version))
    batches, missing = [], args.batch_size
    while missing:
        batch = rollouts.sample(missing)
        fresh = batch["version"] == version
        batches.append({name: batch[name][fresh] for name in spec_of(args)})
        missing -= int(fresh.sum())
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def advantages(value: Tensor, batch: dict[str, Tensor], args: Args) -> Tensor:
    """Returns the generalized advantage estimates (Schulman et al. 2016, equation 16), `[B, T, N]`.

    Args:
        value: Of the observations, `[B, T + 1, N]`.
        batch: Rollouts. The sum ends where an episode does: behind a time limit by the value of its last observation.
        args: The discount and lambda.
    """
    discount = args.gamma * ~batch["terminated"]
    delta = batch["reward"] + discount * value[:, 1:] - value[:, :-1]
    advantage = torch.zeros_like(value)
    for t in reversed(range(delta.shape[1])):
        follows = delta[:, t] + discount[:, t] * args.gae_lambda * advantage[:, t + 1]
        advantage[:, t] = torch.where(batch["mask"][:, t], follows, 0.0)  # a reset parts two episodes
    return advantage[:, :-1]


def loss_of(policy: nn.Module, critic: nn.Module, steps: dict[str, Tensor], args: Args) -> Tensor:
    """Returns the clipped loss of the policy (equation 7), the values' and the bonus for entropy, as one number."""
    log_probs = policy(steps["obs"]).log_softmax(-1)
    log_prob = log_probs.gather(-1, steps["action"].unsqueeze(-1)).squeeze(-1)
    ratio, advantage = (log_prob - steps["log_prob"]).exp(), steps["advantage"]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage)
    value_loss = 0.5 * (steps["goal"] - critic(steps["obs"]).squeeze(-1)).square()
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return (value_loss - gain - args.entropy_cost * entropy).mean()


def update(
    policy: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], args: Args
) -> None:
    """Learns from a batch, in minibatches."""
    with torch.no_grad():
        value = critic(batch["obs"]).squeeze(-1)
    advantage, mask = advantages(value, batch, args), batch["mask"]
    steps = {name: batch[name][mask] for name in ("action", "log_prob")} | {"obs": batch["obs"][:, :-1][mask]}
    steps["goal"] = (advantage + value[:, :-1])[mask]
    steps["advantage"] = (advantage[mask] - advantage[mask].mean()) / (advantage[mask].std() + 1e-8)
    for _ in range(args.epochs):
        for chosen in torch.randperm(len(steps["obs"])).split(args.minibatch_size):
            loss = loss_of(policy, critic, {name: column[chosen] for name, column in steps.items()}, args)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()


@torch.no_grad()
def evaluate(policy: nn.Module, episodes: int, seed: int) -> np.ndarray:
    """Returns the returns of greedy episodes, which are played side by side."""
    envs = gym.make_vec("CartPole-v1", num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, rewards, terminated, truncated, _ = envs.step(policy(torch.from_numpy(obs)).argmax(-1).numpy())
        returns += rewards * running
        running &= ~(terminated | truncated)
    return returns


def main(args: Args) -> None:
    """Learns CartPole."""
    torch.set_num_threads(1)  # the networks are small, and the explorers want the other cores
    torch.manual_seed(args.seed)
    policy, critic = mlp(2), mlp(1)
    weights = tr.SharedWeights(policy)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=args.learning_rate)
    curves = SummaryWriter(f"runs/ppo-seed{args.seed}", purge_step=0) if args.tensorboard else None
    room = 4 * args.batch_size
    orders = tr.ReplayBuffer({"version": tr.Field((), torch.int64)}, room, sampler=tr.Fifo(), name="orders")
    rollouts = tr.ReplayBuffer(spec_of(args), room, sampler=tr.Fifo(), name="rollouts")
    monitor, began = tr.Monitor(rollouts, curves), time.monotonic()
    work = partial(explore, orders=orders, args=args)
    pool = ExplorerPool(work, args.num_explorers, rollouts, weights, seed=args.seed)
    with orders, rollouts, orders.expect_writers(), pool:  # orders will come, though no writer of theirs is there yet
        for step in range(1, args.total_steps + 1):
            update(policy, critic, optimizer, collect(orders, rollouts, weights.version, args), args)
            weights.publish(policy)
            monitor.step(step)
            if step % args.eval_every == 0:
                mean_return = evaluate(policy, args.eval_episodes, seed=args.seed + step).mean()
                solved = bool(mean_return >= args.solved_at)
                line = {"step": step, "mean_return": mean_return, "rows": rollouts.stats().rows_written}
                print(json.dumps(line | {"seconds": round(time.monotonic() - began, 1), "solved": solved}), flush=True)
                if curves:
                    curves.add_scalar("charts/mean_return", mean_return, step)
                    curves.flush()
                if solved:
                    return


if __name__ == "__main__":
    main(tyro.cli(Args))
