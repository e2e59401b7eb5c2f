"""`ExplorerPool`: explorers that fill a replay buffer, as supervised processes without Ray."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.errors import ReplayTimeout, WouldBlockForever
from torchreplay.explorers.explorer_context import MOST_EXPLORERS, MOST_ROWS, ExplorerContext
from torchreplay.explorers.named import Fillable, OneOrNamed, named_buffers, named_weights
from torchreplay.segment.waits import MEANWHILE
from torchreplay.validation import checked_instance, checked_int, checked_number
from torchreplay.weights.shared_weights import SharedWeights
from torchreplay.workers.backend import Backend
from torchreplay.workers.explorer_stats import ExplorerStats
from torchreplay.workers.process_backend import ProcessBackend
from torchreplay.workers.worker_pool import WorkerPool
from torchreplay.workers.worker_process import Launch, Work
from torchreplay.workers.worker_table import WorkerTable

Explore = Callable[[ExplorerContext], object]
"""A user's function: runs until `ctx.stopped`, or as long as it likes; its result is dropped."""


class ExplorersFailed(RuntimeError):
    """Every explorer of a pool has ended by an error and none will be restarted."""


@dataclass
class ExplorerTask(Work):
    """The work of explorers."""

    explore: Explore  # the user's function
    buffer: OneOrNamed[Fillable]  # what they write to, or several by name
    weights: OneOrNamed[SharedWeights] | None  # what they may pull, or several by name
    max_weight_sync_delay: int  # rows between two pulls of `ctx.pull_weights`

    helper = None

    def begin(self, launch: Launch, table: WorkerTable, helper: None = None) -> Self:
        """Makes the context that the function gets."""
        self._ctx = ExplorerContext(
            self.buffer,
            self.weights,
            launch.index,
            launch.num_workers,
            launch.seed,
            launch.restarts,
            max_weight_sync_delay=self.max_weight_sync_delay,
            table=table,
        )
        return self

    def run(self) -> None:
        """Runs the user's function."""
        before = MEANWHILE.set(self._ctx.keep_alive)
        try:
            self.explore(self._ctx)
        finally:
            MEANWHILE.reset(before)

    @property
    def noticed_stop(self) -> bool:
        """Whether the function knows that it is to finish."""
        return self._ctx.noticed_stop

    def close(self) -> None:
        """Closes its writers."""
        self._ctx.close()

    def __repr__(self) -> str:
        return repr(self.explore)


