"""Agents of a PettingZoo environment learn together, each with a network, a replay buffer and weights of its own.

Red and blue stand on a torus and are to meet. Red can only move along one axis, blue only along the other, so neither
gets anywhere alone. Explorers in processes of their own play with all agents' networks, and a `ParallelWriter` puts
each agent's steps into its buffer. The learner draws a batch of each buffer, makes a step of double DQN for each agent
and publishes all weights. `AsyncReplay` keeps all this together. `--env` takes any parallel environment of PettingZoo
whose actions are discrete. Where agents die at different times, the others play on.

    python examples/multi_agent.py --seed 1
    python examples/multi_agent.py --env butterfly/knights_archers_zombies-v11 --solved-at 0.7
    tensorboard --logdir runs
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
import pettingzoo
import torch
import torch.nn.functional as F
import tyro
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr
from torchreplay.compat.pettingzoo import ParallelWriter, buffers_for
from torchreplay.ray import AsyncReplay, ExplorerContext, ExplorerPool

Agents = dict[str, Any]  # something of each agent, by its name


@dataclass
class Args:
    """Independent double DQNs in a PettingZoo environment, one buffer each."""

    seed: int = 0
    """seed of the networks, the draws, the explorers and the evaluations"""
    env: str = "torus"
    """torus, or a parallel environment as pettingzoo.make() names it"""
    total_steps: int = 20_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 250
    """learner steps between two evaluations"""
    eval_episodes: int = 48
    """greedy episodes in an evaluation; on the torus 48 are all starts there are"""
    solved_at: float = 0.87
    """mean return of an agent that ends the run; on the torus 0.8833 is the best there is"""
    tensorboard: bool = True
    """whether to write curves to runs/multi_agent-seed<seed>"""

    backend: Literal["process", "ray"] = "process"
    """what explorers are: plain processes, or Ray actors"""
    num_explorers: int = 2
    """explorers"""
    epsilon: float = 0.3
    """share of random actions"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.95
    """discount of one step"""

    capacity: int = 20_000
    """observations that each buffer holds"""
    learning_starts: int = 500
    """transitions of each agent to wait for before the first learner step"""
    samples_per_insert: float = 16.0
    """how often each transition of the first agent is drawn on average; whoever is ahead of this waits"""

    batch_size: int = 128
    """transitions in a batch, of each agent"""
    learning_rate: float = 1e-3
    """of Adam"""
    target_every: int = 50
    """learner steps between two copies into the target networks"""
    publish_every: int = 10
    """learner steps between two publications of the weights"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


SIZE, LIMIT, MOVES = 7, 12, (0, 1, -1)  # of the torus in each direction; steps in a game; moves along an axis
STARTS = [start for start in product(range(SIZE), repeat=2) if start != (0, 0)]


class Torus(pettingzoo.ParallelEnv):
    """Red closes the distance along the first axis, blue along the second. A step costs 0.05, and meeting brings 1."""

    def __init__(self) -> None:
        self.possible_agents = ["red", "blue"]
        self.spaces = Box(0.0, 1.0, (2 * SIZE,), np.float32), Discrete(len(MOVES))

    def observation_space(self, agent: str) -> Box:
        """Returns that of the distances along both axes, one-hot."""
        return self.spaces[0]

    def action_space(self, agent: str) -> Discrete:
        """Returns that of the moves."""
        return self.spaces[1]

    def reset(self, seed: int = 0, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        """Starts the game number `seed` of the 48 there are; returns what both see."""
        self.agents, self.steps = list(self.possible_agents), 0
        self.distance = list(STARTS[seed % len(STARTS)])
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions: Agents) -> tuple[Agents, Agents, Agents, Agents, Agents]:
        """Moves both; returns what they see, their rewards, and whether they have met or time is up."""
        for axis, agent in enumerate(self.possible_agents):
            self.distance[axis] = (self.distance[axis] + MOVES[actions[agent]]) % SIZE
        self.steps += 1
        met = self.distance == [0, 0]
        late = not met and self.steps == LIMIT
        if met or late:
            self.agents = []
        infos: Agents = {agent: {} for agent in self.possible_agents}
        return self._seen(), *(dict.fromkeys(self.possible_agents, value) for value in (met - 0.05, met, late)), infos

    def _seen(self) -> Agents:
        return dict.fromkeys(self.possible_agents, np.eye(SIZE, dtype=np.float32)[self.distance].reshape(-1))


def make_env(name: str) -> pettingzoo.ParallelEnv:
    """Returns an environment."""
    return Torus() if name == "torus" else pettingzoo.make("parallel", name)


def q_networks(env: pettingzoo.ParallelEnv) -> dict[str, nn.Module]:
    """Returns a network for each agent, which values its actions."""

    def network(agent: str) -> nn.Module:
        inputs = int(np.prod(env.observation_space(agent).shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, env.action_space(agent).n))

    return {agent: network(agent) for agent in env.possible_agents}


def greedy(network: nn.Module, obs: np.ndarray) -> int:
    """Returns the action that a network values most."""
    return int(network(torch.as_tensor(obs, dtype=torch.float32)[None]).argmax())


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    env, rng = make_env(args.env), np.random.default_rng(ctx.seed)
    networks = q_networks(env)
    writer = ParallelWriter({agent: ctx.writer(name=agent) for agent in networks})
    while not ctx.stopped:
        obs, _ = env.reset(seed=int(rng.integers(2**31)))
        writer.reset(obs)
        total, length = 0.0, 0
        while env.agents and not ctx.stopped:
            actions = {}
            for agent in env.agents:
                ctx.pull_weights(networks[agent], name=agent)  # one atomic read when there is nothing newer
                anything = int(rng.integers(env.action_space(agent).n))
                actions[agent] = anything if rng.random() < args.epsilon else greedy(networks[agent], obs[agent])
            obs, rewards, terminations, truncations, _ = env.step(actions)
            writer.step(actions, obs, rewards, terminations, truncations)
            total, length = total + sum(rewards.values()) / len(networks), length + 1
        if not env.agents:
            ctx.record(episode_return=total, episode_length=length)


class Learner:
    """Double DQN (van Hasselt et al. 2016) for each agent by itself."""

    def __init__(self, networks: dict[str, nn.Module], args: Args) -> None:
        self.networks, self.args, self.steps = networks, args, 0
        self.targets = copy.deepcopy(networks)
        self.optimizer = torch.optim.Adam([p for q in networks.values() for p in q.parameters()], args.learning_rate)

    def __call__(self, batches: dict[str, tr.ReplayBatch]) -> dict[str, Tensor]:
        """Makes a step from a batch of each agent; returns the TD errors."""
        losses, errors = [], {}
        for agent, batch in batches.items():
            network, obs, next_obs = self.networks[agent], batch["obs"].float(), batch["next_obs"].float()
            with torch.no_grad():
                best = network(next_obs).argmax(-1, keepdim=True)
                goal = batch["reward"] + batch["discount"] * self.targets[agent](next_obs).gather(-1, best).squeeze(-1)
            q = network(obs).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
            losses.append((batch["weight"] * F.huber_loss(q, goal, reduction="none")).mean())
            errors[agent] = goal - q.detach()
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.args.target_every == 0:
            for agent, network in self.networks.items():
                self.targets[agent].load_state_dict(network.state_dict())
        return errors


@torch.no_grad()
def evaluate(networks: dict[str, nn.Module], args: Args) -> float:
    """Returns the mean return of an agent over greedy episodes."""
    env, total = make_env(args.env), 0.0
    for episode in range(args.eval_episodes):
        obs, _ = env.reset(seed=args.seed + episode)
        while env.agents:
            obs, rewards, *_ = env.step({agent: greedy(networks[agent], obs[agent]) for agent in env.agents})
            total += sum(rewards.values())
    return float(total / args.eval_episodes / len(networks))


def main(args: Args) -> None:
    """Learns until an agent's mean return is high enough."""
    torch.set_num_threads(1)  # the networks are small, and the explorers want the other cores
    torch.manual_seed(args.seed)
    env = make_env(args.env)
    learner = Learner(q_networks(env), args)
    weights = {agent: tr.SharedWeights(network) for agent, network in learner.networks.items()}
    view, limiter = tr.Transitions(args.n_step, args.gamma), tr.MinSize(args.learning_starts)
    options = {"view": view, "sampler": tr.Prioritized(), "limiter": limiter, "name": args.env}
    buffers = buffers_for(env, args.capacity, seed=args.seed, **options)
    # One ratio is enough: what holds the explorers back holds all their agents back.
    buffers[env.possible_agents[0]].limiter = tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts)
    work = partial(explore, args=args)
    pool = ExplorerPool(work, args.num_explorers, buffers, weights, backend=args.backend, seed=args.seed)
    curves = SummaryWriter(f"runs/multi_agent-seed{args.seed}", purge_step=0) if args.tensorboard else None
    began = time.monotonic()
    replay = AsyncReplay(pool, learner, learner.networks, batch_size=args.batch_size, publish_every=args.publish_every)
    with replay:
        for step in replay.steps(args.total_steps):
            if step % args.eval_every == 0:
                mean_return, stats = evaluate(learner.networks, args), replay.stats()
                solved = mean_return >= args.solved_at
                line = {"step": step, "mean_return": round(mean_return, 4), "explorers": len(stats.explorers)}
                line |= {"rows": {agent: buffer.inserted for agent, buffer in stats.buffers.items()}}
                line |= {"seconds": round(time.monotonic() - began, 1), "solved": solved}
                print(json.dumps(line), flush=True)
                if curves:
                    curves.add_scalar("charts/mean_return", mean_return, step)
                    curves.flush()
                if solved:
                    break


if __name__ == "__main__":
    main(tyro.cli(Args))
