"""`ExplorerPool`: explorers that fill a replay buffer, as supervised Ray actors."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from torchreplay.errors import ReplayTimeout, WouldBlockForever
from torchreplay.ray.actors import Actors
from torchreplay.ray.board import Board
from torchreplay.ray.explorer import Explore
from torchreplay.ray.session import RaySession
from torchreplay.ray.stats import ExplorerFailure, ExplorerStats, explorer_stats
from torchreplay.ray.supervisor import Policy, Supervisor

if TYPE_CHECKING:
    from torchreplay.buffer import ReplayBuffer
    from torchreplay.weights import SharedWeights

_FAILURES_KEPT: Final = 100


class ExplorersFailed(RuntimeError):
    """Every explorer of a pool has ended by an error and none will be restarted."""


class ExplorerPool:
    """Runs a function in several processes that write to one replay buffer.

    Each explorer is a Ray actor on this machine, with a process of its own, that calls
    `explore(ctx)` with an `ExplorerContext`. An explorer whose function returns has finished. One
    whose function raises is reported with its traceback (logger `torchreplay.ray`, `errors`) and
    restarted; so is one whose process dies. The others do not notice. Delays between restarts
    double from `restart_delay` up to 30 s, and start over once the explorer has made progress.

    A learner's `sample` waits while explorers can be expected to write. Once all have ended, or
    each has failed five times in a row without writing a row or ending an episode, it raises
    `WouldBlockForever`; inside the `with` block that error carries the explorers' last failures.

    Stopping the pool leaves the buffer alone: it can be sampled, and filled by another pool.

    Args:
        explore: Function of an `ExplorerContext`, defined anywhere cloudpickle reaches. It should
            return soon after `ctx.stopped` turns True; `Stopped` raised out of it is a good end.
        num_explorers: How many explorers to run, also more than there are cores.
        buffer: The buffer that they write to; it goes to them as its handle.
        weights: Weights for `ctx.weights`.
        max_restarts: Restarts of each explorer before it counts as failed; -1 for no limit.
        restart_delay: Seconds before the first restart after a failure.
        num_cpus: CPUs that Ray reserves for each explorer. By default none, so that all of them
            run whatever else Ray has reserved; which of them gets a core is the kernel's affair.
        seed: Seed from which every explorer's every run gets a seed of its own (numpy's
            `SeedSequence`); None draws one, to be read from `pool.seed`.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> with ExplorerPool(explore, 4, buffer, weights) as pool:
        ...     for step in range(10_000):
        ...         learn(buffer.sample(256))
    """

    def __init__(
        self,
        explore: Explore,
        num_explorers: int,
        buffer: ReplayBuffer,
        weights: SharedWeights | None = None,
        *,
        max_restarts: int = -1,
        restart_delay: float = 1.0,
        num_cpus: float = 0,
        seed: int | None = None,
    ) -> None:
        _check(explore, num_explorers, max_restarts, restart_delay, num_cpus)
        self.buffer = buffer
        self.num_explorers = num_explorers
        self.seed: int = int(np.random.SeedSequence(seed).entropy)  # type: ignore[arg-type]
        self._explore, self._weights = explore, weights
        self._max_restarts, self._restart_delay = max_restarts, restart_delay
        self._num_cpus = num_cpus
        self._starts = 0
        self._session: RaySession | None = None
        self._supervisor: Supervisor | None = None
        self._failures: deque[ExplorerFailure] = deque(maxlen=_FAILURES_KEPT)
        self._last_stats = tuple(
            explorer_stats(index, entry, "stopped", 0, None) for index, entry in enumerate(Board(num_explorers).entries)
        )
        self._lock = threading.RLock()  # of start and stop

    def start(self) -> ExplorerPool:
        """Launches the explorers and returns at once; does nothing while the pool runs.

        Starts Ray, for itself alone, unless the program has done so. A pool that was stopped
        starts afresh: new processes, new seeds, statistics from zero.

        Raises:
            ImportError: Ray is not installed.
            TypeError: The function or something it refers to cannot be pickled.
            ValueError: Ray has fewer CPUs than the explorers reserve.
        """
        with self._lock:
            if self._supervisor is None:
                self._session = RaySession(self.num_explorers * self._num_cpus)
                try:
                    self._supervisor = self._supervise(self._session)
                except BaseException:
                    self._session.close()
                    raise
                self._starts += 1
                atexit.register(self.stop)
        return self

    def _supervise(self, session: RaySession) -> Supervisor:
        board = Board(self.num_explorers)
        try:
            payload = session.ray.cloudpickle.dumps((self._explore, self.buffer, self._weights, board))
        except Exception as error:
            raise TypeError(
                f"{self._explore!r} cannot be sent to the explorers' processes: {error}; make "
                "environments, networks and open files inside the function, and see "
                "ray.util.inspect_serializability for what it refers to"
            ) from error
        return Supervisor(
            Actors(payload, self._num_cpus),
            board,
            self.num_explorers,
            Policy(self.seed, self._starts, self._max_restarts, self._restart_delay),
            self.buffer.expect_writers,
            self._failures,
        )

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the explorers and returns when their processes are gone; may be called again.

        `ctx.stopped` turns True. A function that has not looked at it half a second later, because
        it waits for the limiter or anything else, finds `Stopped` raised where it is. One that has
        not returned after `timeout` seconds is killed. Ray is shut down if the pool started it.

        Args:
            timeout: Seconds that the explorers get to finish by themselves.
        """
        with self._lock:
            if self._supervisor is not None:
                self._supervisor.stop(timeout)
                self._last_stats = self._supervisor.stats()
                self._supervisor = None
                atexit.unregister(self.stop)
            if self._session is not None:
                self._session.close()
                self._session = None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every explorer has ended for good, as those do whose function returns.

        Args:
            timeout: Seconds; None waits as long as it takes.

        Returns:
            Whether all have ended.

        Raises:
            ExplorersFailed: All have ended, each by an error.
        """
        supervisor = self._supervisor
        over = supervisor is None or supervisor.over.wait(timeout)
        self.check()
        return over

    def check(self) -> None:
        """Raises if no explorer is left because all have failed; costs microseconds.

        Raises:
            ExplorersFailed: Every explorer has ended by an error and used up its restarts.
        """
        if all(stats.state == "failed" for stats in self.stats()):
            raise ExplorersFailed(
                f"all {self.num_explorers} explorers have failed and none is restarted any more "
                f"(max_restarts={self._max_restarts})\n{self._report()}"
            )

    def stats(self) -> tuple[ExplorerStats, ...]:
        """Statistics of each explorer, in order; those of the last run when the pool is stopped."""
        supervisor = self._supervisor
        return supervisor.stats() if supervisor else self._last_stats

    @property
    def errors(self) -> Sequence[ExplorerFailure]:
        """The last 100 failures, oldest first."""
        return tuple(self._failures)

    def _report(self) -> str:
        last = {failure.index: failure for failure in self._failures}
        return "\n".join(
            f"Explorer {index} failed last with:\n{failure.traceback}" for index, failure in sorted(last.items())
        )

    def __enter__(self) -> ExplorerPool:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        if isinstance(error, (WouldBlockForever, ReplayTimeout)) and self._failures:
            error.add_note(self._report())

    def __repr__(self) -> str:
        stats = self.stats()
        states = [stat.state for stat in stats]
        counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
        return (
            f"ExplorerPool({self.num_explorers} explorers: {counts}; "
            f"{sum(s.restarts for s in stats)} restarts, {sum(s.episodes for s in stats)} episodes)"
        )


def _check(explore: Any, num_explorers: int, max_restarts: int, restart_delay: float, num_cpus: float) -> None:
    """Rejects what could only fail later, in a thread."""
    if not callable(explore):
        raise ValueError(f"explore is a function of an ExplorerContext, not {explore!r}")
    if num_explorers < 1:
        raise ValueError(f"num_explorers={num_explorers}: expected at least 1")
    if max_restarts < -1:
        raise ValueError(f"max_restarts={max_restarts}: expected at least 0, or -1 for no limit")
    if not 0 <= restart_delay < float("inf"):
        raise ValueError(f"restart_delay={restart_delay}: expected seconds, at least 0")
    if num_cpus < 0:
        raise ValueError(f"num_cpus={num_cpus}: expected at least 0")