class ExplorerPool(WorkerPool):
    """Runs a function in several processes that write to one replay buffer, or to several.

    Each explorer has a process of its own, without Ray, that calls `explore(ctx)` with an `ExplorerContext`. An
    explorer whose function returns has finished. One whose function raises is reported with its traceback (logger
    `torchreplay.ray`, `errors`) and restarted; so is one whose process dies. The others do not notice. Delays between
    restarts double from `restart_delay` up to 30 s, and start over once the explorer has made progress. After
    `max_restarts` it is dropped, and the others go on.

    A learner's `sample` waits while explorers can be expected to write. Once all have ended, or each has failed five
    times in a row without an item or an episode, it raises `WouldBlockForever`. Inside the `with` block that error
    carries the explorers' last failures.

    Stopping the pool leaves the buffer alone: it can be sampled, and filled by another pool.

    Args:
        explore: Function of an `ExplorerContext`, defined anywhere cloudpickle reaches (without cloudpickle: in a
            module). It should return soon after `ctx.stopped` turns True; `Stopped` raised out of it is a good end.
        num_explorers: How many explorers to run, also more than there are cores.
        buffer: The buffer that they write to; it goes to them as its handle. Or several by name, such as one for
            each policy of a multi-agent environment, for `ctx.writer(name=...)`.
        weights: Weights for `ctx.pull_weights` and `ctx.weights`, or several by name, for
            `ctx.pull_weights(module, name=...)`.
        max_restarts: Restarts of each explorer before it is dropped; -1 for no limit.
        restart_delay: Seconds before the first restart after a failure, 0.1 at the least.
        heartbeat_timeout: Seconds, 1 at the least, after which an explorer that hangs is killed and restarted. It hangs
            if it has neither looked at `ctx.stopped`, recorded an episode, pulled weights nor waited for the limiter.
            None: never.
        max_weight_sync_delay: Rows that an explorer writes between two copies of `ctx.pull_weights`. 0: it copies
            whenever there are newer weights.
        seed: Seed from which every explorer's every run gets a seed of its own (numpy's
            `SeedSequence`); None draws one, to be read from `pool.seed`.

    Raises:
        ValueError: `explore` is no function, or a number is out of range.
        TypeError: `buffer` or `weights` are none. The shards of a `ShardedReplay` are reached through Ray:
            `torchreplay.ray.ExplorerPool`.

    A script starts its pool under `if __name__ == "__main__":`, as each explorer imports its main module.

    Example:
        >>> with ExplorerPool(explore, 4, buffer, weights) as pool:
        ...     for step in range(10_000):
        ...         learn(buffer.sample(256))
    """

    failed = ExplorersFailed
    _task = ExplorerTask

    def __init__(
        self,
        explore: Explore,
        num_explorers: int,
        buffer: OneOrNamed[Fillable],
        weights: OneOrNamed[SharedWeights] | None = None,
        *,
        max_restarts: int = -1,
        restart_delay: float = 1.0,
        heartbeat_timeout: float | None = None,
        max_weight_sync_delay: int = 0,
        seed: int | None = None,
    ) -> None:
        if not callable(explore):
            raise ValueError(f"explore is a function of an ExplorerContext, not {explore!r}")
        num_explorers = checked_int("num_explorers", num_explorers, 1, MOST_EXPLORERS)
        max_weight_sync_delay = checked_int("max_weight_sync_delay", max_weight_sync_delay, 0, MOST_ROWS)
        self._buffers = tuple(named_buffers(buffer).values())
        for one in self._buffers:
            self._require_reachable(one)
        names = [f"explorer {index} of {num_explorers}" for index in range(num_explorers)]
        super().__init__(names, self._open, max_restarts, restart_delay, seed, heartbeat_timeout)
        self.buffer, self.weights = buffer, weights
        named_weights(weights)  # or each explorer would say what is wrong with them
        self.num_explorers = num_explorers
        self._work = self._task(explore, buffer, weights, max_weight_sync_delay)

    def _require_reachable(self, buffer: Fillable) -> None:
        """Raises TypeError unless explorers can write to it."""
        expected = "a torchreplay.ReplayBuffer; torchreplay.ray.ExplorerPool has explorers for those of other nodes"
        checked_instance("buffer", buffer, ReplayBuffer, expected)

    def _require_open(self, buffer: Fillable) -> None:
        """Raises RuntimeError if the buffer is closed."""
        if isinstance(buffer, ReplayBuffer):
            buffer.handle()

    def _open(self, work: Any, num_workers: int) -> Backend[Any]:
        """Makes ready to run the explorers, so many at a time."""
        return ProcessBackend(work)

    def _make_work(self) -> ExplorerTask:
        for buffer in self._buffers:
            self._require_open(buffer)
        return self._work

    def _expect_writers(self) -> ExitStack:
        with ExitStack() as marks:  # which withdraws the first ones if another cannot be made
            for buffer in self._buffers:
                marks.enter_context(buffer.expect_writers())
            return marks.pop_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every explorer has ended for good, as those do whose function returns.

        Args:
            timeout: Seconds; None waits as long as it takes.

        Returns:
            Whether all have ended.

        Raises:
            ExplorersFailed: All have ended, each by an error.
        """
        if timeout is not None:
            timeout = checked_number("timeout", timeout, 0)
        supervisor = self._supervisor
        over = supervisor is None or supervisor.over.wait(timeout)
        self.check()
        return over

    def stats(self) -> tuple[ExplorerStats, ...]:
        """Statistics of each explorer, in order; those of the last run when the pool is stopped."""
        return self._worker_stats()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        if isinstance(error, (WouldBlockForever, ReplayTimeout)):
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Adds what the explorers failed with, if they did, to the error of a learner that waited for their rows."""
        if report := self._report():
            error.add_note(report)

    def __repr__(self) -> str:
        stats = self.stats()
        states = [stat.state for stat in stats]
        counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
        return (
            f"ExplorerPool({self.num_explorers} explorers: {counts}; "
            f"{sum(s.restarts for s in stats)} restarts, {sum(s.episodes for s in stats)} episodes)"
        )
