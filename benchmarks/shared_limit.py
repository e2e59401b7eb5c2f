"""A limiter that two learners share: ``python -m benchmarks.shared_limit``, a process of its own.

One node of Ray's, with one explorer and two learners in processes of their own. The learners draw as fast as the
limiter admits: from a `ShardedReplay`, whose limiter counts over all nodes, and from a `ReplayBuffer`. It prints one
JSON object: batches a second of both learners together.
"""

import argparse
import json
import threading
from typing import Any

import ray

import torchreplay as tr
from benchmarks.line import OURS
from benchmarks.peers.torchreplay import row_spec
from benchmarks.shard_places import BUFFER, STORE, rate
from benchmarks.workload import SMALL
from torchreplay.ray import ShardedReplay

BATCH_SIZE = 64
CAPACITY = 100_000
CHUNK = 50
LIMITER = tr.SamplesPerInsert(32, min_size=5000)
TIMEOUT = 60.0
"""Seconds that a batch may take at most."""
WAYS = {"sample": None, "prefetch=2": 2}


class Explorer:
    """Writes as fast as the limiters admit, to each buffer by a thread of its own."""

    def __init__(self, buffers: dict[str, Any]) -> None:
        self._leases = [buffer.expect_writers() for buffer in buffers.values()]
        for buffer in buffers.values():
            threading.Thread(target=self._write, args=(buffer,), daemon=True).start()

    def ready(self) -> None:
        """Returns when it writes."""

    def _write(self, buffer: Any) -> None:
        rows = SMALL.rows(CHUNK)
        while True:
            buffer.extend(**rows)


class Learner:
    """Draws as fast as the limiter admits."""

    def __init__(self, buffers: dict[str, Any]) -> None:
        self._turns = {
            (name, way): self._turn(buffer, prefetch)
            for name, buffer in buffers.items()
            for way, prefetch in WAYS.items()
        }

    def _turn(self, buffer: Any, prefetch: int | None) -> Any:
        if prefetch is None:
            return lambda: buffer.sample(BATCH_SIZE, timeout=TIMEOUT)
        return iter(tr.ReplayDataset(buffer, BATCH_SIZE, prefetch=prefetch, timeout=TIMEOUT)).__next__

    def draw(self, name: str, way: str, seconds: float) -> float:
        """Returns the batches a second."""
        return rate(self._turns[name, way], seconds)


def main() -> None:
    """Measures, and prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_limit", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    settings = {"worker_niceness": 0}  # otherwise whatever else runs on the machine comes before Ray's processes
    ray.init(
        num_cpus=3, object_store_memory=STORE, include_dashboard=False, log_to_driver=False, _system_config=settings
    )
    given: dict[str, Any] = {"sampler": tr.Prioritized(), "limiter": LIMITER, "seed": 0}
    figures: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    with (
        ShardedReplay(row_spec(SMALL), CAPACITY, **given) as replay,
        tr.ReplayBuffer(row_spec(SMALL), CAPACITY, **given) as buffer,
    ):
        buffers = {OURS: replay, BUFFER: buffer}
        explorer: Any = ray.remote(Explorer).options(num_cpus=0).remote(buffers)
        learners: list[Any] = [ray.remote(Learner).options(num_cpus=0).remote(buffers) for _ in range(2)]
        ray.get(explorer.ready.remote())
        for _ in range(options.rounds):
            for way, samples in figures.items():
                for name in buffers:
                    draws = [learner.draw.remote(name, way, options.seconds) for learner in learners]
                    samples.setdefault(name, []).append(sum(ray.get(draws)))
        for actor in (explorer, *learners):
            ray.kill(actor)
    ray.shutdown()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
