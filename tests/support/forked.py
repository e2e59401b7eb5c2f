"""Forked processes for tests: cheap to start by the hundred, and never left behind."""

import ctypes
import faulthandler
import mmap
import os
import signal
import sys
import time
import traceback

import torchreplay as tr

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Hang(AssertionError):
    """What was awaited did not come about."""


class Forked:
    """A child process that runs `body` and exits: with 0 after its end or `Stopped`, with 1 after another exception."""

    def __init__(self, body, *args):
        self.status = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_and_exit(body, args)

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        """Kills it at any instruction, and waits until it is gone."""
        if self.status is None:
            self.signal(signal.SIGKILL)
            self.wait()

    def is_running(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is None

    def wait(self, timeout=60.0):
        """Returns its exit status, negative for a signal."""
        eventually(lambda: not self.is_running(), timeout, interval=0.0005)
        return self.status

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def _run_and_exit(body, args):
    faulthandler.enable(2)  # a crash says where it was
    status = 1
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        body(*args)
        status = 0
    except tr.Stopped:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def eventually(condition, timeout=60.0, interval=0.002):
    """Waits until `condition()` holds; fails when it does not come about."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            raise Hang("the awaited condition did not come about")
        time.sleep(interval)


def shared_counters(n):
    """Returns `n` int64 counters, all 0, that this process shares with those it forks."""
    return memoryview(mmap.mmap(-1, 8 * n)).cast("q")
