"""Workers as plain processes of this machine, without Ray: a fork server starts them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import pickletools
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from types import FunctionType, ModuleType
from typing import Any, Final

from torchreplay.workers.backend import Backend, pickled
from torchreplay.workers.fork_server import IMPORTS_MAIN, ForkServer
from torchreplay.workers.worker_process import Launch, Outcome

_EXIT_TIMEOUT: Final = 2.0
"""Seconds that a process whose function has returned gets to come to its end by itself."""

_FORKABLE: Final = {
    "ale_py",
    "gymnasium",
    "lightning",
    "matplotlib",
    "mujoco",
    "numpy",
    "pandas",
    "pytorch_lightning",
    "ray",
    "scipy",
    "stable_baselines3",
    "tensordict",
    "torch",
    "torchreplay",
}
"""Packages that may be forked once they are imported: they start no threads, and touch no GPU, before they are used."""


@dataclass(eq=False)
class ProcessRun:
    """One run of one worker: its process and the pipe on which it says how it ended."""

    launch: Launch
    server: ForkServer
    pid: int
    alive: int  # a pidfd: readable once the process has ended, also when another one holds its pipes
    report: Connection
    deadline: float = 0.0  # monotonic time of its end, once its function has returned
    ended: bool = False
    exit_code: int | None = None  # of a process that has ended, if anybody knows it


class ProcessBackend(Backend[ProcessRun]):
    """Runs workers as processes that die with this one, however it dies.

    Args:
        work: `(work, table)`, for the workers' processes to unpickle.

    Raises:
        RuntimeError: A worker has imported the program's main module, which starts workers without a guard.
        TypeError: The work cannot be pickled, or is of a program without a file and cannot be found by its name.
    """

    def __init__(self, work: Any) -> None:
        self._main = _preparation_data()
        dumps = _dumps()
        self._payload = pickled(work, dumps)
        has_main = {"init_main_from_name", "init_main_from_path"} & self._main.keys()
        if not has_main and dumps is pickle.dumps and _names_main(self._payload):
            raise TypeError(
                f"{work[0]!r} cannot be sent to the workers' processes: this program has no file that they could "
                f"import. Run it as `python script.py`, or install cloudpickle, which takes functions along"
            )
        self._modules = [type(work[0]).__module__, *_imported_by_main()]
        self._main["authkey"] = bytes(self._main["authkey"])  # or it refuses to be pickled
        self._server: ForkServer | None = None
        self._leaving: list[ProcessRun] = []  # the function has returned, and the process is about to end

    def is_free(self, index: int) -> bool:
        """Whether a run of that worker can begin: the fork server has, and the process of the last run is gone."""
        self._see_off_the_gone()
        if self._server is not None and self._server.has_begun and self._server.has_died:
            self._drop_server()
        try:
            ready = self._running_server().is_ready
        except OSError:  # so says `launch`
            return True
        return ready and all(run.launch.index != index for run in self._leaving)

    def launch(self, launch: Launch) -> ProcessRun:
        """Starts a run; does not wait for it."""
        server = self._running_server()
        report, reporter = multiprocessing.Pipe(duplex=False)
        try:
            pid, alive = server.fork(launch, reporter)
        except BaseException:
            report.close()
            if server.has_died:
                self._drop_server()
            raise
        finally:
            reporter.close()
        return ProcessRun(launch, server, pid, alive, report)

    def _running_server(self) -> ForkServer:
        if self._server is None:
            self._server = ForkServer(self._payload, self._main, self._modules)
        return self._server

    def _drop_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

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
        how = _death(run.exit_code)
        return Outcome("died", how, f"process {run.pid}: {how}")

    def release(self, run: ProcessRun) -> None:
        """Lets the process of an ended run go. It has some time to end by itself; nobody waits for that here."""
        run.deadline = time.monotonic() + _EXIT_TIMEOUT
        self._leaving.append(run)

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
            run.report.close()
            os.close(run.alive)

    def _end(self, run: ProcessRun) -> None:
        if not run.ended:
            deadline = run.deadline or time.monotonic() + _EXIT_TIMEOUT
            wait([run.alive], max(0.0, deadline - time.monotonic()))  # it ends its own children meanwhile
            self.kill(run)
            run.exit_code, run.ended = run.server.reap(run.pid), True
            if run.exit_code is None:
                with suppress(ChildProcessError):  # it became a child of this program if that is process 1
                    os.waitid(os.P_PIDFD, run.alive, os.WEXITED)

    def kill(self, run: ProcessRun) -> None:
        """Kills the process of a run."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(run.alive, signal.SIGKILL)

    def close(self) -> None:
        """Ends the fork server; may be called again."""
        self._see_off(list(self._leaving))
        self._drop_server()


def _preparation_data() -> dict[str, Any]:
    """Returns what workers have to know of the program, to look like it.

    Raises:
        RuntimeError: This is a worker, which imports the program's main module.
    """
    if IMPORTS_MAIN.is_set():
        raise RuntimeError(
            "this program starts workers when its main module is imported, which each worker does: put what starts "
            "them, and all else that is to run only once, under `if __name__ == '__main__':`"
        )
    data: dict[str, Any] = spawn.get_preparation_data("worker")
    if not os.path.isfile(data.get("init_main_from_path", __file__)):  # such as "<stdin>": there is none to import
        del data["init_main_from_path"]
    return data


def _names_main(payload: bytes) -> bool:
    """Whether what `pickle` has written names something in the main module."""
    return any(argument == "__main__" for _, argument, _ in pickletools.genops(payload))


def _dumps() -> Callable[[Any], bytes]:
    """Pickles by cloudpickle, which also takes lambdas and functions within functions, where it is installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.dumps
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    return dumps


def _imported_by_main() -> list[str]:
    """Returns the forkable modules that the program's main module names. Each worker will import that main module."""
    values = list(vars(sys.modules["__main__"]).values())
    names = {value.__name__ for value in values if isinstance(value, ModuleType)}
    names |= {value.__module__ for value in values if isinstance(value, type | FunctionType) and value.__module__}
    return sorted(name for name in names if name.partition(".")[0] in _FORKABLE)


def _death(exit_code: int | None) -> str:
    if exit_code is None:
        return "the process that starts workers died, and this one with it"
    if exit_code < 0:
        return f"its process died of signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"its process ended with exit code {exit_code} before its function had returned"
