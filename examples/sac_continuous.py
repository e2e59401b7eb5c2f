"""Parallel SAC on MuJoCo's InvertedPendulum-v5, or another continuous task: explorers, a learner and an evaluator.

Soft actor-critic (Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905) with its entropy target and two critics.
Explorers write every observation once, and the buffer makes n-step transitions of them at the draw. These bootstrap
where a time limit ended an episode, and do not where it terminated. A limiter keeps `steps_per_update` environment
steps to a learner step. The evaluator plays the published actor without noise, and keeps the best in `directory`.

    python examples/sac_continuous.py --seed 1
    python examples/sac_continuous.py --env LunarLanderContinuous-v3
"""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr
from torchreplay.ray import Evaluator, ExplorerContext, ExplorerPool


@dataclass
class Args:
    """Parallel SAC on a continuous task of Gymnasium."""

    seed: int = 0
    """seed of the networks, the draws, the explorers and the evaluations"""
    env: str = "InvertedPendulum-v5"
    """environment, with flat observations and actions"""
    total_steps: int = 150_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 1_000
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """episodes without noise in an evaluation"""
    solved_at: float | None = None
    """mean return of an evaluation that ends the run; None: the environment's own threshold"""
    tensorboard: bool = True
    """whether to write curves to runs/sac_continuous-seed<seed>"""
    directory: str = ""
    """where the best actor is kept, best.safetensors; empty for nowhere"""

    num_explorers: int = 2
    """explorer processes"""
    start_steps: int = 4_000
    """steps with uniform actions, all explorers together, before the first learner step"""
    steps_per_update: float = 4.0
    """environment steps to a learner step"""
    noise: float = 0.6
    """explorers add slow noise to their actions, of a standard deviation between 0 and this in each episode"""
    publish_every: int = 20
    """learner steps between two publications of the actor"""

    capacity: int = 1_000_000
    """observations that the buffer holds"""
    batch_size: int = 128
    """transitions in a batch"""
    n_step: int = 5
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""
    learning_rate: float = 1e-3
    """of Adam, for the actor, the critics and the temperature"""
    target_rate: float = 0.01
    """how much of the critics goes into the target critics with each learner step"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


def make_env(name: str) -> gym.Env:
    """Returns an environment with float32 observations, and actions from -1 to 1."""
    env = gym.wrappers.RescaleAction(gym.make(name), np.float32(-1), np.float32(1))
    space = gym.spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float32)
    return gym.wrappers.TransformObservation(env, np.float32, space)


def mlp(inputs: int, outputs: int, hidden: int = 128) -> nn.Sequential:
    """Returns a network with two hidden layers."""
    first, second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden, outputs))


class Actor(nn.Module):
    """A Gaussian policy, squashed into [-1, 1]."""

    def __init__(self, observation: int, action: int) -> None:
        super().__init__()
        self.body = mlp(observation, 2 * action)

    def forward(self, obs: Tensor) -> Tensor:
        """Returns the actions without noise, `[..., A]`."""
        return self.body(obs).chunk(2, dim=-1)[0].tanh()

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draws actions, `[..., A]`; returns them and the logarithms of their densities, `[...]`."""
        mean, log_std = self.body(obs).chunk(2, dim=-1)
        log_std = log_std.clamp(-5, 2)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        log_density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))  # of tanh, in a form that does not round to log 0
        return raw.tanh(), (log_density - log_slope).sum(-1)


