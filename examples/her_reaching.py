"""DDPG with hindsight: MuJoCo's Reacher arm learns from a reward that only says whether its fingertip is at the target.

Hindsight Experience Replay (Andrychowicz et al. 2017, https://arxiv.org/abs/1707.01495): an arm that missed its target
has still reached all the places it came through. The buffer keeps the steps as they happened, each observation once.
Four in five drawn transitions get another goal: a place that the same episode reached later, with the reward for that
goal. The learner is DDPG (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971), which knows nothing of all this.
`--no-hindsight` draws the same transitions as they were lived: almost all of them say -1, and nothing is learned.
`--plot` runs both over several seeds and draws their curves.

    python examples/her_reaching.py --seed 1
    python examples/her_reaching.py --seed 1 --no-hindsight
    python examples/her_reaching.py --plot her_reaching.png
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import torch
from command_line import parse
from torch import Tensor, nn

import torchreplay as tr
from torchreplay.plots import LIGHT, style


@dataclass
class Args:
    """DDPG with hindsight on Reacher-v5 with a reward of -1 or 0."""

    seed: int = 0
    """seed of the networks, the draws, the explorers and the evaluations"""
    total_steps: int = 15_000
    """learner steps at most, each after one step of every arm; the run ends earlier once it is solved"""
    eval_every: int = 1_000
    """learner steps between two evaluations"""
    eval_episodes: int = 100
    """greedy episodes in an evaluation"""
    solved_at: float = 0.95
    """share of an evaluation's episodes that must end at the target to end the run"""
    hindsight: bool = True
    """most transitions are drawn with another goal; --no-hindsight: all as they were lived"""
    plot: str = ""
    """file for a picture of whole runs with and without hindsight; empty: one run and no picture"""
    plot_seeds: int = 3
    """seeds, from --seed on, of the runs in the picture"""

    num_envs: int = 8
    """arms that explore side by side"""
    epsilon: float = 0.2
    """share of an explorer's actions that are uniform"""
    noise: float = 0.2
    """standard deviation of the noise in its other actions"""
    learning_starts: int = 250
    """steps of every arm, with uniform actions, before the first learner step; at least a whole episode (51)"""

    capacity: int = 200_000
    """observations that the buffer holds"""
    share: float = 0.8
    """share of the drawn transitions that get another goal"""
    gamma: float = 0.98
    """discount of one step"""
    batch_size: int = 256
    """transitions in a batch"""
    learning_rate: float = 1e-3
    """of Adam, for the actor and the critic"""
    target_rate: float = 0.01
    """how much of the networks goes into the target networks with each learner step"""
    action_l2: float = 0.1
    """weight of the squared actions in the actor's loss"""


# What a row of the buffer holds: an observation as goal environments give it, and the step that led to it.
SPEC = {
    "obs": {"observation": tr.Field((6,)), "achieved_goal": tr.Field((2,)), "desired_goal": tr.Field((2,))},
    "action": tr.Field((2,)),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}
RADIUS = 0.01  # metres; the targets lie in a disc of 0.2, so that one random episode in thirty comes this near
EPISODE = 50  # steps; Reacher-v5 truncates then, and never terminates


def goal_observation(obs: object) -> dict[str, Tensor]:
    """Sorts what Reacher-v5 observes, `[n, 10]`, as goal environments do.

    Reacher-v5 gives the joints' cosines and sines, the target, the joints' velocities, and the way from the target to
    the fingertip. Positions are in metres, velocities in radians a second.
    """
    angles, target, velocity, offset = torch.as_tensor(obs).float().split([4, 2, 2, 2], dim=-1)
    return {
        "observation": torch.cat([angles, velocity], dim=-1),
        "achieved_goal": target + offset,
        "desired_goal": target,
    }


def compute_reward(achieved: Tensor, desired: Tensor) -> Tensor:
    """Returns 0 where a fingertip is within `RADIUS` of a goal and -1 elsewhere, for `[n, 2]` places of both."""
    return -(torch.linalg.vector_norm(achieved - desired, dim=-1) > RADIUS).float()


