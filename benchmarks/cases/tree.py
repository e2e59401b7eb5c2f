"""The priority tree alone: from C++, from Python, and beside other trees."""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

import torchreplay as tr
from benchmarks.line import OURS, Line
from benchmarks.native import BATCH_SIZE, NativeTree
from benchmarks.plan import Plan
from benchmarks.workload import td_errors
from torchreplay.checking.timing import Candidate, interleave

CAPACITIES = (100_000, 1_000_000, 10_000_000)
POOL = 64
NANOSECONDS = 1e9
FROM_PYTHON, BINARY = "PriorityTree", "binary tree"
Index = np.ndarray[Any, np.dtype[np.int64]]


def measure_tree(plan: Plan) -> Iterator[Line]:
    """Yields nanoseconds an item for batches of 256 draws or updates, all trees full of exponential priorities."""
    for full in CAPACITIES:
        capacity = plan.capacity(full)
        natives = {OURS: NativeTree(capacity), BINARY: NativeTree(capacity, binary=True)}
        sampling = [Candidate(name, tree.sample, BATCH_SIZE) for name, tree in natives.items()]
        updating = [Candidate(name, tree.update, BATCH_SIZE) for name, tree in natives.items()]
        for make in (_priority_tree, *([_segment_tree] if find_spec("tianshou") else [])):
            sample, update = make(capacity)
            sampling.append(sample)
            updating.append(update)
        for verb, candidates in (("sample", sampling), ("update", updating)):
            seconds = interleave(candidates, plan.rounds, plan.seconds)
            samples = {name: [value * NANOSECONDS for value in values] for name, values in seconds.items()}
            yield Line("tree", f"{verb} {BATCH_SIZE} of {full:,}", "ns", samples)
        for tree in natives.values():
            tree.close()


def _priority_tree(capacity: int) -> tuple[Candidate, Candidate]:
    """The same tree through its public Python class; the difference is the cost of the call."""
    tree = tr.PriorityTree(capacity)
    tree.set(torch.arange(capacity), torch.from_numpy(td_errors(capacity) ** 0.6))
    pool = [(torch.from_numpy(index), torch.from_numpy(leaves)) for index, leaves in _updates(capacity)]

    def sample(n: int) -> None:
        for _ in range(n):
            tree.sample(BATCH_SIZE)

    return Candidate(FROM_PYTHON, sample, BATCH_SIZE), Candidate(FROM_PYTHON, _setter(tree.set, pool), BATCH_SIZE)


def _segment_tree(capacity: int) -> tuple[Candidate, Candidate]:
    from tianshou.data import SegmentTree

    tree = SegmentTree(capacity)
    tree[np.arange(capacity)] = td_errors(capacity) ** 0.6
    generator = np.random.default_rng(0)
    strata = np.arange(BATCH_SIZE)

    def sample(n: int) -> None:
        for _ in range(n):
            tree.get_prefix_sum_idx((strata + generator.random(BATCH_SIZE)) * (tree.reduce() / BATCH_SIZE))

    update = _setter(tree.__setitem__, _updates(capacity))
    return Candidate("tianshou", sample, BATCH_SIZE), Candidate("tianshou", update, BATCH_SIZE)


def _updates(capacity: int) -> list[tuple[Index, Any]]:
    generator = np.random.default_rng(0)
    return [(generator.integers(0, capacity, BATCH_SIZE), td_errors(BATCH_SIZE, seed) ** 0.6) for seed in range(POOL)]


def _setter(set_leaves: Callable[[Any, Any], object], pool: Sequence[tuple[Any, Any]]) -> Callable[[int], None]:
    def run(n: int) -> None:
        for index, leaves in islice(cycle(pool), n):
            set_leaves(index, leaves)

    return run
