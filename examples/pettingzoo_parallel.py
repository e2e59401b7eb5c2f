"""Knights, archers and zombies of PettingZoo: four agents, each with a replay buffer and a Q-network of its own.

Agents die at different times. Each one's episode ends there, in its own buffer, and the others play on.

    python examples/pettingzoo_parallel.py --seed 1
"""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import dataclass
from statistics import mean

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # nothing is shown

import numpy as np
import pettingzoo
import torch
from command_line import parse
from torch import nn

import torchreplay as tr
from torchreplay.compat.pettingzoo import ParallelWriter, buffers_for


@dataclass
class Args:
    """Independent double DQNs that defend a gate against zombies."""

    seed: int = 0
    """seed of the environment, the networks and the draws"""
    episodes: int = 200
    """episodes to play"""
    report_every: int = 20
    """episodes in a line of the report"""

    capacity: int = 50_000
    """rows that each agent's buffer holds"""
    learning_starts: int = 500
    """rows of an agent before it learns"""
    learn_every: int = 4
    """environment steps between two updates"""
    batch_size: int = 64
    """transitions in a batch"""
    learning_rate: float = 5e-4
    """of Adam"""
    epsilon: float = 0.1
    """share of random actions"""


class Agent:
    """A double DQN with its buffer."""

    def __init__(self, buffer: tr.ReplayBuffer, actions: int, args: Args) -> None:
        self.buffer, self.args, self.actions, self.updates = buffer, args, actions, 0
        shape = buffer.spec["obs"].shape
        self.q, self.target = (
            nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 128), nn.ReLU(), nn.Linear(128, actions))
            for _ in range(2)
        )
        self.optimizer = torch.optim.Adam(self.q.parameters(), args.learning_rate)

    @torch.no_grad()
    def act(self, obs: np.ndarray, rng: np.random.Generator) -> int:
        """Returns the best action, or now and then a random one."""
        if rng.random() < self.args.epsilon:
            return int(rng.integers(self.actions))
        return int(self.q(torch.as_tensor(obs, dtype=torch.float32)[None]).argmax())

    def learn(self) -> None:
        """Makes one update."""
        if len(self.buffer) < self.args.learning_starts:
            return
        if self.updates % 250 == 0:
            self.target.load_state_dict(self.q.state_dict())
        self.updates += 1
        batch, rows = self.buffer.sample(self.args.batch_size), range(self.args.batch_size)
        obs, next_obs = batch["obs"].float(), batch["next_obs"].float()
        with torch.no_grad():
            value = self.target(next_obs)[rows, self.q(next_obs).argmax(1)]
        td = batch["reward"] + batch["discount"] * value - self.q(obs)[rows, batch["action"]]
        self.optimizer.zero_grad()
        (batch["weight"] * td.square()).mean().backward()
        self.optimizer.step()
        self.buffer.update_priorities(batch, td)


def main(args: Args) -> None:
    """Plays and learns, and prints a line of JSON now and then."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)
    env = pettingzoo.make("parallel", "butterfly/knights_archers_zombies-v11")
    buffers = buffers_for(
        env, args.capacity, view=tr.Transitions(n_step=3, gamma=0.97), sampler=tr.Prioritized(), seed=args.seed
    )
    agents = {name: Agent(buffer, int(env.action_space(name).n), args) for name, buffer in buffers.items()}
    kills, steps = deque[float](maxlen=args.report_every), 0
    with ParallelWriter(buffers) as writer:
        for episode in range(1, args.episodes + 1):
            obs, _ = env.reset(seed=args.seed + episode)
            writer.reset(obs)
            kills.append(0.0)
            while env.agents:
                actions = {name: agents[name].act(obs[name], rng) for name in env.agents}
                obs, rewards, terminations, truncations, _ = env.step(actions)
                writer.step(actions, obs, rewards, terminations, truncations)
                kills[-1] += sum(rewards.values())
                steps += 1
                if steps % args.learn_every == 0:
                    for agent in agents.values():
                        agent.learn()
            if episode % args.report_every == 0:
                print(json.dumps({"step": steps, "episodes": episode, "mean_return": round(mean(kills), 2)}))


if __name__ == "__main__":
    main(parse(Args))
