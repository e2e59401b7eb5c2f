"""Runs Python programs in forks of one process that has imported torch, which takes longer than most of them run."""

import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType

IMPORTED = ("numpy", "torch", "torchreplay", "gymnasium", "tyro", "torch.utils.tensorboard")


class WarmInterpreter:
    """Such a process. Each program runs in a process of its own, as `python PROGRAM` would run it."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._server.pid

    def run(self, program: Path, flags: Sequence[str], cwd: Path, timeout: float) -> subprocess.CompletedProcess[str]:
        """Runs a program until it ends.

        Raises:
            subprocess.TimeoutExpired: It did not end; it was killed.
        """
        argv = [str(program), *flags]
        reads, writes = zip(os.pipe(), os.pipe(), strict=True)
        streams = [f"/proc/{os.getpid()}/fd/{pipe}" for pipe in writes]
        self._ask({"argv": argv, "cwd": str(cwd), "environment": dict(os.environ), "streams": streams})
        pid, late = int(self._answer()), threading.Event()
        for pipe in writes:
            os.close(pipe)
        timer = threading.Timer(timeout, _kill, (pid, late))
        timer.start()
        with ThreadPoolExecutor(2) as pool:
            try:
                texts = list(pool.map(_read, reads))  # until those that it has started have ended, too
            except BaseException:  # such as a test's timeout
                _kill(pid, late)
                raise
            finally:
                status = int(self._answer())
                timer.cancel()
                timer.join()
        if late.is_set():
            raise subprocess.TimeoutExpired(argv, timeout, *texts)
        return subprocess.CompletedProcess(argv, status, *texts)

    def _ask(self, request: dict[str, object]) -> None:
        assert self._server.stdin
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()

    def _answer(self) -> str:
        assert self._server.stdout
        return self._server.stdout.readline()


_warm: WarmInterpreter | None = None


def warm_process() -> int | None:
    """The process of this one's interpreter, which ends with it; None: no program was run yet."""
    return None if _warm is None else _warm.pid


def run(program: Path, flags: Sequence[str], cwd: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs a Python program until it ends; returns its exit status and what it printed."""
    global _warm
    if _warm is None:
        _warm = WarmInterpreter()
    return _warm.run(program, flags, cwd, timeout)


def _read(pipe: int) -> str:
    with open(pipe) as stream:
        return stream.read()


def _kill(pid: int, late: threading.Event) -> None:
    late.set()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _serve() -> dict | None:
    """Forks for each program. Returns there what it is, and here nothing, in the end."""
    for name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        request = json.loads(line)
        request["files"] = [
            os.open("/dev/null", os.O_RDONLY),
            *(os.open(path, os.O_WRONLY) for path in request["streams"]),
        ]
        pid = os.fork()
        if not pid:
            return request
        for file in request["files"]:
            os.close(file)
        _say(pid)
        _say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return None


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _become(request: dict) -> None:
    """Makes this process one that has just started a program, and runs that."""
    os.setsid()
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv, path = request["argv"], request["argv"][0]
    sys.path[0] = os.path.dirname(path)
    random.seed()
    sys.modules["numpy"].random.seed()
    main = ModuleType("__main__")
    main.__file__, main.__builtins__ = path, __builtins__
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(main))


if __name__ == "__main__" and (wanted := _serve()):
    _become(wanted)
