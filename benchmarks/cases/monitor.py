"""What it costs a run that somebody looks at it: `torchreplay watch` and `record` at ten looks a second.

``python -m benchmarks.cases.monitor --rounds N ...`` is a process of its own with a learner and two explorers flat out.
Commands that look are started once, and stopped and continued by signals: windows with and without them alternate. The
learner has a core of its own, and the explorers have the others. Where the system moves three busy processes between
two cores, their rates vary threefold, and one per cent cannot be seen. The commands may run on any core.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.child import run_module
from benchmarks.line import OURS, Line
from benchmarks.peers.torchreplay import row_spec
from benchmarks.plan import Plan
from benchmarks.workload import SMALL, td_errors

BATCH_SIZE = 512
CHUNK = 64
EXPLORERS = 2
POOL = 64
LIMIT = 120.0
NOBODY = "nobody looks"
WATCHED, RECORDED = "watch", "record"
MANY, SHORT = 8, 0.5
"""Windows of each kind for each round of a contest, and their length beside it. Other work changes little between short
ones."""

START_SECONDS = 60.0
"""In which a command has begun to look."""


def measure_monitor(plan: Plan) -> Iterator[Line]:
    """Yields batches and rows a second with and without somebody who looks, and the processor time of looks."""
    windows = MANY * plan.contest_rounds
    seconds = SHORT * plan.contest_seconds
    options = {"capacity": plan.capacity(SMALL.capacity), "windows": windows, "seconds": seconds}
    limit = LIMIT + 3 * windows * seconds
    figures: dict[str, dict[str, list[float]]] = run_module("benchmarks.cases.monitor", options, limit)
    for command in (WATCHED, RECORDED):
        for quantity in ("batches", "rows"):
            samples = {OURS: figures[command][quantity], NOBODY: figures[NOBODY][quantity]}
            yield Line("monitor", f"{quantity}, {command}", "/s", samples, higher_is_better=True)
        note = "of all that the cores have"
        yield Line("monitor", f"processor time, {command}", "%", {OURS: figures[command]["cpu"]}, note=note)


def run(capacity: int, windows: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Returns ``batches`` and ``rows`` a second and ``cpu`` in per cent of each window, by who looks."""
    import torchreplay as tr

    name = f"monitor {os.getpid()}"
    buffer = tr.ReplayBuffer(row_spec(SMALL), capacity, sampler=tr.Prioritized(), seed=0, name=name)
    buffer.extend(**SMALL.rows(min(capacity, 100_000)))
    fork = get_context("fork")
    cores = sorted(os.sched_getaffinity(0))
    busy = cores[1:] or cores  # those of the explorers
    explorers = [fork.Process(target=_explore, args=(buffer, index, busy), daemon=True) for index in range(EXPLORERS)]
    for explorer in explorers:
        explorer.start()
    learn = _learner(buffer)
    with tempfile.TemporaryDirectory() as directory:
        commands = {WATCHED: _start("watch", name), RECORDED: _start("record", f"{directory}/run", name)}
        try:
            os.sched_setaffinity(0, cores[:1])
            _begin(commands, learn)
            return _measure(commands, learn, windows, seconds, len(cores))
        finally:
            for command in commands.values():
                command.kill()
            for explorer in explorers:
                explorer.kill()


def _measure(
    commands: dict[str, Any], learn: Callable[[float], tuple[int, int]], windows: int, seconds: float, cores: int
) -> dict[str, dict[str, list[float]]]:
    kinds = [NOBODY, *commands]
    figures: dict[str, dict[str, list[float]]] = {kind: {"batches": [], "rows": [], "cpu": []} for kind in kinds}
    for window in range(windows):
        for turn in range(len(kinds)):
            kind = kinds[(window + turn) % len(kinds)]
            looking = commands.get(kind)
            used = _cpu_seconds(looking.pid) if looking else 0.0
            if looking:
                looking.send_signal(signal.SIGCONT)
            start = time.perf_counter()
            batches, rows = learn(start + seconds)
            elapsed = time.perf_counter() - start
            if looking:
                looking.send_signal(signal.SIGSTOP)
                used = _cpu_seconds(looking.pid) - used
            figures[kind]["batches"].append(batches / elapsed)
            figures[kind]["rows"].append(rows / elapsed)
            figures[kind]["cpu"].append(100 * used / (elapsed * cores))
    return figures


def _learner(buffer: Any) -> Callable[[float], tuple[int, int]]:
    """Returns what learns until a moment, and returns batches drawn and rows written meanwhile."""
    tds = [td_errors(BATCH_SIZE, seed) for seed in range(POOL)]

    def learn(until: float) -> tuple[int, int]:
        batches, first = 0, buffer.next_key
        while time.perf_counter() < until:
            buffer.update_priorities(buffer.sample(BATCH_SIZE), tds[batches % POOL])
            batches += 1
        return batches, buffer.next_key - first

    return learn


def _explore(buffer: Any, index: int, cores: list[int]) -> None:
    os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    chunks = [SMALL.rows(CHUNK, index * POOL + seed) for seed in range(POOL)]
    while True:
        for rows in chunks:
            buffer.extend(**rows)


def _start(*command: str) -> "subprocess.Popen[bytes]":
    # So rich takes the stream for a terminal. Nobody reads it: that would take time as well.
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "120", "LINES": "50"}
    return subprocess.Popen([sys.executable, "-m", "torchreplay", *command], stdout=subprocess.DEVNULL, env=environment)


def _begin(commands: dict[str, Any], learn: Callable[[float], tuple[int, int]]) -> None:
    """Waits until each command looks, which shows in its lower priority and its idling, and stops it."""
    until = time.perf_counter() + START_SECONDS
    for name, process in commands.items():
        while os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0):
            if process.poll() is not None or time.perf_counter() > until:
                raise RuntimeError(f"torchreplay {name} has not begun to look")
            learn(time.perf_counter() + 0.1)
    learn(time.perf_counter() + 2)  # first screens take longer than later ones
    for process in commands.values():
        process.send_signal(signal.SIGSTOP)


def _cpu_seconds(pid: int) -> float:
    """Returns the processor time of all threads of a process; that in /proc/PID/stat is in whole ticks of the clock."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def _parse() -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases.monitor", description=__doc__)
    parser.add_argument("--capacity", type=int, default=SMALL.capacity)
    parser.add_argument("--windows", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0)
    return vars(parser.parse_args())


if __name__ == "__main__":
    print(json.dumps(run(**_parse())))
