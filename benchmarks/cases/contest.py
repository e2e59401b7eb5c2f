"""Two explorers flat out against one learner, torchreplay beside cpprb's shared buffer."""

from collections import Counter
from collections.abc import Iterator

from benchmarks.child import ChildError, run_module
from benchmarks.line import Line
from benchmarks.peers.registry import SHARED, installed
from benchmarks.plan import Plan
from benchmarks.workload import SMALL

CHUNKS = (64, 1)
BATCH_SIZE = 512
LIMIT = 60.0


def measure_contest(plan: Plan) -> Iterator[Line]:
    """Yields batches and rows a second, measured at once, for each chunk size.

    A round that fails or hangs counts as nothing done, and a note says why.
    """
    peers = [name for name in SHARED if name in installed()]
    for chunk in CHUNKS:
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
        failures: list[str] = []
        for _ in range(plan.contest_rounds):
            for name in peers:
                figures[name].append(_round(name, chunk, plan, failures))
        for quantity in ("batches", "rows"):
            samples = {name: [figure[quantity] for figure in rounds] for name, rounds in figures.items()}
            wording = "single appends" if chunk == 1 else f"chunks of {chunk}"
            note = "; ".join(f"{count} rounds of {text}" for text, count in Counter(failures).items())
            yield Line("contest", f"{quantity}, {wording}", "/s", samples, higher_is_better=True, note=note)


def _round(peer: str, chunk: int, plan: Plan, failures: list[str]) -> dict[str, float]:
    options = {
        "peer": peer,
        "chunk": chunk,
        "batch_size": BATCH_SIZE,
        "capacity": plan.capacity(SMALL.capacity),
        "seconds": plan.contest_seconds,
    }
    try:
        figures: dict[str, float] = run_module("benchmarks.contest", options, LIMIT + plan.contest_seconds)
        return figures
    except ChildError as error:
        failures.append(f"{peer}: {str(error).splitlines()[-1]}")
        return {"batches": 0.0, "rows": 0.0}
