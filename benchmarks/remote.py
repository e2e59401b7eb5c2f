"""A remote writer, from one Ray node to another: ``python -m benchmarks.remote``, a process of its own.

Two nodes on this machine, one explorer on the second. Beside its Atari rows, blocks of the size of its chunks cross by
nothing but Ray: put into the object store there, and taken from it here. It prints one JSON object.
"""

import argparse
import json
import time
from collections import deque
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import torchreplay as tr
from benchmarks.line import OURS
from benchmarks.peers.torchreplay import row_spec
from benchmarks.workload import ATARI, SMALL, Workload
from torchreplay.ray.remote.send_buffer import CHUNK_BYTES, IN_FLIGHT

STORE = "object store"
POOL = 64


class Sink:
    """Takes blocks, and does nothing with them."""

    def take(self, block: Any) -> int:
        """Returns the block's size: it is here."""
        return len(block)


class Explorer:
    """Writes as fast as it can."""

    def write(self, buffer: tr.ReplayBuffer, workload: Workload, seconds: float) -> float:
        """Returns the rows a second that were acknowledged."""
        rows = workload.single_rows(POOL)
        with buffer.writer() as writer:
            for obs, action, reward, next_obs, done in rows:  # the ingest is there when they are
                writer.append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)
            writer.flush()
            start, written = time.perf_counter(), 0
            while time.perf_counter() < start + seconds:
                for obs, action, reward, next_obs, done in rows:
                    writer.append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)
                written += POOL
            writer.flush()
            return written / (time.perf_counter() - start)

    def send(self, sink: Any, seconds: float) -> float:
        """Returns the bytes a second that have crossed, as many blocks under way as a writer has."""
        block = np.zeros(CHUNK_BYTES, np.uint8)
        ray.get(sink.take.remote(block))
        pending: deque[Any] = deque()
        start, taken = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            pending.append(sink.take.remote(ray.put(block)))
            if len(pending) >= IN_FLIGHT:
                taken += int(ray.get(pending.popleft()))
        for answer in pending:
            taken += int(ray.get(answer))
        return taken / (time.perf_counter() - start)


def _measure(rounds: int, seconds: float, shrink: int) -> dict[str, dict[str, list[float]]]:
    cluster: Any = Cluster()
    nodes = [
        cluster.add_node(num_cpus=2, object_store_memory=512 * 2**20, include_dashboard=False, **settings)
        for settings in ({"_system_config": {"worker_niceness": 0}}, {})
    ]
    ray.init(cluster.address, log_to_driver=False)
    places = [{"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(n.node_id, False)} for n in nodes]
    sink: Any = ray.remote(Sink).options(**places[0]).remote()
    explorer: Any = ray.remote(Explorer).options(**places[1]).remote()
    small, atari = (
        tr.ReplayBuffer(row_spec(w), w.capacity // s, seed=0) for w, s in ((SMALL, shrink), (ATARI, 10 * shrink))
    )
    figures: dict[str, dict[str, list[float]]] = {"small rows": {OURS: []}, "Atari rows": {OURS: [], STORE: []}}
    for _ in range(rounds):
        figures["small rows"][OURS].append(ray.get(explorer.write.remote(small, SMALL, seconds)))
        rows = ray.get(explorer.write.remote(atari, ATARI, seconds))
        figures["Atari rows"][OURS].append(rows * ATARI.row_bytes)
        figures["Atari rows"][STORE].append(ray.get(explorer.send.remote(sink, seconds)))
    ray.shutdown()
    cluster.shutdown()
    return figures


def main() -> None:
    """Measures, and prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--shrink", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(_measure(options.rounds, options.seconds, options.shrink)))


if __name__ == "__main__":
    main()
