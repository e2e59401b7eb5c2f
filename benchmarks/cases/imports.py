"""What `import torchreplay` costs after `import torch`, beside the imports of its peers."""

from collections import defaultdict
from collections.abc import Iterator

from benchmarks.child import run_module
from benchmarks.line import Line
from benchmarks.peers.registry import installed
from benchmarks.plan import Plan

LIMIT = 120.0


def measure_imports(plan: Plan) -> Iterator[Line]:
    """Yields the milliseconds of an import, in a fresh process each time."""
    samples: dict[str, list[float]] = defaultdict(list)
    for _ in range(max(plan.rounds // 6, 1)):
        for package in installed():
            samples[package].append(float(run_module("benchmarks.importing", {"package": package}, LIMIT)))
    yield Line("imports", "import, after torch", "ms", samples)
