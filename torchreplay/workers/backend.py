"""What a supervisor needs of the backend that runs its workers: Ray actors, or plain processes."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from typing import Any, ClassVar, Final, Generic, TypeVar

from torchreplay.workers.worker_process import STOP_SIGNAL, Launch, Outcome

_EXIT_TIMEOUT: Final = 5.0
"""Seconds that killed processes get to be gone."""

R = TypeVar("R")


class Backend(ABC, Generic[R]):
    """Launches, awaits and kills runs of a worker's function; `R` is what it knows a run by."""

    slow_start_hint: ClassVar[str] = ""  # what the log adds where a run takes long to begin

    @abstractmethod
    def launch(self, launch: Launch) -> R:
        """Starts a run in a process of its own; does not wait for it."""

    @abstractmethod
    def wait(self, runs: Sequence[R], timeout: float) -> list[R]:
        """The runs that have ended, as soon as one has, at the latest after `timeout` seconds.

        Raises:
            Exception: No run can be started or listened to any more.
        """

    @abstractmethod
    def outcome(self, run: R) -> Outcome:
        """How an ended run ended."""

    @abstractmethod
    def release(self, run: R) -> None:
        """Lets the process of an ended run go."""

    @abstractmethod
    def kill(self, run: R) -> None:
        """Kills the process of a run."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what all runs shared, once they have ended."""

    def is_free(self, index: int) -> bool:
        """Whether a run of that worker can begin. After the end of the last run that may take moments."""
        return True

    def interrupt(self, run: R, pid: int) -> None:
        """Makes a run that has not seen its stop raise `Stopped`, wherever it is or waits; `pid` is its process."""
        # A pid can only be another's by now if it ended this very moment.
        if not self.wait([run], 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STOP_SIGNAL)

    def await_exit(self, pids: Iterable[int]) -> None:
        """Returns when these processes are gone. A backend may say so a moment before."""
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for pid in filter(None, pids):
            try:
                process = os.pidfd_open(pid)
            except OSError:  # gone already
                continue
            connection.wait([process], max(0.0, deadline - time.monotonic()))
            os.close(process)


def pickled(work: Any, dumps: Callable[[Any], bytes], advice: str = "") -> bytes:
    """Returns what workers' processes are to unpickle. An error's text ends with `advice`.

    Raises:
        TypeError: The user's function, or something that it refers to, cannot be pickled.
    """
    try:
        return dumps(work)
    except Exception as error:
        raise TypeError(
            f"{work[0]!r} cannot be sent to the workers' processes: {error}; make environments, networks and open "
            f"files inside the function{advice}"
        ) from error
