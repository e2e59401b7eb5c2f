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
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from multiprocessing.process import current_process
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

# Not multiprocessing's spawn, which would import the program's main module: that may start threads, or touch a GPU, and
# could not be forked after it.
_SERVER: Final = """
import sys
from multiprocessing.connection import Connection
requests = Connection(int(sys.argv[1]))
try:
    sys.path, arguments = requests.recv()
except EOFError:  # the program is gone
    sys.exit(1)
from torchreplay.workers.fork_server import serve
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
        # Workers share the tracker. Starting it would unblock the signal below.
        tracker: int = resource_tracker.getfd()  # type: ignore[assignment]
        self._requests, theirs = multiprocessing.Pipe()
        self._channel = _channel_of(self._requests)  # one for good: a launch needs few descriptors
        # Children inherit the mask: Ctrl-C ends the program, and that its workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_OF_THE_PROGRAM})
        passed: list[int] = []
        try:
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            passed = [_above_standard(theirs.fileno()), _above_standard(tracker)]
            command = [spawn.get_executable(), *flags, "-c", _SERVER, str(passed[0])]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=_standard(sys.__stdout__, 1),
                stderr=_standard(sys.__stderr__, 2),
                pass_fds=passed,
            )
        except BaseException:
            self._requests.close()
            self._channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            for fd in passed:
                os.close(fd)
        self.has_begun = False
        self._begin_by = time.monotonic() + _ANSWER_TIMEOUT
        self._forks = 0
        self._alive = -1
        try:
            self._alive = os.pidfd_open(self._process.pid)
            with suppress(ConnectionError):  # it has died already: `fork` says so
                self._requests.send((main["sys_path"], (os.getpid(), passed[1], payload, main, modules)))
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

    def fork(self, launch: Launch, report: Connection) -> tuple[int, int, int]:
        """Starts a worker that says on `report` how it has ended.

        Returns:
            The number of this fork, the worker's process id, and a pidfd of it.

        Raises:
            OSError: No descriptor is left. Nothing was started.
            RuntimeError: No process could be forked; or the fork server has died, or was ended as it did not answer.
        """
        spare = os.dup(report.fileno())  # it fails before anything is under way
        self._forks += 1
        try:
            if not self.has_begun:
                self._receive(self._begin_by - time.monotonic())
                self.has_begun = True
            self._requests.send((self._forks, launch))
            socket.send_fds(self._channel, [b"d"], [report.fileno()])
            pid = self._receive()
            if not isinstance(pid, int):
                raise RuntimeError(f"no process could be forked: {pid}")
            os.close(spare)
            spare = -1
            self._await(_ANSWER_TIMEOUT)
            return self._forks, pid, _receive_descriptor(self._channel)
        except (OSError, EOFError) as error:
            self._process.kill()  # what it says from now on could be taken for another answer
            self._process.wait()
            raise RuntimeError(f"the process that starts workers has died, or did not answer: {error!r}") from error
        finally:
            if spare >= 0:
                os.close(spare)

    def reap(self, fork: int) -> int | None:
        """Waits for the end of a worker and returns its exit code, -n for signal n; None if nobody knows it."""
        try:
            self._requests.send(fork)
            code: int = self._receive()
            return code
        except (OSError, EOFError):
            self._process.kill()
            return None

    def _said_something(self, timeout: float) -> bool:
        return bool(wait([self._requests, self._alive], max(0.0, timeout)))

    def _await(self, timeout: float) -> None:
        if not self._said_something(timeout):
            raise TimeoutError(f"it said nothing for {_ANSWER_TIMEOUT:.0f} s")
        if not self._requests.poll():  # a child of the program may hold the other end open
            raise EOFError("it has ended")

    def _receive(self, timeout: float = _ANSWER_TIMEOUT) -> Any:
        self._await(timeout)
        return self._requests.recv()

    def close(self) -> None:
        """Ends it, and any worker that still runs; may be called again."""
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._channel.close()
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1


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


def _receive_descriptor(channel: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:
        raise EOFError("no descriptor came")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _channel_of(connection: Connection) -> socket.socket:
    """Returns a socket for descriptors, beside the connection for objects: both are the same channel."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _leave_to_the_program(signal_number: int, frame: FrameType | None) -> None:
    """Does nothing. Not SIG_IGN: programs that a worker starts would inherit that."""


def serve(
    requests: Connection, program: int, tracker: int, payload: bytes, main: Mapping[str, Any], modules: Sequence[str]
) -> None:
    """The life of a fork server: for each `Launch` it forks a worker, for each number of one it sends the exit code."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the program may ignore it, which is inherited
        for number in _OF_THE_PROGRAM:
            signal.signal(number, _leave_to_the_program)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_PROGRAM)
        _die_with(program)
        resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]  # as multiprocessing's spawn does
        _import(modules)
        gc.freeze()  # no collection of a worker's writes to what all share
        requests.send(None)
        _serve(requests, payload, main)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the program has closed it, or is gone
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # and not by the end of Python, which would wait for all workers


def _import(modules: Sequence[str]) -> None:
    # So `torch.cuda.is_available()` does not begin to use the GPU, which no fork could use then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"], before = "1", os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    for module in modules:
        with suppress(Exception):  # a worker that needs it says what is wrong
            importlib.import_module(module)
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    if before is not None:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before


def _serve(requests: Connection, payload: bytes, main: Mapping[str, Any]) -> None:
    workers: dict[int, ForkProcess] = {}
    channel = _channel_of(requests)
    while True:
        request: tuple[int, Launch] | int = requests.recv()
        if isinstance(request, int):
            worker = workers.pop(request)
            worker.join()
            requests.send(worker.exitcode)
            worker.close()
            continue
        number, launch = request
        with Connection(_receive_descriptor(channel), readable=False) as report:
            worker = multiprocessing.get_context("fork").Process(
                target=_live, args=(os.getpid(), payload, main, launch, report)
            )
            try:
                pid, alive = _start(worker)
            except OSError as error:
                requests.send(str(error))
                continue
        workers[number] = worker
        requests.send(pid)
        socket.send_fds(channel, [b"d"], [alive])
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


def _live(server: int, payload: bytes, main: Mapping[str, Any], launch: Launch, report: Connection) -> None:
    """The life of a worker's process."""
    _die_with(server)
    atexit._clear()  # what the server has registered is none of a worker's business
    atexit.register(logging.shutdown)
    np.random.seed()  # noqa: NPY002  # users may use it, and all would draw the same numbers
    torch.default_generator.seed()
    outcome = _import_main({**main, "name": f"worker {launch.index}"}) or WorkerProcess().run([], payload, launch)
    for stream in (sys.stdout, sys.stderr):  # a process that hears of the end may kill this one
        with suppress(Exception):  # it is closed, None, a broken pipe, or the user's own
            stream.flush()
    report.send(outcome)
    report.close()
    # A forked process of multiprocessing leaves these out.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    ctypes.CDLL(None).fflush(None)


def _import_main(main: dict[str, Any]) -> Outcome | None:
    """Makes the program's main module importable under its name; returns what went wrong, if anything did."""
    process: Any = current_process()
    process._inheriting = True  # now multiprocessing refuses to start processes
    try:
        spawn.prepare(main)
    except BaseException as error:  # also the SystemExit of a program that reads its arguments
        return raised(error, ours=1, when=", when its process imported the program's main module")
    finally:
        del process._inheriting
    return None


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that has started it ends, which `parent` has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
