"""Ape-X on CartPole-v1 with explorers on other nodes of a Ray cluster.

The learner, the explorers' function and the network are those of apex_cartpole.py, and so is every call: on another
node than the buffer's, `ctx.writer()` is a remote writer and `ctx.weights` are fetched when there are newer ones.

By itself the program starts a cluster of its own on this machine: a head, where the buffer and the learner are, and two
more nodes for the explorers. On a real one, run it where the learner is to be and say where the cluster is. With
`--shards` the explorers' nodes have a buffer each, which they write to without a message, and the learner draws from
all of them as from one.

    python examples/cluster_apex.py --seed 1
    python examples/cluster_apex.py --shards
    python examples/cluster_apex.py --address auto
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import apex_cartpole
import numpy as np
import ray
from command_line import parse
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import torchreplay as tr
from torchreplay.ray import ExplorerContext, ShardedReplay


@dataclass
class Args(apex_cartpole.Args):
    """Ape-X double DQN on CartPole-v1, with explorers on the other nodes of a Ray cluster."""

    plot: str = "cluster_apex.png"
    """file for the picture of the run; empty for none"""
    address: str = ""
    """of a Ray cluster that runs; empty starts one on this machine"""
    nodes: int = 2
    """nodes of explorers, of a cluster that is started here"""
    shards: bool = False
    """whether each of them has a buffer of its own, of which the learner sees one"""


class Recording(ExplorerContext):
    """A context that keeps the last returns for whoever asks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.returns: deque[float] = deque(maxlen=100)

    def record(self, *, episode_return: float, episode_length: int) -> None:
        """Keeps the episode's return."""
        super().record(episode_return=episode_return, episode_length=episode_length)
        self.returns.append(episode_return)


class Explorer:
    """A Ray actor that explores: the buffer and the weights it is given are those of its node."""

    def __init__(self, *args: Any) -> None:
        self.ctx = Recording(*args)

    def run(self, args: apex_cartpole.Args) -> None:
        """Explores until the buffer is stopped."""
        try:
            apex_cartpole.explore(self.ctx, args)
        except tr.Stopped:
            pass
        finally:
            self.ctx.close()

    def mean_return(self) -> float:
        """The mean of the last returns; NaN before the first."""
        return float(np.mean(self.ctx.returns)) if self.ctx.returns else float("nan")


class Explorers:
    """Explorers on every node but this one, in turn."""

    def __init__(self, args: Args, buffer: tr.ReplayBuffer | ShardedReplay, weights: tr.SharedWeights) -> None:
        self.args, self.buffer, self.weights = args, buffer, weights
        self.actors: list[Any] = []
        self.runs: list[Any] = []

    def start(self) -> None:
        """Starts them; does nothing the second time."""
        if self.actors:
            return
        nodes = other_nodes()
        remote = ray.remote(Explorer)
        for i in range(self.args.num_explorers):
            place = NodeAffinitySchedulingStrategy(nodes[i % len(nodes)], soft=False)
            options = {"num_cpus": 0, "max_concurrency": 2, "scheduling_strategy": place}
            seed = int(np.random.SeedSequence(self.args.seed, spawn_key=(i,)).generate_state(1)[0])
            context = (self.buffer, self.weights, i, self.args.num_explorers, seed)
            self.actors.append(remote.options(**options).remote(*context))
        self.stats()  # returns when all are there, and raises when one cannot come up
        plain = apex_cartpole.Args(**{name: getattr(self.args, name) for name in vars(apex_cartpole.Args())})
        self.runs = [actor.run.remote(plain) for actor in self.actors]

    def stop(self) -> None:
        """Ends them all."""
        self.buffer.stop()
        ray.wait(self.runs, num_returns=max(1, len(self.runs)), timeout=10) if self.runs else None
        for actor in self.actors:
            ray.kill(actor)
        self.actors, self.runs = [], []

    def stats(self) -> list[Any]:
        """Each one's recent mean return."""
        returns = [actor.mean_return.remote() for actor in self.actors]
        return [SimpleNamespace(mean_return=mean) for mean in ray.get(returns)]


def other_nodes() -> list[str]:
    """Returns Ray's ids of all nodes but this one."""
    here = ray.get_runtime_context().get_node_id()
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]


@contextmanager
def cluster(args: Args) -> Iterator[None]:
    """Connects to the cluster, or to one of its own that goes when the program ends."""
    ray.cloudpickle.register_pickle_by_value(apex_cartpole)  # which other machines do not have
    quiet = {"logging_level": logging.ERROR}
    if args.address:
        with ray.init(args.address, **quiet):
            yield
        return
    own = Cluster()
    try:
        for _ in range(1 + args.nodes):
            own.add_node(num_cpus=args.num_explorers, object_store_memory=100 * 2**20, include_dashboard=False)
        with ray.init(own.address, **quiet):
            yield
    finally:
        own.shutdown()


def main(args: Args) -> None:
    """Learns CartPole."""
    with cluster(args):
        make_buffer = partial(ShardedReplay, nodes=other_nodes()) if args.shards else tr.ReplayBuffer
        apex_cartpole.main(args, Explorers, make_buffer)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # Lightning's remarks would fall into the live panel
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    main(parse(Args))