class Critics(nn.ModuleList):
    """Some critics."""

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Returns all values of `B` observations with actions, `[B, 2]`."""
        x = torch.cat([obs, action], dim=-1)
        return torch.cat([critic(x) for critic in self], dim=-1)


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    env = gym.wrappers.RecordEpisodeStatistics(make_env(args.env))
    torch.manual_seed(ctx.seed)
    rng = np.random.default_rng(ctx.seed)
    level, drift = args.noise * rng.random(), np.zeros(env.action_space.shape, np.float32)
    actor = Actor(*env.observation_space.shape, *env.action_space.shape).requires_grad_(False)
    ctx.pull_weights(actor)
    writer = ctx.writer()
    obs, _ = env.reset(seed=ctx.seed)
    writer.reset(obs=obs)
    while not ctx.stopped:
        if ctx.buffer.stats().inserted < args.start_steps:
            action = rng.uniform(-1, 1, drift.shape).astype(np.float32)
        else:
            ctx.pull_weights(actor)  # one atomic read when there is nothing newer
            drift = 0.9 * drift + math.sqrt(1 - 0.9**2) * rng.standard_normal(drift.shape, np.float32)
            action = (actor.sample(torch.from_numpy(obs))[0].numpy() + level * drift).clip(-1, 1)
        obs, reward, terminated, truncated, info = env.step(action)
        writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        if terminated or truncated:
            ctx.record(episode_return=info["episode"]["r"], episode_length=info["episode"]["l"])
            level = args.noise * rng.random()
            obs, _ = env.reset()
            writer.reset(obs=obs)


class Learner:
    """Soft actor-critic."""

    def __init__(self, observation: int, action: int, args: Args) -> None:
        self.args, self.entropy = args, -action
        self.actor, self.critics = Actor(observation, action), Critics(mlp(observation + action, 1) for _ in range(2))
        self.target = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
        self.actor_optimizer = adam([*self.actor.parameters(), self.log_alpha])
        self.critic_optimizer = adam(self.critics.parameters())

    def step(self, batch: tr.ReplayBatch) -> None:
        """Learns from a batch."""
        obs, alpha = batch["obs"], self.log_alpha.detach().exp()
        with torch.no_grad():
            action, log_density = self.actor.sample(batch["next_obs"])
            value = self.target(batch["next_obs"], action).amin(-1) - alpha * log_density
            goal = batch["reward"] + batch["discount"] * value
        critic_loss = (self.critics(obs, batch["action"]) - goal.unsqueeze(-1)).square().mean(0).sum()
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        action, log_density = self.actor.sample(obs)
        actor_loss = (alpha * log_density - self.critics(obs, action).amin(-1)).mean()
        alpha_loss = -self.log_alpha * (log_density.detach().mean() + self.entropy)
        self.actor_optimizer.zero_grad()
        (actor_loss + alpha_loss).backward(inputs=[*self.actor.parameters(), self.log_alpha])
        self.actor_optimizer.step()

        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.critics.parameters()), self.args.target_rate)


def evaluate(actor: nn.Module, seed: int, env: str, episodes: int) -> np.ndarray:
    """Returns the returns of episodes without noise, which are played side by side."""
    envs = gym.vector.SyncVectorEnv([partial(make_env, env)] * episodes)
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, rewards, terminated, truncated, _ = envs.step(actor(torch.from_numpy(obs)).numpy())
        returns += rewards * running
        running &= ~(terminated | truncated)
    return returns


def main(args: Args) -> None:
    """Learns until an evaluation is good enough."""
    torch.set_num_threads(1)  # the networks are small, and the explorers want the other cores
    torch.manual_seed(args.seed)
    env = make_env(args.env)
    sizes = *env.observation_space.shape, *env.action_space.shape
    solved_at = env.spec.reward_threshold if args.solved_at is None else args.solved_at
    if solved_at is None:
        raise ValueError(f"{args.env} has no reward threshold: say what counts as solved, --solved-at 100")
    learner = Learner(*sizes, args)
    weights = tr.SharedWeights(learner.actor)
    limiter = tr.SamplesPerInsert(args.batch_size / args.steps_per_update, args.start_steps)
    options = {"view": tr.Transitions(args.n_step, args.gamma), "limiter": limiter, "seed": args.seed}
    buffer = tr.ReplayBuffer(tr.spec_from_env(env), args.capacity, name=args.env, **options)
    common = {"backend": "process", "seed": args.seed}
    pool = ExplorerPool(partial(explore, args=args), args.num_explorers, buffer, weights, **common)
    judge = partial(evaluate, env=args.env, episodes=args.eval_episodes)
    common |= {"every": max(args.eval_every // args.publish_every, 1), "directory": args.directory or None}
    evaluator = Evaluator(judge, weights, partial(Actor, *sizes), **common)
    curves = SummaryWriter(f"runs/sac_continuous-seed{args.seed}", purge_step=0) if args.tensorboard else None
    monitor, began, returns = tr.Monitor(buffer, curves), time.monotonic(), []

    def solved() -> bool:
        """Tells what the evaluator has found since the last call; returns whether it is good enough."""
        for evaluation in evaluator.evaluations[len(returns) :]:
            step, mean_return = evaluation.version * args.publish_every, evaluation.mean_return
            returns.append(mean_return)
            line = {"step": step, "mean_return": round(mean_return, 2), "rows": buffer.stats().inserted}
            line |= {"seconds": round(time.monotonic() - began, 1), "solved": mean_return >= solved_at}
            print(json.dumps(line), flush=True)
            if curves:
                curves.add_scalar("charts/mean_return", mean_return, step)
                curves.flush()
        return max(returns, default=-math.inf) >= solved_at

    with pool, evaluator:
        for step, batch in enumerate(tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps), 1):
            learner.step(batch)
            monitor.step(step)
            if step % args.publish_every == 0:
                weights.publish(learner.actor)
                if solved():
                    return
        evaluator.wait()
        solved()


if __name__ == "__main__":
    main(tyro.cli(Args))
