"""One learner, and shards on its node and on others: ``python -m benchmarks.shard_places``, a process of its own.

The nodes are Ray's, on this machine. In each round of a line all candidates take turns. Where the only shard is on
the learner's node, a `ReplayBuffer` of as many rows stands beside it. Where shards are elsewhere, a bare socket and an
actor of Ray's bring as many bytes as a batch has. They do so one batch at a time, into memory that is there. Then it
measures how long a learner with steps waits and asks for batches of three nodes, and of a `ReplayBuffer`. It prints one
JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import torchreplay as tr
from benchmarks.line import OURS
from benchmarks.peers.torchreplay import row_spec
from benchmarks.transports import Ask, Tcp, asking
from benchmarks.workload import ATARI, SMALL, Workload
from torchreplay.ray import ShardedReplay

BUFFER, TCP, RAY = "ReplayBuffer", "plain TCP", "Ray alone"
PLACES: Mapping[str, Sequence[int]] = {
    "one node": (0,),
    "two nodes": (0, 1),
    "one node, elsewhere": (1,),
    "three nodes": (0, 1, 2),
}
"""The nodes of the shards; the learner is on the first one."""
SIZES: Mapping[str, tuple[Workload, int, int]] = {
    "small rows, 256": (SMALL, 256, 20_000),
    "Atari rows, 64": (ATARI, 64, 2_000),
}
"""What rows, how many a batch has, and how many there are in all."""
CHUNK = 500
STEP = 5e-3
"""Seconds of the step of a learner that waits for its batches."""
STORE = 2**28
"""Bytes of each node's object store."""
WARM_UP = 5
"""Batches before each measurement, more than are under way."""

Turn = Callable[[], object]
"""Draws a batch, or does what stands for it."""

Figures = dict[str, dict[str, list[float]]]
"""Samples by line and candidate."""


class Sender:
    """Has a batch to send."""

    def batch(self, nbytes: int) -> Any:
        """Returns it."""
        return np.zeros(nbytes, np.uint8)


def _fill(buffer: Any, workload: Workload, rows: int) -> None:
    for first in range(0, rows, CHUNK):
        buffer.extend(**workload.rows(min(CHUNK, rows - first), first))


