"""Programs written for other libraries: the replay part of a step, with the library and with its adapter."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from benchmarks.line import OURS, Line
from benchmarks.plan import Plan
from benchmarks.workload import SMALL, td_errors
from torchreplay.checking.timing import Candidate, interleave

MICROSECONDS = 1e6
CAPACITY = 100_000
BATCH_SIZE = 256
CHUNK = 100
"""Transitions that an explorer of the Ape-X program keeps before it hands them on."""

Work = Callable[[], object]


def measure_compat(plan: Plan) -> Iterator[Line]:
    """Yields the lines of each library that is installed."""
    if find_spec("cpprb") is not None:
        yield from _cpprb(plan)
    for library, name in {"stable_baselines3": "sb3", "torchrl": "torchrl", "tianshou": "tianshou"}.items():
        if find_spec(library) is not None:
            yield from getattr(import_module(f"benchmarks.cases.compat_{name}"), f"measure_{name}")(plan)


def line(name: str, works: Mapping[str, Work], plan: Plan, note: str = "") -> Line:
    """Returns a line of the time that each candidate's work takes."""
    seconds = interleave(
        [Candidate(candidate, _repeated(work)) for candidate, work in works.items()], plan.rounds, plan.seconds
    )
    samples = {candidate: [value * MICROSECONDS for value in values] for candidate, values in seconds.items()}
    return Line("compat", name, "us", samples, note=note)


def _repeated(work: Work) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            work()

    return run


# cpprb


def _cpprb(plan: Plan) -> Iterator[Line]:
    libraries = {OURS: import_module("torchreplay.compat.cpprb"), "cpprb": import_module("cpprb")}
    for kind in ("PrioritizedReplayBuffer", "MPPrioritizedReplayBuffer"):
        programs = {name: _CpprbProgram(library, kind, plan) for name, library in libraries.items()}
        for work in ("add", "sample", "update", "step", "explore"):
            works = {name: getattr(program, work) for name, program in programs.items()}
            yield line(f"cpprb {'MP' if kind.startswith('MP') else 'PER'}: {_CPPRB_NAMES[work]}", works, plan)


_CPPRB_NAMES = {
    "add": "add",
    "sample": f"sample {BATCH_SIZE}",
    "update": f"update {BATCH_SIZE}",
    "step": "add, sample, update",
    "explore": f"{CHUNK} adds, handed on",
}


class _CpprbProgram:
    """What a program does with a full buffer of cpprb's, or of the adapter's."""

    def __init__(self, library: Any, kind: str, plan: Plan) -> None:
        size = plan.capacity(CAPACITY)
        shape = {"shape": SMALL.shape}
        env_dict = {"obs": shape, "act": {}, "rew": {}, "next_obs": shape, "done": {}}
        names = ("obs", "act", "rew", "next_obs", "done")
        self._buffer = getattr(library, kind)(size, env_dict)
        self._local = library.ReplayBuffer(CHUNK, env_dict)
        rows = SMALL.rows(size)
        self._buffer.add(**dict(zip(names, rows.values(), strict=True)), priorities=td_errors(size))
        self._row = dict(zip(names, SMALL.single_rows(1)[0], strict=True))
        self._td = td_errors(BATCH_SIZE)
        self._indexes = self._buffer.sample(BATCH_SIZE)["indexes"].copy()

    def add(self) -> None:
        self._buffer.add(**self._row)

    def sample(self) -> None:
        self._buffer.sample(BATCH_SIZE)

    def update(self) -> None:
        self._buffer.update_priorities(self._indexes, self._td)

    def step(self) -> None:
        self._buffer.add(**self._row)
        sample = self._buffer.sample(BATCH_SIZE)
        self._buffer.update_priorities(sample["indexes"], self._td)

    def explore(self) -> None:
        for _ in range(CHUNK):
            self._local.add(**self._row)
        self._local.on_episode_end()
        self._buffer.add(**self._local.get_all_transitions())
        self._local.clear()
