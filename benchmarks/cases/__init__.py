"""The cases: each module measures one thing and yields its lines."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from benchmarks.cases.contest import measure_contest
from benchmarks.cases.gather import measure_gather
from benchmarks.cases.kills import measure_kills
from benchmarks.cases.loader import measure_loader
from benchmarks.cases.memory import measure_memory
from benchmarks.cases.rows import measure_rows
from benchmarks.cases.trajectories import measure_trajectories
from benchmarks.cases.tree import measure_tree
from benchmarks.line import Line
from benchmarks.plan import Plan
from benchmarks.workload import WORKLOADS

Case = Callable[[Plan], Iterator[Line]]

CASES: Mapping[str, Case] = {
    **{workload.name: partial(measure_rows, workload) for workload in WORKLOADS},
    "gather": measure_gather,
    "trajectories": measure_trajectories,
    "tree": measure_tree,
    "loader": measure_loader,
    "contest": measure_contest,
    "kills": measure_kills,
    "memory": measure_memory,
}
"""Every case by the name that ``--only`` takes, which is also the section of its lines."""