class Agent(nn.Module):
    """An actor, which reaches for a goal, and a critic, which estimates how long that will take."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.actor = nn.Sequential(*mlp(10, hidden, 2), nn.Tanh())
        self.critic = nn.Sequential(*mlp(12, hidden, 1))

    def act(self, features: Tensor) -> Tensor:
        """Returns the greedy actions, `[n, 2]`."""
        return self.actor(features)

    def value(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns the values of actions, `[n]`."""
        return self.critic(torch.cat([features, actions], dim=-1)).squeeze(-1)


def mlp(inputs: int, hidden: int, outputs: int) -> list[nn.Module]:
    """Returns the layers of a network with two hidden layers."""
    return [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)]


def features(obs: dict[str, Tensor]) -> Tensor:
    """Returns what the networks see of `n` observations, `[n, 10]`, at a scale of about one."""
    angles, velocity = obs["observation"].split([4, 2], dim=-1)
    way = obs["desired_goal"] - obs["achieved_goal"]
    return torch.cat([angles, velocity / 10, obs["desired_goal"] * 10, way * 10], dim=-1)


@torch.no_grad()
def explore(agent: Agent, obs: dict[str, Tensor], epsilon: float, noise: float) -> Tensor:
    """Returns actions, `[n, 2]`: a share of `epsilon` is uniform, the others are greedy with noise."""
    greedy = agent.act(features(obs))
    noisy = (greedy + noise * torch.randn_like(greedy)).clamp(-1, 1)
    uniform = 2 * torch.rand_like(greedy) - 1
    return torch.where(torch.rand(len(greedy), 1) < epsilon, uniform, noisy)


class Learner:
    """DDPG: a critic that learns the actor's values, and an actor that climbs the critic's.

    Args:
        agent: What learns.
        args: The run's arguments.
    """

    def __init__(self, agent: Agent, args: Args) -> None:
        self.agent, self.args = agent, args
        self.target = copy.deepcopy(agent).requires_grad_(False)
        self.actor_optimizer = torch.optim.Adam(agent.actor.parameters(), lr=args.learning_rate, fused=True)
        self.critic_optimizer = torch.optim.Adam(agent.critic.parameters(), lr=args.learning_rate, fused=True)

    def goals(self, batch: tr.ReplayBatch) -> Tensor:
        """Returns what the critic should say, `[B]`: no sum of rewards of -1 and 0 lies outside of these bounds."""
        with torch.no_grad():
            seen = features(batch["next_obs"])
            value = self.target.value(seen, self.target.act(seen))
            return (batch["reward"] + batch["discount"] * value).clamp(-1 / (1 - self.args.gamma), 0)

    def step(self, batch: tr.ReplayBatch) -> None:
        """Learns from a batch."""
        seen = features(batch["obs"])
        critic_loss = (self.agent.value(seen, batch["action"]) - self.goals(batch)).square().mean()
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        actions = self.agent.act(seen)
        actor_loss = self.args.action_l2 * actions.square().mean() - self.agent.value(seen, actions).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward(inputs=list(self.agent.actor.parameters()))
        self.actor_optimizer.step()

        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.agent.parameters(), strict=True):
                slow.lerp_(fast, self.args.target_rate)


@dataclass(frozen=True)
class Evaluation:
    """What greedy episodes were worth after `step` learner steps."""

    hindsight: bool
    seed: int
    step: int
    mean_return: float
    """of an episode's rewards: minus the number of steps away from the target"""
    success_rate: float
    """share of the episodes that end at the target"""
    rows: int
    """observations written so far"""
    seconds: float


@torch.no_grad()
def evaluate(agent: Agent, arms: gym.vector.VectorEnv, seed: int) -> tuple[float, float]:
    """Returns the mean return and the success rate of one greedy episode of each arm."""
    obs, _ = arms.reset(seed=seed)
    rewards = torch.zeros(EPISODE, arms.num_envs, dtype=torch.float64)
    for step in range(EPISODE):
        obs, *_ = arms.step(agent.act(features(goal_observation(obs))).numpy())
        reached = goal_observation(obs)
        rewards[step] = compute_reward(reached["achieved_goal"], reached["desired_goal"])
    return rewards.sum(0).mean().item(), (rewards[-1] == 0).double().mean().item()


