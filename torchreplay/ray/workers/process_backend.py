"""Workers as plain processes of this machine, started by `multiprocessing`'s spawn: no Ray."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

from torchreplay.ray.workers.backend import Backend, pickled
from torchreplay.ray.workers.worker_process import Launch, Outcome, WorkerProcess
from torchreplay.segment.reservation import reserve

_PR_SET_PDEATHSIG: Final = 1  # of Linux's prctl

_EXIT_TIMEOUT: Final = 2.0
"""Seconds that a process whose function has returned gets to come to its end by itself."""


@dataclass(eq=False)
class ProcessRun:
    """One run of one worker: its process and the pipe on which it says how it ended."""

    launch: Launch
    process: SpawnProcess
    report: Connection
    alive: int  # a pidfd: readable once the process has ended, whoever else holds its pipes
    deadline: float = 0.0  # monotonic time of its end, once its function has returned


class ProcessBackend(Backend[ProcessRun]):
    """Runs workers as processes that die with this one, however it dies; arguments as of `WorkerResources.open`."""

    def __init__(self, work: Any) -> None:
        payload = pickled(work, _dumps())
        # Not an argument of the process: if a child dies before it has read more arguments than a pipe holds, its
        # parent waits for ever.
        self._payload = reserve(len(payload), "payload of worker processes")
        self._free = weakref.finalize(self, os.close, self._payload)
        with open(self._payload, "r+b", closefd=False) as memory:
            memory.write(payload)
        self._spawn = multiprocessing.get_context("spawn")
        self._leaving: list[ProcessRun] = []  # the function has returned, and the process is about to end

    def launch(self, launch: Launch) -> ProcessRun:
        """Starts a run; does not wait for it."""
        report, reporter = self._spawn.Pipe(duplex=False)
        process = self._spawn.Process(
            target=_live, args=(os.getpid(), sys.path, self._payload, launch, reporter), name=f"worker {launch.index}"
        )
        resource_tracker.ensure_running()  # the first child starts it, which would unblock the signal
        # Children inherit the mask: Ctrl-C ends the program, and that its workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        except BaseException:
            report.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            reporter.close()
        pid: int = process.pid  # type: ignore[assignment]  # it was started
        try:
            alive = os.pidfd_open(pid)
        except OSError:
            report.close()
            process.kill()
            process.join()
            raise
        return ProcessRun(launch, process, report, alive)

    def wait(self, runs: Sequence[ProcessRun], timeout: float) -> list[ProcessRun]:
        """The runs that have ended, as soon as one has, at the latest after `timeout` seconds."""
        self._see_off_the_gone()
        ready = set(wait([end for run in runs for end in (run.report, run.alive)], max(timeout, 0.0)))
        return [run for run in runs if run.report in ready or run.alive in ready]

    def outcome(self, run: ProcessRun) -> Outcome:
        """How an ended run ended."""
        try:
            if run.report.poll():
                outcome: Outcome = run.report.recv()
                return outcome
        except (EOFError, OSError):  # it died before, or while, it said anything
            pass
        self._end(run)
        how = _death(run.process.exitcode)
        return Outcome("died", how, f"process {run.process.pid}: {how}")

    def release(self, run: ProcessRun) -> None:
        """Lets the process of an ended run go. It has some time to end by itself; nobody waits for that here."""
        run.deadline = time.monotonic() + _EXIT_TIMEOUT
        self._leaving.append(run)

    def is_leaving(self, index: int) -> bool:
        """Whether the process of a worker's run that has ended is still there: for seconds at most."""
        self._see_off_the_gone()
        return any(run.launch.index == index for run in self._leaving)

    def await_exit(self, pids: Iterable[int]) -> None:
        """Returns when all processes are gone: within seconds, and not one after the other."""
        self._see_off(list(self._leaving))
        super().await_exit(pids)

    def _see_off_the_gone(self) -> None:
        """Sees those off whose process is gone, or whose time to end by itself is over."""
        now = time.monotonic()
        self._see_off([run for run in self._leaving if now >= run.deadline or wait([run.alive], 0)])

    def _see_off(self, runs: Sequence[ProcessRun]) -> None:
        """Returns when these processes are gone."""
        for run in runs:
            self._leaving.remove(run)
            self._end(run)
            with suppress(ValueError):  # to multiprocessing it runs, if it does not know its exit code
                run.process.close()
            run.report.close()
            os.close(run.alive)

    def _end(self, run: ProcessRun) -> None:
        if run.process.exitcode is None:
            # By the pidfd: `os.wait()` in the program may have collected the process, and its pid be another's by now.
            deadline = run.deadline or time.monotonic() + _EXIT_TIMEOUT
            wait([run.alive], max(0.0, deadline - time.monotonic()))  # it ends its own children meanwhile
            self.kill(run)
            run.process.join()

    def kill(self, run: ProcessRun) -> None:
        """Kills the process of a run."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(run.alive, signal.SIGKILL)

    def close(self) -> None:
        """Gives back the payload's memory; may be called again."""
        self._see_off(list(self._leaving))
        self._free()


def _dumps() -> Callable[[Any], bytes]:
    """Pickles by cloudpickle, which also takes lambdas and functions within functions, where it is installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.dumps
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    return dumps


def _live(parent: int, path: Sequence[str], payload: int, launch: Launch, report: Connection) -> None:
    """The life of a worker's process."""
    # The signal comes with the death of the thread that started this process: the supervisor's, which outlives it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    outcome = WorkerProcess().run(path, Path(f"/proc/{parent}/fd/{payload}").read_bytes(), launch)
    sys.stdout.flush()  # a process that hears of the end may kill this one
    sys.stderr.flush()
    report.send(outcome)
    report.close()


def _death(exit_code: int | None) -> str:
    if exit_code is None:
        return "its process died; the program has collected its exit code itself, as os.wait() does"
    if exit_code < 0:
        return f"its process died of signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"its process ended with exit code {exit_code} before its function had returned"
