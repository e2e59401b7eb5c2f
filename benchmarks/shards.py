"""Nodes that share a replay buffer beside nodes with one each: ``python -m benchmarks.shards``, its own process.

The nodes are Ray's, on this machine. On each a learner draws Atari batches as fast as it can, all at once: from the
shards of all nodes, or from a buffer of its own. What Ray lets through is measured beside it: half of each batch from
a buffer of the learner's own, and for the other half as many bytes that an actor on the other node just sends, copied
into the batch. It prints one JSON object.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import torchreplay as tr
from benchmarks.line import OURS
from benchmarks.peers.torchreplay import row_spec
from benchmarks.workload import ATARI
from torchreplay.ray import ShardedReplay

ALONE = "a buffer each"
RAY = "Ray alone"
AHEAD = 3
"""Blocks under way, as many as a dataset has rounds."""
BATCH_SIZE = 512
CHUNK = 500
STORE = 2**29
"""Bytes of each node's object store: some batches of 29 MB, and what is under way."""
WARM_UP = 3


class Sender:
    """Has half a batch to send."""

    def __init__(self) -> None:
        self._half = np.zeros(BATCH_SIZE // 2 * ATARI.row_bytes, np.uint8)

    def half(self) -> Any:
        """Returns it."""
        return self._half


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
        self._alone = alone
        self._sources: dict[str, tr.ReplayBuffer | ShardedReplay] = {OURS: replay, ALONE: alone}

    def _halves(self, sender: Any) -> Iterator[Any]:
        """Batches of which one half comes from the own buffer, and the other one as bytes from another node."""
        coming = deque(sender.half.remote() for _ in range(AHEAD))
        place = np.empty(BATCH_SIZE // 2 * ATARI.row_bytes, np.uint8)
        for half in tr.ReplayDataset(self._alone, BATCH_SIZE // 2):
            ray.wait(list(coming), num_returns=len(coming), timeout=0)  # those under way travel before they are needed
            np.copyto(place, ray.get(coming.popleft()))
            coming.append(sender.half.remote())
            yield half, place

    def draw(self, candidate: str, seconds: float, sender: Any = None) -> float:
        """Returns batches a second; `sender`: on the other node, for the candidate that is nothing but Ray."""
        batches = (
            iter(tr.ReplayDataset(self._sources[candidate], BATCH_SIZE)) if candidate != RAY else self._halves(sender)
        )
        for _ in islice(batches, WARM_UP):
            pass
        start, drawn = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            next(batches)
            drawn += 1
        return drawn / (time.perf_counter() - start)


def _on(node: str, kind: type) -> Any:
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=place)


def _measure(nodes: list[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the batches a second of all learners, one on each of these nodes."""
    rates: dict[str, list[float]] = {name: [] for name in (OURS, ALONE, RAY)[: len(nodes) + 1]}
    rows = len(nodes) * options.rows
    with ShardedReplay(row_spec(ATARI), rows, sampler=tr.Prioritized(), seed=0, nodes=nodes) as replay:
        learners = [_on(node, Learner).remote(replay, options.rows) for node in nodes]
        senders = [_on(node, Sender).remote() for node in nodes]
        for _ in range(options.rounds):
            for candidate, samples in rates.items():
                # Each takes from the next node's.
                pairs = zip(learners, senders[1:] + senders[:1], strict=True)
                draws = [one.draw.remote(candidate, options.seconds, sender) for one, sender in pairs]
                samples.append(sum(ray.get(draws)))
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
