"""Ape-X double DQN on CartPole-v1 with explorers on other nodes of a Ray cluster.

The calls are those of apex.py; the pool only gets a placement. On another node `ctx.writer()` is a remote writer, whose
rows come over TCP, and the weights are fetched when there are newer ones. New transitions have the largest
priority so far.

By itself the program starts a cluster of its own on this machine. The buffer and the learner are on its head, the
explorers on two more nodes, which share no memory with it. On a real one, run it where the learner is to be and say
where the cluster is. With `--shards` each of the explorers' nodes has a part of the buffer. Explorers write to that
part without a message, and the learner draws from all parts as from one buffer.

    python examples/cluster.py --seed 1
    python examples/cluster.py --shards
    python examples/cluster.py --address auto
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np
import ray
import torch
import torch.nn.functional as F
import tyro
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr
from torchreplay.ray import ExplorerContext, ExplorerPool, ShardedReplay


@dataclass
class Args:
    """Ape-X double DQN on CartPole-v1, with explorers on the other nodes of a Ray cluster."""

    seed: int = 0
    """seed of the network, the draws, the explorers and the evaluations"""
    total_steps: int = 30_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 250
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """greedy episodes in an evaluation"""
    solved_at: float = 475.0
    """mean return of an evaluation that ends the run"""
    tensorboard: bool = True
    """whether to write curves to runs/cluster-seed<seed>"""

    address: str = ""
    """of a Ray cluster that runs; empty starts one on this machine"""
    nodes: int = 2
    """nodes of explorers, of a cluster that is started here"""
    shards: bool = False
    """whether each of them has a part of the buffer"""
    num_explorers: int = 4
    """explorers, in turn over the nodes"""
    epsilon: float = 0.4
    """base of the explorers' epsilons: epsilon ** (1 + 7 i / (num_explorers - 1))"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""

    capacity: int = 50_000
    """observations that the buffer holds"""
    learning_starts: int = 1_000
    """transitions to wait for before the first learner step"""
    samples_per_insert: float = 16.0
    """how often each transition is drawn on average; whoever is ahead of this waits"""
    alpha: float = 0.6
    """how strongly TD errors are preferred: 0 uniform, 1 proportional"""
    beta: float = 0.4
    """initial correction of that bias, annealed to 1 over total_steps"""

    batch_size: int = 256
    """transitions in a batch"""
    learning_rate: float = 1e-3
    """of Adam"""
    target_every: int = 50
    """learner steps between two copies into the target network"""
    publish_every: int = 10
    """learner steps between two publications of the weights"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


class QNetwork(nn.Sequential):
    """Action values of CartPole's states, `[..., 4]` to `[..., 2]`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own, on another node than the buffer."""
    torch.set_num_threads(1)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    rng = np.random.default_rng(ctx.seed)
    epsilon = args.epsilon ** (1 + 7 * ctx.index / max(ctx.num_explorers - 1, 1))
    policy = QNetwork().requires_grad_(False)
    writer = ctx.writer()

    obs, _ = env.reset(seed=ctx.seed)
    writer.reset(obs=obs)
    while not ctx.stopped:
        ctx.pull_weights(policy)  # one comparison when there is nothing newer
        greedy = int(policy(torch.from_numpy(obs)).argmax())
        action = int(rng.integers(2)) if rng.random() < epsilon else greedy
        obs, reward, terminated, truncated, info = env.step(action)
        reward = (1 - args.gamma) * float(reward)  # returns then lie in [0, 1], where the Huber loss is quadratic
        writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        if terminated or truncated:
            ctx.record(episode_return=info["episode"]["r"], episode_length=info["episode"]["l"])
            obs, _ = env.reset()
            writer.reset(obs=obs)


def td_errors(q: nn.Module, target: nn.Module, batch: tr.ReplayBatch) -> Tensor:
    """Returns the errors that double DQN (van Hasselt et al. 2016) makes small, `[B]`."""
    with torch.no_grad():
        best = q(batch["next_obs"]).argmax(-1, keepdim=True)
        value = target(batch["next_obs"]).gather(-1, best).squeeze(-1)
        goal = batch["reward"] + batch["discount"] * value  # the discount is 0 where the episode terminated
    return goal - q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)


