"""The same explorers as Ray actors and as plain processes: ``python -m benchmarks.pools``, a process of its own.

It prints one JSON object.
"""

import json
import time

import ray

import torchreplay as tr
from benchmarks.actor import parsed
from benchmarks.explorers import explore
from benchmarks.line import OURS
from benchmarks.peers.torchreplay import row_spec
from benchmarks.workload import SMALL
from torchreplay.ray import ExplorerPool
from torchreplay.ray.workers.resources import BackendName

EXPLORERS = 2
PLAIN = "plain processes"
BACKENDS: dict[str, BackendName] = {OURS: "ray", PLAIN: "process"}
WARM_ROWS = 100_000
"""Rows of each explorer before the first measured one."""


def rows_per_second(backend: BackendName, seconds: float, capacity: int) -> float:
    """Returns the rows a second of all explorers of a pool, once each of them writes."""
    with (
        tr.ReplayBuffer(row_spec(SMALL), capacity, seed=0) as buffer,
        ExplorerPool(explore, EXPLORERS, buffer, backend=backend, seed=0) as pool,
    ):
        while min(explorer.rows for explorer in pool.stats()) < WARM_ROWS:
            pool.check()
            time.sleep(0.05)
        start, rows = time.perf_counter(), buffer.stats().rows_written
        time.sleep(seconds)
        rows = buffer.stats().rows_written - rows
        return rows / (time.perf_counter() - start)


def main() -> None:
    """Measures, and prints the figures."""
    options = parsed("benchmarks.pools", __doc__)
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    figures: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for _ in range(options.rounds):
        for name, backend in BACKENDS.items():
            figures[name].append(rows_per_second(backend, options.seconds, options.capacity))
    ray.shutdown()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