def train(args: Args) -> list[Evaluation]:
    """Learns to reach; returns and reports the evaluations."""
    torch.manual_seed(args.seed)
    agent = Agent()
    learner = Learner(agent, args)
    if args.hindsight:
        view = tr.Hindsight(compute_reward, strategy="future", share=args.share, gamma=args.gamma)
    else:
        view = tr.Transitions(gamma=args.gamma)
    buffer = tr.ReplayBuffer(SPEC, args.capacity, view=view, seed=args.seed)
    arms, judged = (gym.make_vec("Reacher-v5", num_envs=n) for n in (args.num_envs, args.eval_episodes))
    evaluations: list[Evaluation] = []
    began = time.monotonic()

    obs = goal_observation(arms.reset(seed=args.seed)[0])
    with buffer.writer(num_envs=args.num_envs) as writer:
        writer.reset(obs=obs)
        for step in range(1 - args.learning_starts, args.total_steps + 1):
            action = explore(agent, obs, args.epsilon if step > 0 else 1.0, args.noise)
            state, _, terminated, truncated, _ = arms.step(action.numpy())
            obs = goal_observation(state)
            reward = compute_reward(obs["achieved_goal"], obs["desired_goal"])
            writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
            if step > 0:
                learner.step(buffer.sample(args.batch_size))
            if step > 0 and step % args.eval_every == 0:
                figures = evaluate(agent, judged, seed=args.seed + step)
                rows, seconds = buffer.stats().rows_written, time.monotonic() - began
                evaluations.append(Evaluation(args.hindsight, args.seed, step, *figures, rows, seconds))
                report(evaluations[-1])
                if evaluations[-1].success_rate >= args.solved_at:
                    break
    return evaluations


def report(evaluation: Evaluation) -> None:
    """Prints an evaluation: for people on a terminal, as a line of JSON elsewhere."""
    if sys.stdout.isatty():
        name = "with hindsight" if evaluation.hindsight else "without hindsight"
        figures = f"mean return {evaluation.mean_return:6.2f}   at the target {evaluation.success_rate:4.0%}"
        print(f"{name}, seed {evaluation.seed}   step {evaluation.step:6,}   {figures}   {evaluation.seconds:4.0f} s")
    else:
        line = {
            name: round(value, 3) if isinstance(value, float) else value for name, value in vars(evaluation).items()
        }
        print(json.dumps(line), flush=True)


def draw(runs: Sequence[list[Evaluation]], path: str) -> None:
    """Draws the success rates of runs into the file `path`."""
    from matplotlib import pyplot as plt

    with plt.rc_context(style(LIGHT)):
        figure, axes = plt.subplots(figsize=(8, 4.5), dpi=130, layout="constrained")
        axes.set(title="DDPG on Reacher-v5, told only whether it is at the target", xlabel="observations written")
        axes.set(ylabel="greedy episodes that end at the target", ylim=(-0.02, 1.02))
        for run in runs:
            color, label = (LIGHT.main, "with hindsight") if run[0].hindsight else (LIGHT.other, "without")
            label = label if run[0].seed == runs[0][0].seed else "_same again"
            rows, rates = [one.rows for one in run], [one.success_rate for one in run]
            axes.plot(rows, rates, color=color, linewidth=1.6, marker="o", markersize=3, label=label)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlim(left=0)
        axes.legend(loc="center right")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def main(args: Args) -> None:
    """Learns to reach, once or as often as a picture needs."""
    torch.set_num_threads(1)  # the networks are small
    if not args.plot:
        train(args)
        return
    seeds = range(args.seed, args.seed + args.plot_seeds)
    whole = replace(args, solved_at=math.inf)
    runs = [replace(whole, seed=seed, hindsight=hindsight) for hindsight in (True, False) for seed in seeds]
    evaluations = [train(run) for run in runs]
    if any(evaluations):
        draw(evaluations, args.plot)


if __name__ == "__main__":
    main(parse(Args))
