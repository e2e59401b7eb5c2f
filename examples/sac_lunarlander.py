"""Parallel SAC on LunarLanderContinuous-v3: rollout workers, a learner and a test worker.

Soft actor-critic (Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905) with its entropy target and two critics. The
rollout workers write every observation once, and the buffer makes transitions of them at the draw. So an episode's last
transition bootstraps where a time limit ended it, and does not where the lander has landed or crashed. A limiter keeps
`steps_per_update` environment steps to a learner step when one side is faster. The test worker plays the published
actor without noise beside all this, and keeps the best one in `directory`.

An actor that has learned to hover, for fear of the ground, may do so for long: its own noise no longer takes it there.
So every other worker adds noise that does.

    python examples/sac_lunarlander.py --seed 1
    python examples/sac_lunarlander.py --seed 1 --num-explorers 1
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from command_line import parse
from progress import Progress
from torch import Tensor, nn

import torchreplay as tr
from torchreplay.ray import Evaluator, ExplorerContext, ExplorerPool


@dataclass
class Args:
    """Parallel SAC on LunarLanderContinuous-v3."""

    seed: int = 0
    """seed of the networks, the draws, the explorers and the evaluations"""
    total_steps: int = 150_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 2_000
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """deterministic episodes in an evaluation"""
    solved_at: float = 200.0
    """mean return of an evaluation that ends the run"""
    directory: str = ""
    """where the best actor is kept, best.safetensors; empty for nowhere"""
    plot: str = "sac_lunarlander.png"
    """file for the picture of the run; empty for none"""

    num_explorers: int = 2
    """rollout workers"""
    start_steps: int = 4_000
    """steps with uniform actions, all workers together, before the first learner step"""
    steps_per_update: float = 2.0
    """environment steps to a learner step"""
    noise: float = 0.4
    """standard deviation of what every other worker adds to its actions"""
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


OBSERVATION, ACTION = 8, 2
# What a row of the buffer holds: an observation, and the step that led to it.
SPEC = {
    "obs": tr.Field((OBSERVATION,)),
    "action": tr.Field((ACTION,)),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}


class Actor(nn.Module):
    """A Gaussian policy, squashed into [-1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(OBSERVATION, 2 * ACTION)

    def forward(self, obs: Tensor) -> Tensor:
        """Returns the deterministic actions, `[..., 2]`."""
        return self.body(obs)[..., :ACTION].tanh()

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draws actions, `[..., 2]`; returns them and the logarithms of their densities, `[...]`."""
        mean, log_std = self.body(obs).chunk(2, dim=-1)
        log_std = log_std.clamp(-5, 2)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        log_density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))  # of tanh, in a form that does not round to log 0
        return raw.tanh(), (log_density - log_slope).sum(-1)


class Critics(nn.Module):
    """Two critics."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ModuleList([mlp(OBSERVATION + ACTION, 1), mlp(OBSERVATION + ACTION, 1)])

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Returns both values of `B` observations with actions, `[B, 2]`."""
        x = torch.cat([obs, action], dim=-1)
        return torch.cat([critic(x) for critic in self.pair], dim=-1)


def mlp(inputs: int, outputs: int, hidden: int = 256) -> nn.Sequential:
    """Returns a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Lands and crashes until the learner has finished; runs in a process of its own."""
    env = gym.make("LunarLanderContinuous-v3")
    env.action_space.seed(ctx.seed)
    torch.manual_seed(ctx.seed)
    noise = np.random.default_rng(ctx.seed)
    actor = Actor().requires_grad_(False)
    ctx.pull_weights(actor)
    writer = ctx.writer()
    obs, _ = env.reset(seed=ctx.seed)
    writer.reset(obs=obs)
    episode_return, episode_length = 0.0, 0
    while not ctx.stopped:
        if ctx.buffer.stats().inserted < args.start_steps:
            action = env.action_space.sample()
        else:
            ctx.pull_weights(actor)  # one atomic read when there is nothing newer
            action = actor.sample(torch.from_numpy(obs))[0].numpy()
            if ctx.index % 2:
                action = (action + noise.normal(0.0, args.noise, ACTION)).clip(-1, 1).astype(np.float32)
        obs, reward, terminated, truncated, _ = env.step(action)
        writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        episode_return, episode_length = episode_return + float(reward), episode_length + 1
        if terminated or truncated:
            ctx.record(episode_return=episode_return, episode_length=episode_length)
            episode_return, episode_length = 0.0, 0
            obs, _ = env.reset()
            writer.reset(obs=obs)


class Learner:
    """Soft actor-critic.

    Args:
        args: The run's arguments.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        self.actor, self.critics = Actor(), Critics()
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

        alpha_loss = -self.log_alpha * (log_density.detach().mean() - ACTION)  # the entropy aimed at is -ACTION
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()

        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.critics.parameters()), self.args.target_rate)


def evaluate(actor: nn.Module, seed: int, episodes: int) -> np.ndarray:
    """Returns the returns of deterministic episodes, which are played side by side."""
    envs = gym.make_vec("LunarLanderContinuous-v3", num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, rewards, terminated, truncated, _ = envs.step(actor(torch.from_numpy(obs)).numpy())
        returns += rewards * running
        running &= ~(terminated | truncated)
    return returns


def main(args: Args) -> None:
    """Learns to land."""
    torch.set_num_threads(1)  # the networks are small, and the explorers want the other cores
    torch.manual_seed(args.seed)
    learner = Learner(args)
    weights = tr.SharedWeights(learner.actor)
    buffer = tr.ReplayBuffer(
        SPEC,
        args.capacity,
        view=tr.Transitions(gamma=args.gamma),
        limiter=tr.SamplesPerInsert(args.batch_size / args.steps_per_update, args.start_steps),
        seed=args.seed,
    )
    pool = ExplorerPool(partial(explore, args=args), args.num_explorers, buffer, weights, seed=args.seed)
    progress = Progress(
        "Parallel SAC on LunarLanderContinuous-v3",
        buffer,
        args.total_steps,
        args.solved_at,
        explorer_returns=lambda: [explorer.mean_return for explorer in pool.stats()],
    )
    evaluator = Evaluator(
        partial(evaluate, episodes=args.eval_episodes),
        weights,
        Actor,
        every=max(args.eval_every // args.publish_every, 1),
        seed=args.seed,
        directory=args.directory or None,
    )

    def solved() -> bool:
        """Reports what the test worker has found since the last call."""
        reached = False
        for evaluation in evaluator.evaluations[len(progress.history.moments) :]:
            step = min(evaluation.version * args.publish_every, progress.step)
            reached |= progress.evaluated(step, evaluation.mean_return)
        return reached

    with progress, pool, evaluator:
        for step, batch in enumerate(tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps), 1):
            learner.step(batch)
            progress.learned(step, batch)
            if step % args.publish_every == 0 or step == args.total_steps:
                weights.publish(learner.actor)
                if solved():
                    break
        else:
            evaluator.wait()
            solved()
    progress.summarize(args.plot)


if __name__ == "__main__":
    main(parse(Args))
