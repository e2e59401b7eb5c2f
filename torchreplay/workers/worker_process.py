"""One run of a worker, in its own process."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Literal, Protocol, Self, SupportsBytes, TypeAlias

import torch

from torchreplay.errors import AttachError, Stopped
from torchreplay.workers.worker_table import WorkerTable

STOP_SIGNAL: Final = signal.SIGUSR1
"""Raises `Stopped` in a worker that the pool has interrupted. Not SIGINT, which workers block so that Ctrl-C ends the
program alone."""


@dataclass(frozen=True)
class Launch:
    """Which worker to run."""

    index: int  # the worker
    num_workers: int  # how many there are
    seed: int  # seed of this run
    restarts: int  # how often the worker has been restarted


_LONGEST_ERROR: Final = 1_000
_LONGEST_TRACEBACK: Final = 20_000
"""Characters. Programs keep errors of many workers, and an exception may have a whole array in it."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as text: a worker's exception need not pickle. Long text has its middle left out."""

    kind: Literal["ended", "raised", "died"]  # its function returned or was stopped; raised; or its process died
    error: str = ""  # one line about the failure
    traceback: str = ""  # the worker's traceback

    def __post_init__(self) -> None:
        for name, most in (("error", _LONGEST_ERROR), ("traceback", _LONGEST_TRACEBACK)):
            object.__setattr__(self, name, _shortened(getattr(self, name), most))


def _shortened(text: str, most: int) -> str:
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]} ... {left_out:,} characters left out ... {text[-(most - most // 2) :]}"


class Work(ABC):
    """What workers do. It travels to their processes, and each of them begins and runs its copy once.

    Attributes:
        helper: What has the methods that workers call on the pool's node; None for nothing.
    """

    helper: Any

    @abstractmethod
    def begin(self, launch: Launch, table: WorkerTable, helper: Any = None) -> Self:
        """Makes ready to run, and returns itself; `helper` stands for `self.helper` where that is on another node."""

    @abstractmethod
    def run(self) -> None:
        """Runs the user's function."""

    @property
    def noticed_stop(self) -> bool:
        """Whether it knows that it is to finish: then it gets the time to do so."""
        return False

    def give_up(self) -> object:
        """From now on waits for nobody else; called by another thread, when the function has had its time to finish."""
        return None

    def close(self) -> object:
        """Tidies up after the run, however it ended."""
        return None


class Replica(Protocol):
    """What keeps a worker's copy of its pool's table, whose original is on another node."""

    helper: Any  # stands for the work's

    def start(self, interrupt: Callable[[], object]) -> None:
        """Reports that the worker has begun; calls `interrupt` when it has to end at once."""

    def close(self) -> None:
        """Reports what the worker has written last, and ends."""


OpenReplica: TypeAlias = Callable[[Launch, WorkerTable], Replica]


class WorkerProcess:
    """One run of a worker, in the process that a backend has made for it."""

    def run(
        self, path: Sequence[str], payload: SupportsBytes, launch: Launch, open_replica: OpenReplica | None = None
    ) -> Outcome:
        """Does the work that `payload` holds until it returns, raises or is stopped.

        Args:
            path: The program's `sys.path`: what it can import, its workers can.
            payload: Gives the pickled `(work, table)`; unpickling attaches to the shared memory. Either may fail, which
                is reported like any other error.
            launch: Which worker this is.
            open_replica: Makes what keeps the copy of the table, for a worker on another node than the pool's.
        """
        torch.set_num_threads(1)  # as many workers as cores: more threads only get in the way
        sys.path.extend(place for place in path if place not in sys.path)
        try:
            _work(payload, launch, open_replica)
        except Stopped:
            return Outcome("ended")
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: nothing gets lost
            if isinstance(error, SystemExit) and not error.code:
                return Outcome("ended")
            if isinstance(error, SystemError) and isinstance(error.__cause__, Stopped):  # raised within a call of Ray's
                return Outcome("ended")
            return raised(error, ours=3)  # `WorkerProcess.run`, `_work` and the work's `run`
        return Outcome("ended")


def _work(payload: SupportsBytes, launch: Launch, open_replica: OpenReplica | None) -> None:
    unpickled: tuple[Work, WorkerTable] = pickle.loads(bytes(payload))
    work, table = unpickled
    replica = None
    if table.is_copy:
        if open_replica is None:
            raise AttachError("this worker is on another Ray node than its pool, which was to run on its own alone")
        replica = open_replica(launch, table)
    work.begin(launch, table, None if replica is None else replica.helper)

    def stop_here(signal_number: int, frame: FrameType | None) -> None:
        # Others may send this signal, too: to all processes of a program, as Slurm does before a time limit.
        if table.is_interrupted(launch.index) and not work.noticed_stop:  # otherwise it is finishing already
            raise Stopped("the pool that runs this worker was stopped")

    def interrupt() -> None:
        work.give_up()
        table.interrupt(launch.index)  # of this copy
        signal.pthread_kill(threading.main_thread().ident or 0, STOP_SIGNAL)

    signal.signal(STOP_SIGNAL, stop_here)
    table.begin(launch.index)
    with ExitStack() as ending:
        if replica is not None:
            ending.callback(replica.close)
            replica.start(interrupt)
        ending.callback(work.close)
        ending.callback(signal.signal, STOP_SIGNAL, signal.SIG_IGN)
        work.run()


def raised(error: BaseException, ours: int, when: str = "") -> Outcome:
    """Returns the outcome of a run that `error` ended.

    Args:
        error: What was raised.
        ours: Frames at the beginning of its traceback that are none of the user's business.
        when: Where that was not in the user's function.
    """
    summary = "".join(traceback.format_exception_only(error)).strip()
    frames = error.__traceback__
    for _ in range(ours):
        frames = (frames and frames.tb_next) or frames
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Outcome("raised", summary + when, text.rstrip())
