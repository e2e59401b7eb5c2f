"""What stands around writing and drawing: a limiter, attaching from another process, looking at the figures."""

from collections.abc import Callable, Iterator

import torchreplay as tr
from benchmarks.line import OURS, Line
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from benchmarks.workload import SMALL
from torchreplay.checking.timing import Candidate, interleave

MICROSECONDS = 1e6
POOL = 64
FREE = "no limiter"
WIDE = tr.SamplesPerInsert(8.0, min_size=1 << 50)
"""Admits more rows than are ever written: what is left is the cost of asking."""


def measure_upkeep(plan: Plan) -> Iterator[Line]:
    """Yields the times of an append under a limiter, of attaching and of ``stats()``."""
    peers = {name: TorchreplayPeer(SMALL, plan.capacity(SMALL.capacity)) for name in (OURS, FREE)}
    try:
        for peer in peers.values():
            peer.fill()
        peers[OURS].buffer.limiter = WIDE
        seconds = interleave(
            [Candidate(name, _appends(peer), calls=POOL) for name, peer in peers.items()], plan.rounds, plan.seconds
        )
        samples = {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}
        yield Line("upkeep", "append one row under a limiter", "us", samples)
        ratios = [ours / free for ours, free in zip(samples[OURS], samples[FREE], strict=True)]
        yield Line("upkeep", "... times as long as without", "", {OURS: ratios})
        buffer = peers[FREE].buffer
        for name, run in {"attach": _attachments(buffer), "stats()": _looks(buffer)}.items():
            (values,) = interleave([Candidate(OURS, run)], plan.rounds, plan.seconds).values()
            yield Line("upkeep", name, "us", {OURS: [value * MICROSECONDS for value in values]})
    finally:
        for peer in peers.values():
            peer.close()


def _appends(peer: TorchreplayPeer) -> Callable[[int], None]:
    append, rows = peer.append, SMALL.single_rows(POOL)

    def run(n: int) -> None:
        for _ in range(n):
            for obs, action, reward, next_obs, done in rows:
                append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

    return run


def _attachments(buffer: tr.ReplayBuffer) -> Callable[[int], None]:
    handle = buffer.handle()

    def run(n: int) -> None:
        for _ in range(n):
            tr.ReplayBuffer.attach(handle).close()

    return run


def _looks(buffer: tr.ReplayBuffer) -> Callable[[int], None]:
    buffer.sample(1)

    def run(n: int) -> None:
        for _ in range(n):
            buffer.stats()

    return run
