"""Linked rows: what writing steps costs, and drawing n-step transitions, sequences and stacks of frames."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

import torchreplay as tr
from benchmarks.cases.frames import measure_frames
from benchmarks.cases.steps import measure_steps
from benchmarks.copies import repeat
from benchmarks.episodes import linked_buffer
from benchmarks.line import OURS, Line
from benchmarks.peers import Peer
from benchmarks.peers.registry import cpprb
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.workload import SMALL
from torchreplay.checking.timing import Candidate, interleave

MICROSECONDS = 1e6
CAPACITIES = (100_000, 1_000_000)
SEQUENCES = "Sequences(8) x 32"


def measure_trajectories(plan: Plan) -> Iterator[Line]:
    """Yields the lines of small rows, and then those of frames that are stored once."""
    yield from measure_steps(plan)
    yield from _transitions(plan)
    yield from _sequences(plan)
    yield from measure_frames(plan)


def _transitions(plan: Plan) -> Iterator[Line]:
    """3-step transitions built at the draw, beside single rows and beside cpprb's, which are stored ready-made."""
    capacity = plan.capacity(SMALL.capacity)
    rows = TorchreplayPeer(SMALL, capacity)
    rows.fill()
    sources: dict[str, tr.ReplayBuffer | Peer] = {
        OURS: linked_buffer(SMALL, capacity, tr.Transitions(n_step=3)),
        "Rows()": rows,
    }
    if find_spec("cpprb"):
        peer = cpprb(SMALL, capacity, n_step=3)
        peer.fill()
        sources[peer.name] = peer
    seconds = interleave(
        [Candidate(name, repeat(source.sample, [256])) for name, source in sources.items()], plan.rounds, plan.seconds
    )
    for source in sources.values():
        source.close()
    yield Line("trajectories", "sample 256, 3-step", "us", _microseconds(seconds))


def _sequences(plan: Plan) -> Iterator[Line]:
    """Sequences from a small and from a large buffer, in the same rounds: capacity must not matter."""
    buffers = {f"{full:,}": linked_buffer(SMALL, plan.capacity(full), tr.Sequences(8)) for full in CAPACITIES}
    seconds = interleave(
        [Candidate(name, repeat(buffer.sample, [32])) for name, buffer in buffers.items()], plan.rounds, plan.seconds
    )
    for buffer in buffers.values():
        buffer.close()
    for name, values in _microseconds(seconds).items():
        yield Line("trajectories", f"{SEQUENCES} of {name}", "us", {OURS: values})
    small, large = seconds.values()
    quotients = [many / few for few, many in zip(small, large, strict=True)]
    yield Line("trajectories", "... ten times as many rows", "times", {OURS: quotients})


def _microseconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}
