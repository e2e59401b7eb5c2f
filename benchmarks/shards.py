"""Nodes that share a replay buffer beside nodes with one each: ``python -m benchmarks.shards``, its own process.

The nodes are Ray's, on this machine. On each a learner draws Atari batches as fast as it can, all at once: from the
shards of all nodes, or from a buffer of its own. It prints one JSON object.
"""

import argparse
import json
import time
from itertools import islice
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import torchreplay as tr
from benchmarks.line import OURS
from benchmarks.peers.torchreplay import row_spec
from benchmarks.workload import ATARI
from torchreplay.ray import ShardedReplay

ALONE = "a buffer each"
BATCH_SIZE = 512
CHUNK = 500
STORE = 2**29
"""Bytes of each node's object store: some batches of 29 MB, and what is under way."""
WARM_UP = 3


class Learner:
    """Draws as fast as it can; a process of its own.

    Args:
        replay: The buffer of both nodes.
        rows: To write to this node's shard, and to a buffer of its own.
    """

    def __init__(self, replay: ShardedReplay, rows: int) -> None:
        alone = tr.ReplayBuffer(row_spec(ATARI), rows, sampler=tr.Prioritized(), seed=0)
        for seed in range(rows // CHUNK):
            chunk = ATARI.rows(CHUNK, seed)
            replay.extend(**chunk)
            alone.extend(**chunk)
        self._sources: dict[str, tr.ReplayBuffer | ShardedReplay] = {OURS: replay, ALONE: alone}

    def draw(self, candidate: str, seconds: float) -> float:
        """Returns batches a second."""
        batches = iter(tr.ReplayDataset(self._sources[candidate], BATCH_SIZE))
        for _ in islice(batches, WARM_UP):
            pass
        start, drawn = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            next(batches)
            drawn += 1
        return drawn / (time.perf_counter() - start)


def _measure(nodes: list[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the batches a second of all learners, one on each of these nodes."""
    rates: dict[str, list[float]] = {OURS: [], ALONE: []}
    rows = len(nodes) * options.rows
    with ShardedReplay(row_spec(ATARI), rows, sampler=tr.Prioritized(), seed=0, nodes=nodes) as replay:
        make: Any = ray.remote(Learner)
        learners = [
            make.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                replay, options.rows
            )
            for node in nodes
        ]
        for _ in range(options.rounds):
            for candidate, samples in rates.items():
                samples.append(sum(ray.get([one.draw.remote(candidate, options.seconds) for one in learners])))
    return rates


def main() -> None:
    """Measures, and prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=4000)
    options = parser.parse_args()
    cluster = Cluster(shutdown_at_exit=True)
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=STORE, include_dashboard=False) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    ids = [node.node_id for node in nodes]
    figures = {
        f"batches of {BATCH_SIZE}, two nodes": _measure(ids, options),
        f"batches of {BATCH_SIZE}, one node": _measure(ids[:1], options),
    }
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
