"""Parallel SAC on MuJoCo's InvertedPendulum-v5, or another continuous task: explorers, a learner and an evaluator.

Soft actor-critic (Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905) with its entropy target and two critics.
Explorers write every observation once, and the buffer makes transitions of them at the draw. So an episode's last
transition bootstraps where a time limit ended it, and does not where the episode terminated. A limiter keeps
`steps_per_update` environment steps to a learner step when one side is faster. The evaluator plays the published actor
without noise beside all this, and keeps the best one in `directory`.

    python examples/sac_continuous.py --seed 1
    python examples/sac_continuous.py --env LunarLanderContinuous-v3 --plot lander.png
    tensorboard --logdir runs
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
from torchreplay.plots import ReplayHistory, replay_health
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
    """mean return of an evaluation that ends the run; None: the environment's own reward threshold"""
    tensorboard: bool = True
    """whether to write curves to runs/sac_continuous-seed<seed>"""
    directory: str = ""
    """where the best actor is kept, best.safetensors; empty for nowhere"""
    plot: str = ""
    """file for a picture of the run; empty for none"""

    num_explorers: int = 2
    """explorer processes"""
    start_steps: int = 4_000
    """steps with uniform actions, all explorers together, before the first learner step"""
    steps_per_update: float = 2.0
    """environment steps to a learner step"""
    noise: float = 0.4
    """standard deviation of what every other explorer adds to its actions"""
    publish_every: int = 20
    """learner steps between two publications of the actor"""

    capacity: int = 1_000_000
    """observations that the buffer holds"""
    batch_size: int = 256
    """transitions in a batch"""
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
    return gym.wrappers.DtypeObservation(env, np.float32)


def mlp(inputs: int, outputs: int, hidden: int = 256) -> nn.Sequential:
    """Returns a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


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


class Critics(nn.Module):
    """Two critics."""

    def __init__(self, observation: int, action: int) -> None:
        super().__init__()
        self.pair = nn.ModuleList([mlp(observation + action, 1), mlp(observation + action, 1)])

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Returns both values of `B` observations with actions, `[B, 2]`."""
        x = torch.cat([obs, action], dim=-1)
        return torch.cat([critic(x) for critic in self.pair], dim=-1)


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    env = gym.wrappers.RecordEpisodeStatistics(make_env(args.env))
    env.action_space.seed(ctx.seed)
    torch.manual_seed(ctx.seed)
    noise = torch.full(env.action_space.shape, args.noise if ctx.index % 2 else 0.0)
    actor = Actor(*env.observation_space.shape, *env.action_space.shape).requires_grad_(False)
    ctx.pull_weights(actor)
    writer = ctx.writer()
    obs, _ = env.reset(seed=ctx.seed)
    writer.reset(obs=obs)
    while not ctx.stopped:
        if ctx.buffer.stats().inserted < args.start_steps:
            action = env.action_space.sample()
        else:
            ctx.pull_weights(actor)  # one atomic read when there is nothing newer
            action = actor.sample(torch.from_numpy(obs))[0]
            action = torch.normal(action, noise).clamp(-1, 1).numpy()
        obs, reward, terminated, truncated, info = env.step(action)
        writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        if terminated or truncated:
            ctx.record(episode_return=info["episode"]["r"], episode_length=info["episode"]["l"])
            obs, _ = env.reset()
            writer.reset(obs=obs)


class Learner:
    """Soft actor-critic."""

    def __init__(self, observation: int, action: int, args: Args) -> None:
        self.args, self.entropy = args, -action
        self.actor, self.critics = Actor(observation, action), Critics(observation, action)
        self.target = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
        self.actor_optimizer, self.critic_optimizer = adam(self.actor.parameters()), adam(self.critics.parameters())
        self.alpha_optimizer = adam([self.log_alpha])

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
        self.actor_optimizer.zero_grad()
        actor_loss.backward(inputs=list(self.actor.parameters()))
        self.actor_optimizer.step()

        alpha_loss = -self.log_alpha * (log_density.detach().mean() + self.entropy)
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()

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
    threshold = env.spec.reward_threshold if args.solved_at is None else args.solved_at
    learner = Learner(*sizes, args)
    weights = tr.SharedWeights(learner.actor)
    limiter = tr.SamplesPerInsert(args.batch_size / args.steps_per_update, args.start_steps)
    view = tr.Transitions(gamma=args.gamma)
    buffer = tr.ReplayBuffer(tr.spec_from_env(env), args.capacity, view=view, limiter=limiter, seed=args.seed)
    pool = ExplorerPool(partial(explore, args=args), args.num_explorers, buffer, weights, seed=args.seed)
    judge = partial(evaluate, env=args.env, episodes=args.eval_episodes)
    every, directory = max(args.eval_every // args.publish_every, 1), args.directory or None
    evaluator = Evaluator(judge, weights, partial(Actor, *sizes), every=every, seed=args.seed, directory=directory)
    curves = SummaryWriter(f"runs/sac_continuous-seed{args.seed}", purge_step=0) if args.tensorboard else None
    monitor, history, began = tr.Monitor(buffer, curves), ReplayHistory(buffer), time.monotonic()

    def solved(now: int) -> bool:
        """Tells what the evaluator has found since the last call; returns whether it was good enough."""
        for evaluation in evaluator.evaluations[len(history.moments) :]:
            step, mean_return = min(evaluation.version * args.publish_every, now), evaluation.mean_return
            history.record(step, mean_return, [explorer.mean_return for explorer in pool.stats()])
            line = {"step": step, "mean_return": round(mean_return, 2), "rows": buffer.stats().inserted}
            line |= {"seconds": round(time.monotonic() - began, 1)}
            print(json.dumps(line | {"solved": threshold is not None and mean_return >= threshold}), flush=True)
            if curves:
                curves.add_scalar("charts/mean_return", mean_return, step)
        returns = [moment.mean_return for moment in history.moments]
        return threshold is not None and max(returns, default=-math.inf) >= threshold

    with pool, evaluator:
        for step, batch in enumerate(tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps), 1):
            learner.step(batch)
            history.observe(batch)
            monitor.step(step)
            if step % args.publish_every == 0 or step == args.total_steps:
                weights.publish(learner.actor)
                if solved(step):
                    break
        else:
            evaluator.wait()
            solved(step)
    if args.plot:
        replay_health(history, args.plot, f"Parallel SAC on {args.env}", threshold)


if __name__ == "__main__":
    main(tyro.cli(Args))
