"""A run that is killed ten times and resumed from `ReplayCheckpoint`, beside one that nobody disturbs."""

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import numpy as np

from benchmarks.learning.cell import Point, Question
from benchmarks.learning.double_dqn import CARTPOLE
from benchmarks.learning.resumable import STEPS, newest_step, told

KILLS = 10


def undisturbed(seed: int) -> Iterable[Point]:
    """Returns (environment steps, mean return of greedy episodes)."""
    with TemporaryDirectory() as directory:
        start = time.perf_counter()
        _play_on(Path(directory), seed)
        return _points(Path(directory), time.perf_counter() - start)


def killed(seed: int) -> Iterable[Point]:
    """Returns the same of a run that was killed.

    Raises:
        RuntimeError: A batch is not that of a run which nobody disturbs.
    """
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        _play_on(Path(one), seed)
        start = time.perf_counter()
        for step in np.sort(np.random.default_rng(seed).integers(1, STEPS, KILLS)).tolist():
            _play_on(Path(other), seed, kill_at=step)
        _play_on(Path(other), seed)
        whole, resumed = told(Path(one), "batch"), told(Path(other), "batch")
        if whole != resumed:
            differs = min(step for step in range(STEPS) if whole.get(step) != resumed.get(step))
            raise RuntimeError(f"the run that was killed {KILLS} times draws another batch in step {differs}")
        return _points(Path(other), time.perf_counter() - start)


def _play_on(directory: Path, seed: int, kill_at: int | None = None) -> None:
    command = [sys.executable, "-m", "benchmarks.learning.resumable", str(directory), "--seed", str(seed)]
    # Its errors go to a file: nobody would empty a pipe while its steps are watched.
    with TemporaryFile("w+") as errors, subprocess.Popen(command, stderr=errors) as child:
        while kill_at is not None and child.poll() is None:
            if newest_step(directory) >= kill_at:
                child.kill()
                return
            time.sleep(0.05)
        if child.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"a run ended with {child.returncode}: {errors.read()[-2000:]}")


def _points(directory: Path, seconds: float) -> list[Point]:
    found = told(directory, "mean_return")
    return [Point(step, score, seconds * step / STEPS) for step, score in sorted(found.items())]


RESUME = Question(
    "resume",
    f"A run that is killed {KILLS} times and resumed from ReplayCheckpoint",
    "learner steps",
    f"mean return of {CARTPOLE.episodes} greedy episodes",
    {"double DQN CartPole-v1": {"undisturbed": undisturbed, f"killed {KILLS} times": killed}},
)
