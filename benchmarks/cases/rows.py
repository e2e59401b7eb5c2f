"""Writing, sampling and feedback on a full buffer, for one kind of row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import TypeVar

import torchreplay as tr
from benchmarks.line import OURS, Line
from benchmarks.machine import require_memory
from benchmarks.peers import Peer, PrioritizedPeer
from benchmarks.peers.registry import PEERS, installed
from benchmarks.peers.torchreplay import PRIORITIZED, TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.workload import SMALL, Row, Rows, Workload
from torchreplay.checking.timing import Candidate, interleave
from torchreplay.schema.samplers import Initial

MICROSECONDS = 1e6
LANES = 50
POOL = 64
"""Prepared rows, chunks or batches that a loop cycles through, so that it does not write the same cache lines again."""
NOTES = {"sample 256": "stable_baselines3 draws uniformly"}
MAX_SEEN: Initial = "max_seen"
WITH_REPLACEMENT = "with replacement"
KEPT_BYTES = 128 << 20
"""Memory that the kept batches of one peer may take."""

P = TypeVar("P", bound=Peer)
Operations = Mapping[str, Callable[[P], Candidate]]
"""For each line the function that makes a peer's loop."""


def measure_rows(workload: Workload, plan: Plan) -> Iterator[Line]:
    """Yields the lines of one kind of row; the buffers are filled to capacity first."""
    peers = _filled_peers(workload, plan)
    prioritized = [peer for peer in peers if isinstance(peer, PrioritizedPeer)]
    single = workload.single_rows(POOL)
    try:
        yield from _lines(workload, peers, _operations(workload, single), plan)
        yield from _lines(workload, prioritized, _prioritized_operations(workload, single), plan)
        if workload is SMALL:
            yield from _lines_of_starts(prioritized, plan)
            yield from _lines_of_epochs(plan)
    finally:
        for peer in peers:
            peer.close()


def _lines(workload: Workload, peers: Sequence[P], operations: Operations[P], plan: Plan) -> Iterator[Line]:
    for name, make in operations.items():
        seconds = interleave([make(peer) for peer in peers], plan.rounds, plan.seconds)
        samples = {peer: [value * MICROSECONDS for value in values] for peer, values in seconds.items()}
        yield Line(workload.name, name, "us", samples, note=NOTES.get(name, ""))


def _lines_of_starts(peers: Sequence[PrioritizedPeer], plan: Plan) -> Iterator[Line]:
    """What it costs that new items start from the largest priority that is held, and not the largest ever seen."""
    sampler = replace(PRIORITIZED, initial=MAX_SEEN)
    seen = TorchreplayPeer(SMALL, plan.capacity(SMALL.capacity), sampler, MAX_SEEN)
    try:
        seen.fill()
        pair = [*(peer for peer in peers if peer.name == OURS), seen]
        operations = _prioritized_operations(SMALL, SMALL.single_rows(POOL))
        lines = ("update 256", "8 appends + sample + update 256")
        yield from _lines(SMALL, pair, {f"{name}, {MAX_SEEN}": operations[name] for name in lines}, plan)
    finally:
        seen.close()


def _lines_of_epochs(plan: Plan) -> Iterator[Line]:
    """What it costs that no item comes twice before all others have come once."""
    capacity = plan.capacity(SMALL.capacity)
    samplers = {OURS: tr.Uniform(replacement=False), WITH_REPLACEMENT: tr.Uniform()}
    pair = [TorchreplayPeer(SMALL, capacity, sampler, name) for name, sampler in samplers.items()]
    try:
        for peer in pair:
            peer.fill()
        yield from _lines(SMALL, pair, {"sample 256, without replacement": lambda peer: _sample(peer, 256)}, plan)
    finally:
        for peer in pair:
            peer.close()


def _filled_peers(workload: Workload, plan: Plan) -> list[Peer]:
    capacity = plan.capacity(workload.capacity)
    peers = []
    for name in installed():
        require_memory(capacity * workload.row_bytes, f"{workload.name} rows of one buffer")
        peer = PEERS[name](workload, capacity)
        peer.fill()
        peers.append(peer)
    return peers


def _operations(workload: Workload, single: Sequence[Row]) -> Operations[Peer]:
    chunks = [workload.rows(LANES, seed) for seed in range(8)]
    return {
        "append one row": lambda peer: _append(peer, single),
        f"extend by {LANES} rows": lambda peer: _extend(peer, chunks),
        "sample 256": lambda peer: _sample(peer, 256),
    }


def _prioritized_operations(workload: Workload, single: Sequence[Row]) -> Operations[PrioritizedPeer]:
    kept = max(4, min(POOL, KEPT_BYTES // (256 * workload.row_bytes)))
    return {
        "update 256": lambda peer: _update(peer, 256, kept),
        "sample + update 256": lambda peer: _sample_and_update(peer, 256),
        "sample + update 512": lambda peer: _sample_and_update(peer, 512),
        "8 appends + sample + update 256": lambda peer: _training_step(peer, single),
    }


def _append(peer: Peer, rows: Sequence[Row]) -> Candidate:
    append = peer.append

    def run(n: int) -> None:
        for _ in range(n):
            for obs, action, reward, next_obs, done in rows:
                append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

    return Candidate(peer.name, run, calls=len(rows))


def _extend(peer: Peer, chunks: Sequence[Rows]) -> Candidate:
    extend = peer.extend

    def run(n: int) -> None:
        for rows in islice(cycle(chunks), n):
            extend(**rows)

    return Candidate(peer.name, run)


def _sample(peer: Peer, batch_size: int) -> Candidate:
    sample = peer.sample

    def run(n: int) -> None:
        for _ in range(n):
            sample(batch_size)

    return Candidate(peer.name, run)


def _update(peer: PrioritizedPeer, batch_size: int, batches: int) -> Candidate:
    update = peer.update
    pool = [(peer.keep(batch_size), peer.td(batch_size, seed)) for seed in range(batches)]

    def run(n: int) -> None:
        for batch, td in islice(cycle(pool), n):
            update(batch, td)

    return Candidate(peer.name, run)


def _sample_and_update(peer: PrioritizedPeer, batch_size: int) -> Candidate:
    sample, update = peer.sample, peer.update
    pool = [peer.td(batch_size, seed) for seed in range(POOL)]

    def run(n: int) -> None:
        for td in islice(cycle(pool), n):
            update(sample(batch_size), td)

    return Candidate(peer.name, run)


def _training_step(peer: PrioritizedPeer, rows: Sequence[Row]) -> Candidate:
    """What a learner of eight environments does between two gradient steps, with the cost of taking in new rows."""
    append, sample, update = peer.append, peer.sample, peer.update
    pool = [peer.td(256, seed) for seed in range(POOL)]

    def run(n: int) -> None:
        for td in islice(cycle(pool), n):
            for obs, action, reward, next_obs, done in rows[:8]:
                append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)
            update(sample(256), td)

    return Candidate(peer.name, run)