def learn(q: nn.Module, pool: ExplorerPool, buffer: tr.ReplayBuffer, weights: tr.SharedWeights, args: Args) -> None:
    """The learner's loop."""
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)
    curves = SummaryWriter(f"runs/cluster-seed{args.seed}", purge_step=0) if args.tensorboard else None
    monitor, began = tr.Monitor(buffer, curves), time.monotonic()
    for step, batch in enumerate(tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps), start=1):
        td_error = td_errors(q, target, batch)
        loss = (batch["weight"] * F.huber_loss(td_error, torch.zeros_like(td_error), reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        buffer.update_priorities(batch, td_error)

        if step % args.target_every == 0:
            target.load_state_dict(q.state_dict())
        if step % args.publish_every == 0:
            weights.publish(q)
        monitor.step(step)
        if step % args.eval_every == 0:
            mean_return = evaluate(q, args.eval_episodes, seed=args.seed + step).mean()
            stats, solved = buffer.stats(), bool(mean_return >= args.solved_at)
            line = {"step": step, "mean_return": mean_return, "rows": stats.inserted}
            line |= {"samples_per_insert": round(stats.samples_per_insert, 2)}
            line |= {"seconds": round(time.monotonic() - began, 1), "solved": solved}
            print(json.dumps(line), flush=True)
            if curves:
                curves.add_scalar("charts/mean_return", mean_return, step)
                for index, explorer in enumerate(pool.stats()):
                    curves.add_scalar(f"charts/mean_return_of_explorer_{index}", explorer.mean_return, step)
                curves.flush()
            if solved:
                break


@torch.no_grad()
def evaluate(q: nn.Module, episodes: int, seed: int) -> np.ndarray:
    """Returns the returns of greedy episodes, which are played side by side."""
    envs = gym.make_vec("CartPole-v1", num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, rewards, terminated, truncated, _ = envs.step(q(torch.from_numpy(obs)).argmax(-1).numpy())
        returns += rewards * running
        running &= ~(terminated | truncated)
    return returns


def other_nodes() -> list[str]:
    """Returns Ray's ids of all nodes but this one that are alive."""
    here = ray.get_runtime_context().get_node_id()
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]


def place(index: int) -> NodeAffinitySchedulingStrategy:
    """Returns where an explorer runs; asked whenever one is started, or started again."""
    nodes = other_nodes()
    return NodeAffinitySchedulingStrategy(nodes[index % len(nodes)], soft=False)


@contextmanager
def cluster(args: Args) -> Iterator[None]:
    """Connects to the cluster, or to one of its own that goes when the program ends."""
    if args.address:
        with ray.init(args.address, logging_level=logging.ERROR):
            yield
        return
    own = Cluster()
    try:
        for _ in range(1 + args.nodes):
            own.add_node(num_cpus=args.num_explorers, object_store_memory=100 * 2**20, include_dashboard=False)
        with ray.init(own.address, logging_level=logging.ERROR):
            yield
    finally:
        own.shutdown()


def main(args: Args) -> None:
    """Learns CartPole."""
    torch.set_num_threads(1)  # the network is small, and the explorers want the other cores
    torch.manual_seed(args.seed)
    with cluster(args):
        nodes = other_nodes()
        if not nodes:
            sys.exit("the explorers run on other nodes, and this cluster has no other: add one, or give no --address")
        q = QNetwork()
        weights = tr.SharedWeights(q)
        make_buffer = partial(ShardedReplay, nodes=nodes) if args.shards else tr.ReplayBuffer
        buffer = make_buffer(
            tr.spec_from_env(gym.make("CartPole-v1")),
            args.capacity,
            view=tr.Transitions(args.n_step, args.gamma),
            sampler=tr.Prioritized(args.alpha, tr.LinearSchedule(args.beta, 1.0, args.total_steps)),
            limiter=tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
            seed=args.seed,
            name="CartPole",
        )
        work = partial(explore, args=args)
        with ExplorerPool(work, args.num_explorers, buffer, weights, placement=place, seed=args.seed) as pool:
            learn(q, pool, buffer, weights, args)


if __name__ == "__main__":
    main(tyro.cli(Args))
