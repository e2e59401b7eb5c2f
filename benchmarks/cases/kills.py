"""Deaths in the middle of writing and of drawing: who can go on, torchreplay beside cpprb's shared buffer."""

from collections.abc import Iterator

from benchmarks.child import run_module
from benchmarks.kills import VICTIMS
from benchmarks.line import Line
from benchmarks.peers.registry import SHARED, installed
from benchmarks.plan import Plan

LIMIT = 3.0
"""Seconds; calls that go on take milliseconds."""


def measure_kills(plan: Plan) -> Iterator[Line]:
    """Yields the share of deaths after which a learner, and another explorer, hang."""
    peers = [name for name in SHARED if name in installed()]
    for victim in VICTIMS:
        hangs = {name: _hangs(name, victim, plan.kills) for name in peers}
        for survivor in VICTIMS:
            samples = {name: [100 * counts[survivor] / plan.kills] for name, counts in hangs.items()}
            note = f"of {plan.kills} deaths each; a hang: {LIMIT:g} s without an end"
            yield Line("kills", f"{victim} killed: {survivor} hangs", "%", samples, note=note)


def _hangs(peer: str, victim: str, trials: int) -> dict[str, int]:
    options = {"peer": peer, "victim": victim, "trials": trials, "limit": LIMIT}
    hangs: dict[str, int] = run_module("benchmarks.kills", options, limit=60 + trials * (2 * LIMIT + 2))
    return hangs
