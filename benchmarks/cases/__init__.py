"""The cases: each module measures one thing and yields its lines."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from benchmarks.cases.call import measure_call
from benchmarks.cases.checkpoint import measure_checkpoint
from benchmarks.cases.compat import measure_compat
from benchmarks.cases.contest import measure_contest
from benchmarks.cases.gather import measure_gather
from benchmarks.cases.gpu import measure_gpu
from benchmarks.cases.imports import measure_imports
from benchmarks.cases.kills import measure_kills
from benchmarks.cases.loader import measure_loader
from benchmarks.cases.memory import measure_memory
from benchmarks.cases.monitor import measure_monitor
from benchmarks.cases.overload import measure_overload
from benchmarks.cases.queueing import measure_queue
from benchmarks.cases.ragged import measure_ragged
from benchmarks.cases.ray import measure_ray
from benchmarks.cases.recovery import measure_recovery
from benchmarks.cases.remote import measure_remote
from benchmarks.cases.rewrite import measure_rewrite
from benchmarks.cases.rollouts import measure_rollouts
from benchmarks.cases.rows import measure_rows
from benchmarks.cases.sac import measure_sac
from benchmarks.cases.shards import measure_shards
from benchmarks.cases.staleness_sim import measure_staleness_sim
from benchmarks.cases.trajectories import measure_trajectories
from benchmarks.cases.transports import measure_transports
from benchmarks.cases.tree import measure_tree
from benchmarks.cases.upkeep import measure_upkeep
from benchmarks.line import Line
from benchmarks.plan import Plan
from benchmarks.workload import WORKLOADS

Case = Callable[[Plan], Iterator[Line]]

CASES: Mapping[str, Case] = {
    **{workload.name: partial(measure_rows, workload) for workload in WORKLOADS},
    "gather": measure_gather,
    "trajectories": measure_trajectories,
    "tree": measure_tree,
    "call": measure_call,
    "loader": measure_loader,
    "gpu": measure_gpu,
    "upkeep": measure_upkeep,
    "rewrite": measure_rewrite,
    "imports": measure_imports,
    "checkpoint": measure_checkpoint,
    "contest": measure_contest,
    "overload": measure_overload,
    "queue": measure_queue,
    "ragged": measure_ragged,
    "kills": measure_kills,
    "memory": measure_memory,
    "recovery": measure_recovery,
    "ray": measure_ray,
    "remote": measure_remote,
    "shards": measure_shards,
    "transports": measure_transports,
    "compat": measure_compat,
    "monitor": measure_monitor,
}
"""The cases by their names on the command line, which are also the sections of their lines."""

LONG_CASES: Mapping[str, Case] = {
    "sac": measure_sac,
    "staleness_sim": measure_staleness_sim,
    "rollouts": measure_rollouts,
}
"""Cases that take so long that they are measured only when they are named."""
