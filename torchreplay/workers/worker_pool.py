"""What pools of workers have in common: they start and stop, and say what went wrong."""

from __future__ import annotations

import atexit
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.util import Finalize
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np

from torchreplay.segment.transient import Transient
from torchreplay.validation import checked_int, checked_number
from torchreplay.workers.backend import Backend
from torchreplay.workers.explorer_stats import ExplorerFailure, ExplorerStats, explorer_stats
from torchreplay.workers.supervisor import GRACE, Policy, Supervisor
from torchreplay.workers.worker_process import Work
from torchreplay.workers.worker_table import ENTRY, WorkerTable

OpenBackend: TypeAlias = Callable[[tuple[Work, WorkerTable], int], Backend[Any]]

_FAILURES_KEPT: Final = 100

_LEAST_DELAY: Final = 0.1
"""Seconds before a restart at the least: a function that fails at once would take a core, and fill the log."""

_CLEAN_UP: Final = 5.0
"""Seconds that a drained worker gets after it was interrupted."""


class WorkerPool(Transient, ABC):
    """Workers that are supervised from `start` to `stop`. A context manager.

    Args:
        names: What to call each worker in the log.
        open_backend: Makes ready to run `(work, table)` in so many processes at a time, and returns what runs it.
        max_restarts: Restarts of each worker before it is dropped; -1 for no limit.
        restart_delay: Seconds before the first restart after a failure, 0.1 at the least.
        seed: Entropy of all seeds; None draws it.
        heartbeat_timeout: Seconds without a heartbeat after which a worker is killed and restarted; None: never.
    """

    failed: ClassVar[type[RuntimeError]]
    """What `check` raises."""

    def __init__(
        self,
        names: Sequence[str],
        open_backend: OpenBackend,
        max_restarts: int,
        restart_delay: float,
        seed: int | None,
        heartbeat_timeout: float | None = None,
    ) -> None:
        max_restarts = checked_int("max_restarts (-1: no limit)", max_restarts, -1, (1 << 31) - 1)
        restart_delay = max(checked_number("restart_delay", restart_delay, 0), _LEAST_DELAY)
        if heartbeat_timeout is not None:
            heartbeat_timeout = checked_number("heartbeat_timeout", heartbeat_timeout, 1)
        seed = None if seed is None else checked_int("seed", seed, 0, (1 << 128) - 1)
        self.seed: int = int(np.random.SeedSequence(seed).entropy)  # type: ignore[arg-type]
        self._names, self._open_backend = names, open_backend
        self._max_restarts, self._restart_delay = max_restarts, restart_delay
        self._heartbeat_timeout = heartbeat_timeout
        self._starts = 0
        self._supervisor: Supervisor | None = None
        self._backend: Any = None
        self._pid = 0  # of the process that started it
        self._failures: deque[ExplorerFailure] = deque(maxlen=_FAILURES_KEPT)
        self._last_stats = tuple(
            explorer_stats(index, entry) for index, entry in enumerate(np.zeros(len(names), ENTRY))
        )
        self._at_exit: Finalize | None = None
        self._lock = threading.RLock()  # of start and stop

    @abstractmethod
    def _make_work(self) -> Work:
        """Returns what the workers of this start do."""

    def _expect_writers(self) -> ExitStack:
        """Makes the marks that workers may still write to buffers."""
        return ExitStack()

    def _listen(self) -> object:
        """Called by the supervising thread ten times a second."""
        return None

    def start(self) -> Self:
        """Launches the workers and returns at once; does nothing before they were stopped, even if all have ended.

        Starts Ray, for itself alone, unless the program has done so, or `backend="process"` needs none. What was
        stopped starts afresh: new processes, new seeds, statistics from zero.

        Raises:
            ImportError: Ray is not installed.
            TypeError: The function or something it refers to cannot be pickled.
            ValueError: Ray has less than the workers reserve.
        """
        with self._lock:
            if self._supervisor is not None and self._supervisor.stopping:  # Ctrl-C has interrupted a `stop`
                self.stop()
            if self._supervisor is None:
                table = WorkerTable(len(self._names))
                self._backend = self._open_backend((self._make_work(), table), len(self._names))
                policy = Policy(
                    self.seed, self._starts, self._max_restarts, self._restart_delay, self._heartbeat_timeout
                )
                try:
                    self._supervisor = Supervisor(
                        self._backend, table, self._names, policy, self._expect_writers, self._failures, self._listen
                    )
                except BaseException:
                    self._backend.close()
                    raise
                self._starts += 1
                self._pid = os.getpid()
                atexit.register(self.stop)
                # A child of multiprocessing joins its own children first, and ours end only when stopped.
                self._at_exit = Finalize(None, self.stop, exitpriority=0)
        return self

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the workers and returns when their processes are gone; may be called again.

        `ctx.stopped` turns True. A function that has not looked at it half a second later, because
        it waits for the limiter or anything else, finds `Stopped` raised where it is. One that has
        not returned after `timeout` seconds is killed. Ray is shut down if pools and evaluators have started it, and
        this is the last of them.

        Args:
            timeout: Seconds that the workers get to finish by themselves.
        """
        timeout = checked_number("timeout", timeout, 0)
        self._end(min(GRACE, timeout / 2), timeout)

    def drain(self, timeout: float = 60.0) -> bool:
        """Ends the workers like `stop`, but interrupts nobody for `timeout` seconds.

        For functions that look at `ctx.stopped` between episodes: each completes the one it is in. Explorers that wait
        for the limiter go on waiting, unless another thread draws.

        Args:
            timeout: Seconds that the workers get to finish by themselves.

        Returns:
            Whether all did.
        """
        timeout = checked_number("timeout", timeout, 0)
        return self._end(timeout, timeout + _CLEAN_UP)

    def _end(self, grace: float, timeout: float) -> bool:
        if os.getpid() != self._pid:  # a forked child leaves its parent's workers alone
            return True
        with self._lock:
            supervisor, backend = self._supervisor, self._backend
            if supervisor is None:
                return True
            supervisor.stop(grace, timeout)
            if self._supervisor is supervisor:  # else a signal's handler has stopped it meanwhile
                self._last_stats = supervisor.stats()
                self._supervisor = None
                atexit.unregister(self.stop)
                if self._at_exit is not None:
                    self._at_exit.cancel()
                backend.close()
            return not supervisor.interrupted

    def check(self) -> None:
        """Raises if no worker is left because all have failed; costs microseconds.

        Raises:
            RuntimeError: Every worker has ended by an error and used up its restarts: `ExplorersFailed` of an
                `ExplorerPool`, `EvaluatorFailed` of an `Evaluator`.
        """
        if all(stats.state == "failed" for stats in self._worker_stats()):
            who = self._names[0] if len(self._names) == 1 else f"each of {len(self._names)} workers"
            raise self.failed(
                f"{who} has failed and is not restarted any more (max_restarts={self._max_restarts})\n{self._report()}"
            )

    @property
    def errors(self) -> Sequence[ExplorerFailure]:
        """The last 100 failures, oldest first."""
        return tuple(self._failures)

    def _worker_stats(self) -> tuple[ExplorerStats, ...]:
        supervisor = self._supervisor
        return supervisor.stats() if supervisor else self._last_stats

    def _report(self) -> str:
        """Returns what workers have failed with since the last start; "" if none has."""
        who: dict[str, list[str]] = {}  # by what they failed with
        for stats in self._worker_stats():
            if stats.last_traceback is not None:
                who.setdefault(stats.last_traceback, []).append(self._names[stats.index])
        return "\n".join(
            f"{names[0]}{f' and {len(names) - 1} others' if len(names) > 1 else ''} failed last with:\n{text}"
            for text, names in list(who.items())[:_FAILURES_KEPT]
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.stop()
