"""A process that has imported torch, and forks. So workers begin within milliseconds, and share that memory."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.process import current_process
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Final

import numpy as np

from torchreplay.ray.workers.worker_process import Launch, WorkerProcess

_PR_SET_PDEATHSIG: Final = 1  # of Linux's prctl

_ANSWER_TIMEOUT: Final = 60.0
"""Seconds in which a fork server must answer; forking takes it milliseconds, and to begin some seconds."""

# Not multiprocessing's spawn, which would import the program's main module: that may start threads, or touch a GPU, and
# could not be forked after it.
_SERVER: Final = """
import sys
from multiprocessing.connection import Connection
requests = Connection(int(sys.argv[1]))
sys.path, arguments = requests.recv()
from torchreplay.ray.workers.fork_server import serve
serve(requests, *arguments)
"""


class ForkServer:
    """Such a process, as the program sees it. It dies with the thread that has made it, and its workers with it.

    Args:
        payload: What each worker unpickles and runs.
        main: The program's main module, argv and path, of `multiprocessing.spawn.get_preparation_data`.
        modules: What to import before the first fork.

    Raises:
        OSError: It could not be started.
    """

    def __init__(self, payload: bytes, main: Mapping[str, Any], modules: Sequence[str]) -> None:
        self._requests, theirs = multiprocessing.Pipe()
        # Children inherit the mask: Ctrl-C ends the program, and that its workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            command = [spawn.get_executable(), *flags, "-c", _SERVER, str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        except BaseException:
            self._requests.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._ready = False
        try:
            self._requests.send((main["sys_path"], (os.getpid(), payload, main, modules)))
        except BaseException:
            self.close()
            raise

    @property
    def is_ready(self) -> bool:
        """Whether `fork` will not wait: the process has begun, or has died."""
        return self._ready or self._requests.poll()

    @property
    def has_died_in_service(self) -> bool:
        """Whether it had begun, and is gone now."""
        return self._ready and self._process.poll() is not None

    def fork(self, launch: Launch, report: Connection) -> tuple[int, int]:
        """Starts a worker that says on `report` how it has ended. Returns its process id and a pidfd of it.

        Raises:
            RuntimeError: No process could be forked.
            OSError, EOFError: The fork server is gone.
        """
        if not self._ready:
            self._receive()
            self._ready = True
        self._requests.send(launch)
        send_handle(self._requests, report.fileno(), self._process.pid)
        answer = self._receive()
        if not isinstance(answer, int):
            raise RuntimeError(f"no process could be forked: {answer}")
        return answer, recv_handle(self._requests)

    def reap(self, pid: int) -> int | None:
        """Waits for the end of a worker and returns its exit code, -n for signal n; None if nobody knows it."""
        with suppress(OSError, EOFError):
            self._requests.send(pid)
            code: int = self._receive()
            return code
        return None

    def _receive(self) -> Any:
        if not self._requests.poll(_ANSWER_TIMEOUT):
            raise TimeoutError(f"the fork server has not answered for {_ANSWER_TIMEOUT:.0f} s")
        return self._requests.recv()

    def close(self) -> None:
        """Ends it, and any worker that still runs."""
        self._requests.close()
        self._process.kill()
        self._process.wait()


def serve(requests: Connection, program: int, payload: bytes, main: Mapping[str, Any], modules: Sequence[str]) -> None:
    """The life of a fork server: for each `Launch` it forks a worker, for each process id it sends the exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the program may ignore it, which is inherited
    _die_with(program)
    for module in modules:
        with suppress(Exception):  # a worker that needs it says what is wrong
            importlib.import_module(module)
    gc.freeze()  # no collection of a worker's writes to what all share
    workers: dict[int, ForkProcess] = {}
    requests.send(None)
    while True:
        try:
            request: Launch | int = requests.recv()
        except (EOFError, OSError):  # the program has closed it, or is gone
            os._exit(0)
        if isinstance(request, int):
            worker = workers.pop(request)
            worker.join()
            requests.send(worker.exitcode)
            worker.close()
            continue
        with Connection(recv_handle(requests), readable=False) as report:
            worker = multiprocessing.get_context("fork").Process(
                target=_live, args=(requests, os.getpid(), payload, main, request, report)
            )
            try:
                pid, alive = _start(worker)
            except OSError as error:
                requests.send(str(error))
                continue
        workers[pid] = worker
        requests.send(pid)
        send_handle(requests, alive, program)
        os.close(alive)


def _start(worker: ForkProcess) -> tuple[int, int]:
    worker.start()
    pid: int = worker.pid  # type: ignore[assignment]  # it was started
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        worker.kill()
        worker.join()
        raise


def _live(
    requests: Connection, server: int, payload: bytes, main: Mapping[str, Any], launch: Launch, report: Connection
) -> None:
    """The life of a worker's process."""
    _die_with(server)
    requests.close()
    np.random.seed()  # noqa: NPY002  # users may use it, and all would draw the same numbers
    process: Any = current_process()
    process._inheriting = True  # now multiprocessing refuses to start processes: it says that the guard is missing
    spawn.prepare(dict(main))
    del process._inheriting
    outcome = WorkerProcess().run([], payload, launch)
    sys.stdout.flush()  # a process that hears of the end may kill this one
    sys.stderr.flush()
    report.send(outcome)
    report.close()
    atexit._run_exitfuncs()  # a process of multiprocessing that was forked leaves them out


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that has started it ends, which `parent` has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
