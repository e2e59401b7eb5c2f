"""Resident memory a row takes: ``python -m benchmarks.footprint --peer NAME --workload NAME --capacity N``.

In a process of its own, where a small buffer has first paid for imports and compilation. It prints one JSON number.
"""

import argparse
import json

import torchreplay as tr
from benchmarks.episodes import FRAMES, STACKED, linked_buffer
from benchmarks.machine import resident_bytes
from benchmarks.peers import Peer, fill_chunks
from benchmarks.peers.registry import PEERS
from benchmarks.workload import WORKLOADS, Workload

MEASURED = (*WORKLOADS, FRAMES)
"""Rows, and frames that are stored once: those only torchreplay has."""


def measure(peer: str, workload_name: str, capacity: int) -> float:
    """Returns the growth of resident memory by a filled buffer, in bytes a row."""
    workload = next(workload for workload in MEASURED if workload.name == workload_name)
    _filled(peer, workload, 1024).close()
    for _ in fill_chunks(workload, capacity):
        break
    before = resident_bytes()
    full = _filled(peer, workload, capacity)
    full.sample(1)
    grown = resident_bytes() - before
    full.close()
    return grown / capacity


def _filled(peer: str, workload: Workload, capacity: int) -> Peer | tr.ReplayBuffer:
    if workload is FRAMES:
        return linked_buffer(FRAMES, capacity, STACKED)
    buffer = PEERS[peer](workload, capacity)
    buffer.fill()
    return buffer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.footprint", description=__doc__)
    parser.add_argument("--peer", required=True, choices=list(PEERS))
    parser.add_argument("--workload", required=True, choices=[workload.name for workload in MEASURED])
    parser.add_argument("--capacity", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps(measure(options.peer, options.workload, options.capacity)))
