"""`ExplorerPool`: explorers that fill a replay buffer, as supervised processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from torchreplay.errors import ReplayTimeout, WouldBlockForever
from torchreplay.ray.explorers.explorer_context import MOST_EXPLORERS, MOST_ROWS, ExplorerContext
from torchreplay.ray.remote.remote_buffer import RemoteBuffer
from torchreplay.ray.sharded.sharded_replay import ShardedReplay, shards_of
from torchreplay.ray.workers.named import Fillable, OneOrNamed, named_buffers, named_weights
from torchreplay.ray.workers.placement import OverShards, Placement
from torchreplay.ray.workers.resources import BackendName, WorkerResources
from torchreplay.validation import checked_int, checked_number
from torchreplay.weights.shared_weights import SharedWeights
from torchreplay.workers.explorer_stats import ExplorerStats
from torchreplay.workers.worker_pool import WorkerPool
from torchreplay.workers.worker_process import Launch, Work
from torchreplay.workers.worker_table import WorkerTable

Explore = Callable[[ExplorerContext], object]
"""A user's function: runs until `ctx.stopped`, or as long as it likes; its result is dropped."""


class ExplorersFailed(RuntimeError):
    """Every explorer of a pool has ended by an error and none will be restarted."""


class ExplorerPool(WorkerPool):
    """Runs a function in several processes that write to one replay buffer, or to several.

    Each explorer has a process of its own, a Ray actor or a plain one, that calls `explore(ctx)` with an
    `ExplorerContext`. An explorer whose function returns has finished. One whose function raises is reported with its
    traceback (logger `torchreplay.ray`, `errors`) and restarted; so is one whose process dies. The others do not
    notice. Delays between restarts double from `restart_delay` up to 30 s, and start over once the explorer has made
    progress. After `max_restarts` it is dropped, and the others go on.

    A learner's `sample` waits while explorers can be expected to write. Once all have ended, or each has failed five
    times in a row without a row or an episode, it raises `WouldBlockForever`. Inside the `with` block that error
    carries the explorers' last failures.

    Stopping the pool leaves the buffer alone: it can be sampled, and filled by another pool.

    Args:
        explore: Function of an `ExplorerContext`, defined anywhere cloudpickle reaches (without cloudpickle, and with
            `backend="process"`: in a module). It should return soon after `ctx.stopped` turns True; `Stopped` raised
            out of it is a good end.
        num_explorers: How many explorers to run, also more than there are cores.
        buffer: The buffer that they write to, a `ReplayBuffer` or a `ShardedReplay`; it goes to them as its handle. Or
            several by name, such as one for each policy of a multi-agent environment, for `ctx.writer(name=...)`.
        weights: Weights for `ctx.pull_weights` and `ctx.weights`, or several by name, for
            `ctx.pull_weights(module, name=...)`.
        max_restarts: Restarts of each explorer before it is dropped; -1 for no limit.
        restart_delay: Seconds before the first restart after a failure.
        max_weight_sync_delay: Rows that an explorer writes between two copies of `ctx.pull_weights`. 0: it copies
            whenever there are newer weights.
        backend: `"ray"` for Ray actors; `"process"` for plain processes, without Ray. A script that uses plain
            processes starts them under `if __name__ == "__main__":`, as each imports its main module.
        num_cpus: CPUs that Ray reserves for each explorer. By default none: all of them run, and the kernel divides the
            cores.
        num_gpus: GPUs, or a part of one, that Ray reserves for each explorer.
        runtime_env: Their environment, as Ray takes it, such as `{"env_vars": {...}}`.
        placement: Where Ray is to run them. None: on this machine, where the buffer's memory is. With a
            `ShardedReplay`: in turn on the nodes that have shards, no more on each than its `num_cpus` and `num_gpus`
            allow. `"LOCAL_FIRST"`: on this machine while it has these left, then on others. Or one of Ray's scheduling
            strategies, such as `"SPREAD"` or that of a placement group. Or a function of the explorer's index that
            returns one of these, called before each of its runs. Explorers on other nodes than the buffer's have remote
            writers and fetch the weights: the same calls, `docs/scaling.md`.
        seed: Seed from which every explorer's every run gets a seed of its own (numpy's
            `SeedSequence`); None draws one, to be read from `pool.seed`.

    Raises:
        ValueError: `explore` is no function, a number is out of range, or plain processes are asked for what only Ray
            does.
        TypeError: `buffer` or `weights` are none.

    Example:
        >>> with ExplorerPool(explore, 4, buffer, weights) as pool:
        ...     for step in range(10_000):
        ...         learn(buffer.sample(256))
    """

    failed = ExplorersFailed

    def __init__(
        self,
        explore: Explore,
        num_explorers: int,
        buffer: OneOrNamed[Fillable],
        weights: OneOrNamed[SharedWeights] | None = None,
        *,
        max_restarts: int = -1,
        restart_delay: float = 1.0,
        max_weight_sync_delay: int = 0,
        backend: BackendName = "ray",
        num_cpus: float = 0,
        num_gpus: float = 0,
        runtime_env: Mapping[str, Any] | None = None,
        placement: Placement = None,
        seed: int | None = None,
    ) -> None:
        if not callable(explore):
            raise ValueError(f"explore is a function of an ExplorerContext, not {explore!r}")
        num_explorers = checked_int("num_explorers", num_explorers, 1, MOST_EXPLORERS)
        max_weight_sync_delay = checked_int("max_weight_sync_delay", max_weight_sync_delay, 0, MOST_ROWS)
        self._buffers = tuple(named_buffers(buffer).values())
        sharded = [one for one in self._buffers if isinstance(one, ShardedReplay)]
        if sharded and backend == "process":
            raise ValueError("backend='process': the shards of a ShardedReplay are reached through Ray, backend='ray'")
        if sharded and placement is None:
            placement = OverShards(sharded, {"CPU": num_cpus, "GPU": num_gpus})
        resources = WorkerResources(backend, num_cpus, num_gpus, runtime_env, placement)
        names = [f"explorer {index} of {num_explorers}" for index in range(num_explorers)]
        super().__init__(names, resources.open, max_restarts, restart_delay, seed)
        self.buffer, self.weights = buffer, weights
        named_weights(weights)  # or each explorer would say what is wrong with them
        self.num_explorers = num_explorers
        self._work = ExplorerTask(explore, buffer, weights, max_weight_sync_delay)

    def _make_work(self) -> ExplorerTask:
        for buffer in self._buffers:  # each says that it is closed, where it is
            if isinstance(buffer, ShardedReplay):
                shards_of(buffer).require_open()
            else:
                buffer.handle()
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


