"""A process that has imported torch, and forks. So workers begin within milliseconds, and share that memory."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Final, TextIO

import numpy as np
import torch

from torchreplay.workers.worker_process import Launch, Outcome, WorkerProcess, raised

_PR_SET_PDEATHSIG: Final = 1  # of Linux's prctl

_OF_THE_PROGRAM: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that tell a program something. Who sends one to all its processes, as Slurm does, means the program alone."""

_ANSWER_TIMEOUT: Final = 60.0
"""Seconds in which a fork server must have begun, and must answer. It takes seconds, and milliseconds."""

IMPORTS_MAIN: Final = threading.Event()
"""Set in a worker while it imports the program's main module."""


class ForkServer:
    """Such a process, as the program sees it. It dies with the thread that has made it, and its workers with it.

    A program has only one `multiprocessing.forkserver`. That keeps the environment of its first start, and all pools
    would share its death. It goes on while any child does, and nothing limits the wait for its answer.

    Args:
        payload: What each worker unpickles and runs.
        main: The program's argv, path and main module, of `multiprocessing.spawn.get_preparation_data`.
        modules: What to import before the first fork.

    Raises:
        OSError: It could not be started.
    """

    def __init__(self, payload: bytes, main: Mapping[str, Any], modules: Sequence[str]) -> None:
        self._requests, theirs = multiprocessing.Pipe()
        try:
            self._process, requests = _start(theirs)
        except BaseException:
            self._requests.close()
            raise
        finally:
            theirs.close()
        self.has_begun = False
        self._begin_by = time.monotonic() + _ANSWER_TIMEOUT
        self._alive = -1
        try:
            self._alive = os.pidfd_open(self._process.pid)
            # Not `main`, which may start threads, or touch a GPU: it could not be forked after that.
            start = pickle.dumps({"sys_path": main["sys_path"]})
            start += pickle.dumps(_Server(requests, os.getpid(), payload, main, modules))
            with suppress(ConnectionError), open(self._requests.fileno(), "wb", closefd=False) as stream:
                stream.write(start)  # it has died already: `fork` says so
        except BaseException:
            self.close()
            raise

    @property
    def is_ready(self) -> bool:
        """Whether `fork` will not wait: the process has begun, has died, or takes too long."""
        return self.has_begun or self._said_something(0.0) or time.monotonic() >= self._begin_by

    @property
    def has_died(self) -> bool:
        """Whether it is gone, and can start no worker any more."""
        return self._process.poll() is not None

    def fork(self, launch: Launch, report: Connection) -> tuple[int, int]:
        """Starts a worker that says on `report` how it has ended.

        Returns:
            The worker's process id, which is nobody else's before `reap`, and a pidfd of it.

        Raises:
            OSError: No descriptor is left. The worker was killed.
            RuntimeError: No process could be forked; or the fork server has died, or was ended as it did not answer.
        """
        if not self.has_begun:
            self._receive(self._begin_by - time.monotonic())
            self.has_begun = True
        pid = self._receive(_ANSWER_TIMEOUT, (launch, report.fileno()))
        if not isinstance(pid, int):
            raise RuntimeError(f"no process could be forked: {pid}")
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.reap(pid)
            raise

    def reap(self, pid: int) -> int | None:
        """Waits for the end of a worker and returns its exit code, -n for signal n; None if nobody knows it."""
        try:
            code: int = self._receive(_ANSWER_TIMEOUT, pid)
            return code
        except RuntimeError:
            return None

    def _said_something(self, timeout: float) -> bool:
        return bool(wait([self._requests, self._alive], max(0.0, timeout)))

    def _receive(self, timeout: float, request: object = None) -> Any:
        """Sends a request, if there is one, and returns the answer."""
        try:
            if request is not None:
                self._requests.send(request)
            if not self._said_something(timeout):
                raise TimeoutError(f"it said nothing for {_ANSWER_TIMEOUT:.0f} s")
            if not self._requests.poll():  # a child of the program may hold the other end open
                raise EOFError("it has ended")
            return self._requests.recv()
        except (OSError, EOFError) as error:
            self._process.kill()  # what it says from now on could be taken for another answer
            self._process.wait()
            raise RuntimeError(f"the process that starts workers has died, or did not answer: {error!r}") from error

    def close(self) -> None:
        """Ends it, and any worker that still runs; may be called again."""
        self._process.kill()
        self._process.wait()
        self._requests.close()
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1


