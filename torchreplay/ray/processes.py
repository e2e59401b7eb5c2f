"""Workers as plain processes of this machine, started by `multiprocessing`'s spawn: no Ray."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final

from torchreplay.ray.backend import Backend, pickled
from torchreplay.ray.worker import Launch, Outcome, WorkerProcess
from torchreplay.segment import Handle, make_handle, new_nonce, open_handle, reserve

_WHAT: Final = "payload of worker processes"

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


class Processes(Backend[ProcessRun]):
    """Runs workers as processes that die with this one, however it dies.

    Args:
        work: `(work, board)`, for the workers' processes to unpickle.
    """

    def __init__(self, work: Any) -> None:
        payload = pickled(work, _dumps())
        # Not an argument of the process: a child that dies before it has read its arguments leaves its parent waiting
        # for ever, if they are more than a pipe holds.
        self._payload = reserve(len(payload), _WHAT)
        os.pwrite(self._payload, payload, 0)
        self._handle = make_handle(self._payload, new_nonce())
        self._spawn = multiprocessing.get_context("spawn")

    def launch(self, launch: Launch) -> ProcessRun:
        """Starts a run; does not wait for it."""
        report, reporter = self._spawn.Pipe(duplex=False)
        process = self._spawn.Process(
            target=_live, args=(os.getpid(), sys.path, self._handle, launch, reporter), name=f"worker {launch.index}"
        )
        # Children inherit the mask: Ctrl-C ends the program, and that its workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            reporter.close()
        pid: int = process.pid  # type: ignore[assignment]  # it was started
        return ProcessRun(launch, process, report, os.pidfd_open(pid))

    def wait(self, runs: Sequence[ProcessRun], timeout: float) -> list[ProcessRun]:
        """The runs that have ended, as soon as one has, at the latest after `timeout` seconds."""
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
        how = _death(run.process.exitcode or 0)
        return Outcome("died", how, f"process {run.process.pid}: {how}")

    def release(self, run: ProcessRun) -> None:
        """Lets the process of an ended run go."""
        self._end(run)
        run.process.close()
        run.report.close()
        os.close(run.alive)

    def _end(self, run: ProcessRun) -> None:
        run.process.join(_EXIT_TIMEOUT)  # it ends its own children meanwhile
        run.process.kill()
        run.process.join()

    def kill(self, run: ProcessRun) -> None:
        """Kills the process of a run."""
        run.process.kill()

    def close(self) -> None:
        """Gives back the payload's memory."""
        os.close(self._payload)


def _dumps() -> Callable[[Any], bytes]:
    """Pickles by cloudpickle, which also takes lambdas and functions within functions, where it is installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.dumps
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    return dumps


def _live(parent: int, path: Sequence[str], payload: Handle, launch: Launch, report: Connection) -> None:
    """The life of a worker's process."""
    # The signal comes with the death of the thread that started this process: the supervisor's, which outlives it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    fd = open_handle(payload, _WHAT)
    try:
        outcome = WorkerProcess().run(path, os.pread(fd, payload.size, 0), launch)
    finally:
        os.close(fd)
    sys.stdout.flush()  # whoever hears of the end may kill this process
    sys.stderr.flush()
    report.send(outcome)
    report.close()


def _death(exit_code: int) -> str:
    if exit_code < 0:
        return f"its process died of signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"its process ended with exit code {exit_code} before its function had returned"
