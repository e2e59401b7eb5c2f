"""Two policies that only succeed together, each with a replay buffer of its own.

Red and blue stand on a torus and are to meet. Red can only move along one axis, blue only along the other, so neither
gets anywhere alone. Explorers run both policies side by side and write each one's steps into its buffer. The learner
draws a batch from each, makes a step of double DQN for each, and publishes the weights of both. `AsyncReplay` keeps the
explorers, the two buffers, the two sets of weights and the learner together, and its `stats()` say how they are doing.

    python examples/multi_agent.py --seed 1
"""

from __future__ import annotations

import copy
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from command_line import parse
from torch import Tensor, nn

import torchreplay as tr
from torchreplay.ray import AsyncReplay, ExplorerContext, ExplorerPool


@dataclass
class Args:
    """Two policies, one buffer each: independent double DQN on a torus."""

    seed: int = 0
    """seed of the networks, the draws and the explorers"""
    total_steps: int = 5_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 250
    """learner steps between two evaluations"""
    solved_at: float = 0.87
    """mean greedy return that ends the run; 0.8833 is the best there is"""

    num_explorers: int = 2
    """explorer processes"""
    backend: str = "process"
    """what explorers run on: process, or ray"""
    epsilon: float = 0.3
    """share of random actions"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.95
    """discount of one step"""

    capacity: int = 20_000
    """steps that each buffer holds"""
    learning_starts: int = 500
    """transitions to wait for before the first learner step"""
    samples_per_insert: float = 16.0
    """how often each transition is drawn on average; whoever is ahead of this waits"""

    batch_size: int = 128
    """transitions in a batch, of each policy"""
    learning_rate: float = 1e-3
    """of Adam"""
    target_every: int = 50
    """learner steps between two copies into the target networks"""
    publish_every: int = 10
    """learner steps between two publications of the weights"""


POLICIES = ("red", "blue")
SIZE = 7  # of the torus, in each direction
LIMIT = 12  # steps in a game
MOVES = (0, 1, -1)

SPEC = {
    "obs": tr.Field((2 * SIZE,)),
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}


class Torus:
    """The game: red closes the distance along the first axis, blue along the second.

    Each step costs both 0.05, and meeting brings both 1. Both see the distance along each axis, one-hot.
    """

    def reset(self, distance: tuple[int, int]) -> np.ndarray:
        """Starts a game with the two that far apart; returns what both see."""
        self.distance, self.steps = list(distance), 0
        return self._observation()

    def step(self, actions: dict[str, int]) -> tuple[np.ndarray, float, bool, bool]:
        """Moves both; returns what they see, the reward of each, and whether they have met or time is up."""
        for axis, policy in enumerate(POLICIES):
            self.distance[axis] = (self.distance[axis] + MOVES[actions[policy]]) % SIZE
        self.steps += 1
        met = self.distance == [0, 0]
        return self._observation(), met - 0.05, met, not met and self.steps == LIMIT

    def _observation(self) -> np.ndarray:
        return np.eye(SIZE, dtype=np.float32)[self.distance].reshape(-1)


STARTS = [start for start in product(range(SIZE), repeat=2) if start != (0, 0)]


class QNetwork(nn.Sequential):
    """Values of the three moves, `[..., 14]` to `[..., 3]`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2 * SIZE, 64), nn.ReLU(), nn.Linear(64, len(MOVES)))


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    torus, rng = Torus(), np.random.default_rng(ctx.seed)
    networks = {policy: QNetwork().requires_grad_(False) for policy in POLICIES}
    writers = {policy: ctx.writer(name=policy) for policy in POLICIES}
    while not ctx.stopped:
        obs, over, episode_return = torus.reset(STARTS[rng.integers(len(STARTS))]), False, 0.0
        for writer in writers.values():
            writer.reset(obs=obs)
        while not over:
            actions = {}
            for policy, network in networks.items():
                ctx.pull_weights(network, name=policy)
                greedy = rng.random() >= args.epsilon
                actions[policy] = int(network(torch.from_numpy(obs)).argmax()) if greedy else int(rng.integers(3))
            obs, reward, terminated, truncated = torus.step(actions)
            for policy, writer in writers.items():
                writer.step(obs=obs, action=actions[policy], reward=reward, terminated=terminated, truncated=truncated)
            over, episode_return = terminated or truncated, episode_return + reward
        ctx.record(episode_return=episode_return, episode_length=torus.steps)