def _start(theirs: Connection) -> tuple[subprocess.Popen[bytes], int]:
    """Starts Python with the program's flags, and a pipe from which it reads what to run, as `spawn` does it.

    Returns:
        The process, and the descriptor that has the same pipe there.
    """
    # Workers share the tracker. Starting it would unblock the signal below.
    tracker: int = resource_tracker.getfd()  # type: ignore[assignment]
    # Children inherit the mask: Ctrl-C ends the program, and that its workers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_OF_THE_PROGRAM})
    passed: list[int] = []
    try:
        for fd in (theirs.fileno(), theirs.fileno(), tracker):
            passed.append(_above_standard(fd))
        command = spawn.get_command_line(pipe_handle=passed[0], tracker_fd=passed[2])
        process = subprocess.Popen(
            [*command, __name__],  # which lists of processes show
            stdin=subprocess.DEVNULL,
            stdout=_standard(sys.__stdout__, 1),
            stderr=_standard(sys.__stderr__, 2),
            pass_fds=passed,
        )
        return process, passed[1]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for fd in passed:
            os.close(fd)


def _above_standard(fd: int) -> int:
    """Returns another descriptor of the same, but of no standard stream: a program may have those closed."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _standard(stream: TextIO | None, fd: int) -> int | None:
    """Returns what a child gets as a standard stream: None for the program's own, which may be closed.

    Without it the descriptor may be of anything that the program has opened since.
    """
    try:
        os.fstat(fd)
    except OSError:
        return subprocess.DEVNULL
    return subprocess.DEVNULL if stream is None or stream.closed else None


def _leave_to_the_program(signal_number: int, frame: FrameType | None) -> None:
    """Does nothing. Not SIG_IGN: programs that a worker starts would inherit that."""


class _Server(multiprocessing.Process):
    """The fork server: for each launch it forks a worker, for each number of a process it sends the exit code."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self._arguments = arguments

    def __reduce__(self) -> tuple[object, ...]:
        return _Server, self._arguments

    def run(self) -> None:
        """Serves until the program closes the pipe, or is gone. Each worker returns, and ends as any program does."""
        requests, program, payload, main, modules = self._arguments
        server = os.getpid()
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the program may ignore it, which is inherited
            for number in _OF_THE_PROGRAM:
                signal.signal(number, _leave_to_the_program)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_PROGRAM)
            _die_with(program)
            _import(modules)
            gc.freeze()  # no collection of a worker's writes to what all share
            launch, report = _serve(Connection(requests), program)
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the program has closed it, or is gone
            os._exit(1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        _live(server, payload, main, launch, report)


def _import(modules: Sequence[str]) -> None:
    # So `torch.cuda.is_available()` does not begin to use the GPU, which no fork could use then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"], before = "1", os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    for module in modules:
        with suppress(Exception):  # a worker that needs it says what is wrong
            importlib.import_module(module)
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    if before is not None:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before


def _serve(requests: Connection, program: int) -> tuple[Launch, Connection]:
    """Answers the program's requests. Returns in each worker, with what it is to do."""
    requests.send(None)
    while True:
        request: tuple[Launch, int] | int = requests.recv()
        if isinstance(request, int):
            requests.send(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]))
            continue
        launch, number = request
        report, answer = -1, ""
        try:
            report = os.open(f"/proc/{program}/fd/{number}", os.O_WRONLY)
            pid = os.fork()
        except OSError as error:
            pid, answer = -1, str(error)
        if not pid:
            return launch, Connection(report, readable=False)
        if report >= 0:
            os.close(report)
        requests.send(answer or pid)


def _live(server: int, payload: bytes, main: Mapping[str, Any], launch: Launch, report: Connection) -> None:
    """The life of a worker's process."""
    _die_with(server)
    atexit.register(_leave)
    np.random.seed()  # noqa: NPY002  # users may use it, and all would draw the same numbers
    torch.default_generator.seed()
    outcome = _import_main({**main, "name": f"worker {launch.index}"}) or WorkerProcess().run([], payload, launch)
    _flush()  # a process that hears of the end may kill this one
    report.send(outcome)
    report.close()


def _import_main(main: dict[str, Any]) -> Outcome | None:
    """Makes the program's main module importable under its name; returns what went wrong, if anything did."""
    IMPORTS_MAIN.set()
    try:
        spawn.prepare(main)
    except BaseException as error:  # also the SystemExit of a program that reads its arguments
        return raised(error, ours=1, when=", when its process imported the program's main module")
    finally:
        IMPORTS_MAIN.clear()
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it is closed, None, a broken pipe, or the user's own
            stream.flush()


def _leave() -> None:
    """Ends a worker, after all that it has registered to do at its end, and before what the server has."""
    logging.shutdown()
    _flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(0)


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that has started it ends, which `parent` has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
