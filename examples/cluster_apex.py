"""Ape-X on CartPole-v1 with explorers on other nodes of a Ray cluster.

The learner, the explorers' function and the network are those of apex_cartpole.py, and so is every call. The pool gets
a placement for its explorers. There `ctx.writer()` is a remote writer, and the weights are fetched when there are newer
ones.

By itself the program starts a cluster of its own on this machine. The buffer and the learner are on its head, the
explorers on two more nodes. On a real one, run it where the learner is to be and say where the cluster is. With
`--shards` the explorers' nodes have a buffer each, which they write to without a message, and the learner draws from
all of them as from one.

    python examples/cluster_apex.py --seed 1
    python examples/cluster_apex.py --shards
    python examples/cluster_apex.py --address auto
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import apex_cartpole
import ray
from command_line import parse
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import torchreplay as tr
from torchreplay.ray import ExplorerPool, ShardedReplay


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


def far_explorers(args: Args, buffer: tr.ReplayBuffer | ShardedReplay, weights: tr.SharedWeights) -> ExplorerPool:
    """Returns explorers on every node but this one, in turn; each on its own node's shard where there are shards."""

    def place(index: int) -> NodeAffinitySchedulingStrategy:
        nodes = other_nodes()  # those that are alive when an explorer is started, or started again
        return NodeAffinitySchedulingStrategy(nodes[index % len(nodes)], soft=False)

    explore = partial(apex_cartpole.explore, args=args)
    return ExplorerPool(explore, args.num_explorers, buffer, weights, seed=args.seed, placement=place)


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
        if not other_nodes():
            sys.exit("the explorers run on other nodes, and this cluster has no other: add one, or give no --address")
        make_buffer = partial(ShardedReplay, nodes=other_nodes()) if args.shards else tr.ReplayBuffer
        apex_cartpole.main(args, far_explorers, make_buffer)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # Lightning's remarks would fall into the live panel
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    main(parse(Args))
