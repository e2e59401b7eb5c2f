"""IMPALA: explorers in plain processes write unrolls into a queue, and the learner corrects for their age by V-trace.

Importance Weighted Actor-Learner Architectures (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561) on one machine.
Explorers store with each step the log-probability that their policy gave to its action. The queue hands out each unroll
once, the oldest first. Explorers wait where it is full, and the learner where it is empty. So the capacity bounds how
old an unroll's policy is when it is learned from, and V-trace corrects for that.

An explorer that raises or is killed is reported and started again. What is lost is the unroll that it had not finished.
Without `--directory` the queue ends with this program. With it the queue is a file, and the model is saved beside it.
A program that is killed as a whole then goes on from there: no finished unroll is lost, or learned from twice.

    python examples/impala.py --seed 1
    python examples/impala.py --env LunarLander-v3
    python examples/impala.py --directory run  # kill it, and start it again
    torchreplay watch                      # from another terminal
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
    """IMPALA on CartPole-v1, or another task with flat observations: explorers in plain processes, a queue, V-trace."""

    seed: int = 0
    """seed of the networks, the explorers and the evaluations"""
    env: str = "CartPole-v1"
    """environment, with flat observations and discrete actions"""
    total_steps: int = 20_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 25
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """greedy episodes in an evaluation"""
    solved_at: float | None = None
    """mean return of an evaluation that ends the run; None: the environment's own threshold"""
    directory: Path | None = None
    """keeps the queue and the saved model, and goes on with those that it has; None: nothing outlives the run"""
    save_every: int = 25
    """learner steps between two saves, with a directory"""
    tensorboard: bool = True
    """whether to write curves to runs/impala-seed<seed>"""

    num_explorers: int = 2
    """explorer processes"""
    num_envs: int = 16
    """environments of each explorer, side by side"""
    unroll: int = 20
    """steps of an unroll; one that ends its episode is shorter"""
    capacity: int = 10_000
    """rows that the queue holds: what explorers may write ahead of the learner, beside what is held until a save"""

    gamma: float = 0.99
    """discount of one step"""
    ratio_bound: float = 1.0
    """V-trace truncates importance ratios at this, rho and c of the paper"""
    value_cost: float = 0.5
    """weight of the values' loss"""
    entropy_cost: float = 0.01
    """weight of the bonus for entropy"""
    batch_size: int = 64
    """unrolls in a batch"""
    learning_rate: float = 2e-3
    """of Adam"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Returns a network of observations, `[..., inputs]` to `[..., outputs]`."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(ctx.seed)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(gym.make_vec(args.env, num_envs=args.num_envs))
    policy = mlp(*envs.single_observation_space.shape, envs.single_action_space.n).requires_grad_(False)
    writer = ctx.writer(envs)
    obs, _ = envs.reset(seed=ctx.seed)
    writer.reset(obs=obs)
    while not ctx.stopped:
        ctx.pull_weights(policy)  # one atomic read when there is nothing newer
        log_probs = policy(torch.from_numpy(obs)).log_softmax(-1)
        action = torch.multinomial(log_probs.exp(), 1)
        log_prob = log_probs.gather(-1, action).squeeze(-1)
        action = action.squeeze(-1).numpy()
        obs, reward, terminated, truncated, infos = envs.step(action)
        reward = (1 - args.gamma) * reward  # CartPole's returns then lie in [0, 1]
        step = {"action": action, "log_prob": log_prob, "reward": reward}
        writer.step(obs=obs, **step, terminated=terminated, truncated=truncated)
        ended = terminated | truncated
        if ended.any():
            ctx.record(episode_return=infos["episode"]["r"][ended], episode_length=infos["episode"]["l"][ended])


def vtrace(log_ratio: Tensor, value: Tensor, batch: tr.ReplayBatch, args: Args) -> tuple[Tensor, Tensor]:
    """Returns what the values are to become, and the advantages of the actions (section 4.1 of the paper).

    Args:
        log_ratio: log(pi / mu) of the actions, the learner's policy over the explorer's, `[B, T]`.
        value: Of the observations, `[B, T + 1]`.
        batch: Unrolls. Beyond an episode's end, where `mask` is False, nothing is learned or summed up.
        args: The discount and where ratios are truncated.

    Returns:
        v_s, and rho_s (r_s + gamma v_s+1 - V(x_s)), both `[B, T]`.
    """
    ratio = log_ratio.exp().clamp(max=args.ratio_bound)
    discount = args.gamma * ~batch["terminated"]  # a time limit is no end: the observation behind it has a value
    delta = ratio * (batch["reward"] + discount * value[:, 1:] - value[:, :-1])
    correction = torch.zeros_like(value)  # v_s - V(x_s)
    for t in reversed(range(delta.shape[1])):
        follows = delta[:, t] + discount[:, t] * ratio[:, t] * correction[:, t + 1]
        correction[:, t] = torch.where(batch["mask"][:, t], follows, 0.0)
    goal = value + correction
    return goal[:, :-1], ratio * (batch["reward"] + discount * goal[:, 1:] - value[:, :-1])


def loss_of(policy: nn.Module, critic: nn.Module, batch: tr.ReplayBatch, args: Args) -> Tensor:
    """Returns the policy's loss, the values' and the bonus for entropy, as one number."""
    value = critic(batch["obs"]).squeeze(-1)
    log_probs = policy(batch["obs"][:, :-1]).log_softmax(-1)
    log_prob = log_probs.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        goal, advantage = vtrace(log_prob - batch["log_prob"], value, batch, args)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    value_loss = 0.5 * (goal - value[:, :-1]).square()
    loss = -advantage * log_prob + args.value_cost * value_loss - args.entropy_cost * entropy
    return loss[batch["mask"]].mean()


@torch.no_grad()
def evaluate(policy: nn.Module, episodes: int, seed: int, env: str = "CartPole-v1") -> np.ndarray:
    """Returns the returns of greedy episodes, which are played side by side."""
    envs = gym.make_vec(env, num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, rewards, terminated, truncated, _ = envs.step(policy(torch.from_numpy(obs)).argmax(-1).numpy())
        returns += rewards * running
        running &= ~(terminated | truncated)
    return returns


def queue_of(args: Args, env: gym.Env) -> tr.ReplayBuffer:
    """Returns the queue: the one that the directory has, or a new one."""
    how = {"view": tr.Sequences(args.unroll), "sampler": tr.Fifo(), "name": "unrolls"}
    capacity, spec = args.capacity, tr.spec_from_env(env) | {"log_prob": tr.Field()}
    if args.directory:
        args.directory.mkdir(parents=True, exist_ok=True)
        how |= {"path": args.directory / "unrolls", "sampler": tr.Fifo(commit="manual")}  # done when it is committed
        if how["path"].exists():
            return tr.ReplayBuffer.open(how["path"])
        capacity += args.save_every * args.batch_size * args.unroll  # a save ends what was handed out since the last
    return tr.ReplayBuffer(spec, capacity, **how)


def learn(policy: nn.Module, critic: nn.Module, queue: tr.ReplayBuffer, args: Args) -> None:
    """The learner's loop, with explorers beside it, until an evaluation is good enough."""
    learner = {"policy": policy, "critic": critic, "drawn": tr.ReplayDataset(queue)}  # its state names what is held
    learner["optimizer"] = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=args.learning_rate)
    done, path = 0, args.directory and args.directory / "model.pt"
    if path and path.exists():
        saved = torch.load(path)
        done = saved["step"]
        for name, part in learner.items():
            part.load_state_dict(saved[name])  # of what was drawn: what this model has learned from does not come again
    curves = SummaryWriter(f"runs/impala-seed{args.seed}", purge_step=done) if args.tensorboard else None
    monitor, weights, began = tr.Monitor(queue, curves), tr.SharedWeights(policy, version=done), time.monotonic()
    work, seed = partial(explore, args=args), None if queue.stats().rows_written else args.seed  # new after a restart
    with ExplorerPool(work, args.num_explorers, queue, weights, seed=seed):
        for step in range(done + 1, args.total_steps + 1):
            batch = queue.sample(args.batch_size)
            loss = loss_of(policy, critic, batch, args)
            learner["optimizer"].zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(learner["optimizer"].param_groups[0]["params"], 0.5)
            learner["optimizer"].step()
            weights.publish(policy)
            monitor.step(step)
            if path and step % args.save_every == 0:
                saved = {name: part.state_dict() for name, part in learner.items()}
                torch.save(saved | {"step": step}, path.with_suffix(".new"))
                os.replace(path.with_suffix(".new"), path)  # a whole model, or the one before
                queue.commit()  # only now: until here a death would bring back what was learned from
            if step % args.eval_every == 0:
                mean_return = evaluate(policy, args.eval_episodes, args.seed + step, args.env).mean()
                solved = bool(mean_return >= args.solved_at)
                line = {"step": step, "mean_return": mean_return, "rows": queue.stats().rows_written}
                print(json.dumps(line | {"seconds": round(time.monotonic() - began, 1), "solved": solved}), flush=True)
                if curves:
                    curves.add_scalar("charts/mean_return", mean_return, step)
                    curves.flush()
                if solved:
                    return


def main(args: Args) -> None:
    """Learns the task."""
    torch.set_num_threads(1)  # the networks are small, and the explorers want the other cores
    torch.manual_seed(args.seed)
    env = gym.make(args.env)
    args.solved_at = env.spec.reward_threshold if args.solved_at is None else args.solved_at
    if args.solved_at is None:
        raise ValueError(f"{args.env} has no reward threshold: say what counts as solved, --solved-at 100")
    inputs = env.observation_space.shape[0]
    policy, critic = mlp(inputs, env.action_space.n), mlp(inputs, 1)
    with queue_of(args, env) as queue:
        learn(policy, critic, queue, args)


if __name__ == "__main__":
    main(tyro.cli(Args))