class Learner:
    """Double DQN for each policy by itself; to each the other one is a part of the game."""

    def __init__(self, args: Args) -> None:
        self.args, self.steps = args, 0
        self.networks = {policy: QNetwork() for policy in POLICIES}
        self.targets = copy.deepcopy(self.networks)
        parameters = [p for network in self.networks.values() for p in network.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=args.learning_rate)

    def __call__(self, batches: dict[str, tr.ReplayBatch]) -> dict[str, Tensor]:
        """Makes a step from a batch of each policy; returns the TD errors."""
        losses, errors = [], {}
        for policy, batch in batches.items():
            network, target = self.networks[policy], self.targets[policy]
            with torch.no_grad():
                best = network(batch["next_obs"]).argmax(-1, keepdim=True)
                goal = batch["reward"] + batch["discount"] * target(batch["next_obs"]).gather(-1, best).squeeze(-1)
            q = network(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
            losses.append((batch["weight"] * F.huber_loss(q, goal, reduction="none")).mean())
            errors[policy] = goal - q.detach()
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.args.target_every == 0:
            for policy, network in self.networks.items():
                self.targets[policy].load_state_dict(network.state_dict())
        return errors


@torch.no_grad()
def evaluate(networks: dict[str, nn.Module]) -> float:
    """Returns the mean return of the greedy policies over all starts."""
    returns = []
    for start in STARTS:
        torus, over, total = Torus(), False, 0.0
        obs = torus.reset(start)
        while not over:
            actions = {policy: int(network(torch.from_numpy(obs)).argmax()) for policy, network in networks.items()}
            obs, reward, terminated, truncated = torus.step(actions)
            over, total = terminated or truncated, total + reward
        returns.append(total)
    return float(np.mean(returns))


def main(args: Args) -> None:
    """Learns to meet."""
    torch.set_num_threads(1)  # the networks are small, and the explorers want the other cores
    torch.manual_seed(args.seed)
    learner = Learner(args)
    weights = {policy: tr.SharedWeights(network) for policy, network in learner.networks.items()}
    # One limiter is enough: every game writes as many rows into the one buffer as into the other.
    limiters = {
        "red": tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
        "blue": tr.MinSize(max(args.learning_starts // 2, 1)),
    }
    buffers = {
        policy: tr.ReplayBuffer(
            SPEC,
            args.capacity,
            sampler=tr.Prioritized(),
            view=tr.Transitions(args.n_step, args.gamma),
            limiter=limiters[policy],
            seed=args.seed,
            name=policy,
        )
        for policy in POLICIES
    }
    pool = ExplorerPool(
        partial(explore, args=args), args.num_explorers, buffers, weights, backend=args.backend, seed=args.seed
    )
    replay = AsyncReplay(pool, learner, learner.networks, batch_size=args.batch_size, publish_every=args.publish_every)
    began = time.monotonic()
    with replay:
        for step in replay.steps(args.total_steps):
            if step % args.eval_every == 0:
                mean_return = evaluate(learner.networks)
                line = {
                    "step": step,
                    "mean_return": round(mean_return, 4),
                    "seconds": round(time.monotonic() - began, 1),
                }
                print(json.dumps(line), flush=True)
                if mean_return >= args.solved_at:
                    break
        stats = replay.stats()
    print(
        f"{stats.rows_per_second:,.0f} rows/s from {len(stats.explorers)} explorers, {stats.items_per_second:,.0f} "
        f"items/s learned from, {stats.weight_syncs:,} pulls of weights; milliseconds a step: "
        + ", ".join(f"{part} {timing.mean_ms:.2f}" for part, timing in stats.timings.items()),
        file=sys.stderr,
    )


if __name__ == "__main__":
    main(parse(Args))