@dataclass
class ExplorerTask(Work):
    """The work of explorers."""

    explore: Explore  # the user's function
    buffer: OneOrNamed[Fillable]  # what they write to, or several by name
    weights: OneOrNamed[SharedWeights] | None  # what they may pull, or several by name
    max_weight_sync_delay: int  # rows between two pulls of `ctx.pull_weights`

    helper = None

    def begin(self, launch: Launch, board: WorkerTable, helper: None = None) -> Self:
        """Makes the context that the function gets."""
        self._ctx = ExplorerContext(
            self.buffer,
            self.weights,
            launch.index,
            launch.num_workers,
            launch.seed,
            launch.restarts,
            max_weight_sync_delay=self.max_weight_sync_delay,
            board=board,
        )
        return self

    def run(self) -> None:
        """Runs the user's function."""
        self.explore(self._ctx)

    @property
    def noticed_stop(self) -> bool:
        """Whether the function knows that it is to finish."""
        return self._ctx.noticed_stop

    def give_up(self) -> None:
        """Has its writers to other nodes wait no longer for the limiter."""
        for buffer in self._elsewhere():
            buffer.give_up()

    def close(self) -> None:
        """Closes its writers, and has those to other nodes say farewell: this process may not live much longer."""
        with ExitStack() as closing:
            for buffer in self._elsewhere():
                closing.callback(buffer.drain)
            closing.callback(self._ctx.close)

    def _elsewhere(self) -> list[RemoteBuffer]:
        buffers: Iterable[Any] = named_buffers(self.buffer).values()
        return [buffer for buffer in buffers if isinstance(buffer, RemoteBuffer)]

    def __repr__(self) -> str:
        return repr(self.explore)