@contextmanager
def _sharded(nodes: Sequence[str], workload: Workload, rows: int) -> Iterator[ShardedReplay]:
    """Gives a buffer over these nodes, which is full."""
    with ShardedReplay(row_spec(workload), rows, sampler=tr.Prioritized(), seed=0, nodes=nodes) as replay:
        fill = ray.remote(_fill)
        ray.get([fill.options(**_on(node)).remote(replay, workload, rows // len(nodes)) for node in nodes])
        replay.sample(1, timeout=60)
        yield replay


def _on(node: str) -> dict[str, Any]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _turns(buffer: Any, batch_size: int) -> dict[str, Turn]:
    """Returns the ways in which a learner draws from a buffer, without and with feedback."""
    ahead, td = iter(tr.ReplayDataset(buffer, batch_size, prefetch=2)), torch.rand(batch_size)
    draws: dict[str, Callable[[], tr.ReplayBatch]] = {
        "sample": lambda: buffer.sample(batch_size),
        "prefetch=2": lambda: next(ahead),
    }
    fed_back: dict[str, Turn] = {
        f"{name}, feedback": lambda draw=draw: buffer.update_priorities(draw(), td)  # type: ignore[misc]
        for name, draw in draws.items()
    }
    return {**draws, **fed_back}


def rate(turn: Turn, seconds: float) -> float:
    """Returns how many turns there are a second, after a few that do not count."""
    for _ in range(WARM_UP):
        turn()
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        turn()
        count += 1
    return count / (time.perf_counter() - start)


def _bytes_of_a_batch(sender: Any, ask: Ask, nbytes: int) -> dict[str, Turn]:
    """Returns what brings as many bytes from another node, and does nothing else."""
    room = np.empty(nbytes, np.uint8)
    return {
        TCP: lambda: ask(room.data),
        RAY: lambda: np.copyto(room, ray.get(sender.batch.remote(nbytes))),
    }


def _waits(replay: Any, batch_size: int, seconds: float) -> tuple[float, float]:
    """Returns the percentages of its time that a learner with steps asks for batches when none is ready, and at all.

    The latter takes in the TD errors that it gives back.
    """
    dataset, td = tr.ReplayDataset(replay, batch_size, prefetch=2), torch.rand(batch_size)
    batches, asked, waited = iter(dataset), 0.0, 0.0
    for turn in range(WARM_UP + round(seconds / STEP)):
        if turn == WARM_UP:
            start, asked, waited = time.perf_counter(), 0.0, 0.0
        is_ready = bool(turn % 2) or dataset.ready > 0  # half of the turns: a look brings code to the caches
        before = time.perf_counter()
        batch = next(batches)
        given = time.perf_counter()
        time.sleep(STEP)  # as if a device computed: the cores here are those of three nodes
        done = time.perf_counter()
        replay.update_priorities(batch, td)
        if turn % 2:
            asked += given - before + time.perf_counter() - done
        waited += 0.0 if is_ready else given - before
    whole = time.perf_counter() - start
    return 200 * waited / whole, 200 * asked / whole


def _beside_a_buffer(name: str, replay: ShardedReplay, buffer: Any, n: int, options: argparse.Namespace) -> Figures:
    """Returns the batches a second of both, in each way to draw `n` items."""
    ours, theirs = _turns(replay, n), _turns(buffer, n)
    figures: Figures = {f"{name}: {way}": {OURS: [], BUFFER: []} for way in ours}
    for _ in range(options.rounds):
        for way in ours:
            for candidate, turn in ((OURS, ours[way]), (BUFFER, theirs[way])):
                figures[f"{name}: {way}"][candidate].append(rate(turn, options.seconds))
    return figures


def _beside_bytes(
    name: str, replay: ShardedReplay, others: Mapping[str, Turn], n: int, options: argparse.Namespace
) -> Figures:
    """Returns the batches a second, in each way to draw `n` items, beside those of what just brings their bytes."""
    ours = _turns(replay, n)
    figures: Figures = {f"{name}: {way}": {OURS: [], **{other: [] for other in others}} for way in ours}
    for _ in range(options.rounds):
        # The same bytes, however they are asked for: once in a round.
        once = {other: rate(turn, options.seconds) for other, turn in others.items()}
        for way, turn in ours.items():
            for candidate, figure in {OURS: rate(turn, options.seconds), **once}.items():
                figures[f"{name}: {way}"][candidate].append(figure)
    if not replay.stats().wire_bytes:
        raise RuntimeError("no connection to a shard was made: batches came by calls of Ray's")
    return figures


def _measure(nodes: Sequence[str], options: argparse.Namespace) -> Figures:
    """Returns the samples of each line, by candidate."""
    figures: Figures = {}
    sender = ray.remote(Sender).options(**_on(nodes[1])).remote()
    with asking(Tcp) as ask:
        for (place, which), (size, (workload, n, rows)) in product(PLACES.items(), SIZES.items()):
            name = f"{size}, {place}"
            with (
                _sharded([nodes[at] for at in which], workload, rows) as replay,
                tr.ReplayBuffer(row_spec(workload), rows, sampler=tr.Prioritized(), seed=0) as buffer,
            ):
                if which == (0,):
                    _fill(buffer, workload, rows)
                    figures |= _beside_a_buffer(name, replay, buffer, n, options)
                else:
                    figures |= _beside_bytes(
                        name, replay, _bytes_of_a_batch(sender, ask, n * workload.row_bytes), n, options
                    )
                if len(which) == len(nodes):
                    _fill(buffer, workload, rows)
                    both = {OURS: replay, BUFFER: buffer}
                    shares = [
                        {candidate: _waits(each, n, 2 * options.seconds) for candidate, each in both.items()}
                        for _ in range(options.rounds)
                    ]
                    for at, line in enumerate(("waits: asks when none is ready", "asks and feeds back, steps of 5 ms")):
                        figures[f"{name}: {line}"] = {
                            candidate: [each[candidate][at] for each in shares] for candidate in both
                        }
    return figures


def main() -> None:
    """Measures, and prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shard_places", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.25)
    options = parser.parse_args()
    cluster = Cluster(shutdown_at_exit=True)
    # Otherwise whatever else runs on the machine comes before Ray's processes.
    settings: list[dict[str, Any]] = [{"_system_config": {"worker_niceness": 0}}, {}, {}]
    nodes = [
        cluster.add_node(num_cpus=2, object_store_memory=STORE, include_dashboard=False, **setting)
        for setting in settings
    ]
    ray.init(address=cluster.address, log_to_driver=False)
    ids = [node.node_id for node in nodes]
    if ids[0] != ray.get_runtime_context().get_node_id():
        raise RuntimeError("the learner is not on the first node, on which it counts as being")
    figures = _measure(ids, options)
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
