"""Resident memory a row takes: ``python -m benchmarks.footprint --peer NAME --workload NAME --capacity N``.

In a process of its own, where a small buffer has first paid for imports and compilation. It prints one JSON number.
"""

import argparse
import gc
import json

from benchmarks.machine import resident_bytes
from benchmarks.peers import fill_chunks
from benchmarks.peers.registry import CLASSES, peer_class
from benchmarks.workload import WORKLOADS


def measure(peer: str, workload_name: str, capacity: int) -> float:
    """Returns the growth of resident memory by a filled buffer, in bytes a row."""
    workload = next(workload for workload in WORKLOADS if workload.name == workload_name)
    make = peer_class(peer)
    small = make(workload, 1024)
    small.fill()
    small.close()
    for _ in fill_chunks(workload, capacity):
        break
    gc.collect()
    before = resident_bytes()
    full = make(workload, capacity)
    full.fill()
    gc.collect()
    return (resident_bytes() - before) / capacity


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.footprint", description=__doc__)
    parser.add_argument("--peer", required=True, choices=list(CLASSES))
    parser.add_argument("--workload", required=True, choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--capacity", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps(measure(options.peer, options.workload, options.capacity)))
