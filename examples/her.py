"""DDPG with hindsight: MuJoCo's Reacher arm learns from a reward that only says whether its fingertip is at the target.

Hindsight Experience Replay (Andrychowicz et al. 2017, https://arxiv.org/abs/1707.01495): an arm that missed its target
has still reached all the places it came through. The buffer keeps the steps as they happened, each observation once.
Four in five drawn transitions get another goal: a place that the same episode reached later, with the reward for that
goal. The learner is DDPG (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971), which knows nothing of all this.
`--strategy none` draws the same transitions as they were lived: almost all of them say -1, and nothing is learned.

    python examples/her.py --seed 1
    python examples/her.py --seed 1 --strategy none
    tensorboard --logdir runs
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import torch
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr


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
    strategy: Literal["future", "final", "episode", "none"] = "future"
    """which reached place becomes a goal: a later one, the last, any of the episode; none: all as they were lived"""
    tensorboard: bool = True
    """whether to write curves to runs/her-seed<seed>"""

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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


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


def train(args: Args) -> list[dict[str, Any]]:
    """Learns to reach; prints and returns the evaluations."""
    torch.manual_seed(args.seed)
    agent = Agent()
    learner = Learner(agent, args)
    if args.strategy == "none":
        view = tr.Transitions(gamma=args.gamma)
    else:
        view = tr.Hindsight(compute_reward, strategy=args.strategy, share=args.share, gamma=args.gamma)
    buffer = tr.ReplayBuffer(SPEC, args.capacity, view=view, seed=args.seed, name="Reacher")
    arms, judged = (gym.make_vec("Reacher-v5", num_envs=n) for n in (args.num_envs, args.eval_episodes))
    curves = SummaryWriter(f"runs/her-seed{args.seed}", purge_step=0) if args.tensorboard else None
    monitor, began = tr.Monitor(buffer, curves), time.monotonic()
    lines: list[dict[str, Any]] = []

    obs, ended = goal_observation(arms.reset(seed=args.seed)[0]), torch.zeros(args.num_envs, dtype=torch.bool)
    with buffer.writer(arms) as writer:
        writer.reset(obs=obs)
        for step in range(1 - args.learning_starts, args.total_steps + 1):
            action = explore(agent, obs, args.epsilon if step > 0 else 1.0, args.noise)
            state, _, terminated, truncated, _ = arms.step(action.numpy())
            obs = goal_observation(state)
            reward = compute_reward(obs["achieved_goal"], obs["desired_goal"])
            reward[ended] = 0.0  # the step after an end begins the next episode: there is nothing to reward
            writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
            ended = torch.from_numpy(terminated | truncated)
            if step <= 0:
                continue
            learner.step(buffer.sample(args.batch_size))
            monitor.step(step)
            if step % args.eval_every == 0:
                mean_return, success = evaluate(agent, judged, seed=args.seed + step)
                line = {"strategy": args.strategy, "seed": args.seed, "step": step}
                line |= {"mean_return": round(mean_return, 3), "success_rate": round(success, 3)}
                line |= {"rows": buffer.stats().rows_written, "seconds": round(time.monotonic() - began, 1)}
                lines.append(line | {"solved": success >= args.solved_at})
                print(json.dumps(lines[-1]), flush=True)
                if curves:
                    curves.add_scalar("charts/mean_return", mean_return, step)
                    curves.add_scalar("charts/success_rate", success, step)
                    curves.flush()
                if lines[-1]["solved"]:
                    break
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)  # the networks are small
    train(tyro.cli(Args))
