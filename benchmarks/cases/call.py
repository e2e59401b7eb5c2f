"""Where the time of a small step goes: drawing 256 of a million small rows, and feeding their TD errors back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

from benchmarks.line import OURS, Line
from benchmarks.native import BATCH_SIZE, NativeTree
from benchmarks.peers import PrioritizedPeer
from benchmarks.peers.registry import cpprb, installed
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.workload import SMALL
from torchreplay.checking.timing import Candidate, interleave
from torchreplay.segment.waits import NEVER

POOL = 64
MICROSECONDS = 1e6
BETA = 0.4

# Loops, and what their differences are. The parts add up to SAMPLE + UPDATE.
SAMPLE, UPDATE = "sample", "update"
NATIVE_SAMPLE, NATIVE_UPDATE = "the native call in sample", "the native call in update"
REFILL = "sample into a given batch"
DRAWS, SETS = "draws from the tree alone", "updates of the tree alone"
PARTS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "tree: draw": ([DRAWS], []),
    "tree: update": ([SETS], []),
    "lock, gather, weights": ([NATIVE_SAMPLE, REFILL], [SAMPLE, DRAWS]),
    "making the tensors": ([SAMPLE], [REFILL]),
    "keys and TD errors of the feedback": ([NATIVE_UPDATE], [SETS]),
    "Python": ([SAMPLE, UPDATE], [NATIVE_SAMPLE, NATIVE_UPDATE]),
}
"""For each part the loops to add and those to subtract."""


def measure_call(plan: Plan) -> Iterator[Line]:
    """Yields the whole step, beside cpprb's, and its parts: differences between loops of the same round."""
    capacity = plan.capacity(SMALL.capacity)
    ours = TorchreplayPeer(SMALL, capacity)
    peers: list[PrioritizedPeer] = [ours, *([cpprb(SMALL, capacity)] if "cpprb" in installed() else [])]
    tree = NativeTree(capacity)
    try:
        for peer in peers:
            peer.fill()
        candidates = [Candidate(peer.name, partial(_step, peer, _tds(peer))) for peer in peers]
        seconds = interleave(candidates + _loops(ours, tree), plan.rounds, plan.seconds)
    finally:
        tree.close()
        for peer in peers:
            peer.close()
    micros = {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}
    yield Line("call", f"sample + update {BATCH_SIZE}", "us", {peer.name: micros[peer.name] for peer in peers})
    for name, (added, subtracted) in PARTS.items():
        terms = [*(micros[loop] for loop in added), *([-value for value in micros[loop]] for loop in subtracted)]
        yield Line("call", f"... {name}", "us", {OURS: [sum(values) for values in zip(*terms, strict=True)]})


def _loops(peer: TorchreplayPeer, tree: NativeTree) -> list[Candidate]:
    segment, batch = peer.buffer._segment, peer.sample(BATCH_SIZE)
    kept = [(peer.sample(BATCH_SIZE), td) for td in _tds(peer)]
    draws: Mapping[str, Callable[[], object]] = {
        SAMPLE: lambda: peer.sample(BATCH_SIZE),
        NATIVE_SAMPLE: lambda: segment.sample(BATCH_SIZE, BETA, NEVER, None),
        REFILL: lambda: peer.sample(BATCH_SIZE, out=batch),
    }
    updates: Mapping[str, Callable[[Any, Any], object]] = {
        UPDATE: peer.update,
        NATIVE_UPDATE: lambda drawn, td: segment.update(drawn["key"], td),
    }
    return [
        *(Candidate(name, partial(_draw, draw)) for name, draw in draws.items()),
        *(Candidate(name, partial(_update, update, kept)) for name, update in updates.items()),
        Candidate(DRAWS, tree.sample),
        Candidate(SETS, tree.update),
    ]


def _draw(draw: Callable[[], object], n: int) -> None:
    for _ in range(n):
        draw()


def _update(update: Callable[[Any, Any], object], kept: Sequence[tuple[Any, Any]], n: int) -> None:
    for drawn, td in islice(cycle(kept), n):
        update(drawn, td)


def _step(peer: PrioritizedPeer, tds: Sequence[Any], n: int) -> None:
    sample, update = peer.sample, peer.update
    for td in islice(cycle(tds), n):
        update(sample(BATCH_SIZE), td)


def _tds(peer: PrioritizedPeer) -> list[Any]:
    return [peer.td(BATCH_SIZE, seed) for seed in range(POOL)]
