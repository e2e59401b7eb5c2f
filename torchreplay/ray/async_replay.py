"""`AsyncReplay`: explorers, learner and evaluator, and what lies between them, in one object."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from torchreplay.arguments import checked_instance, checked_int
from torchreplay.dataset import ReplayDataset
from torchreplay.mixing import MixedDataset
from torchreplay.ray.evaluator import Evaluator
from torchreplay.ray.named import OneOrNamed, named_buffers, named_modules, named_weights
from torchreplay.ray.pool import ExplorerPool

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchreplay.ray.scores import Evaluation
    from torchreplay.ray.stats import ExplorerStats
    from torchreplay.replay import Pin
    from torchreplay.stats import Stats

Learn = Callable[[Any], Any]
"""A user's function of a batch, or of a dict of batches: makes a learner step, returns TD errors for them or None."""

_PARTS: Final = ("draw", "learn", "feedback", "publish")
_TIMES_KEPT: Final = 100
_LOOK_EVERY: Final = 1.0
"""Seconds between two looks at the counters, for the throughput, and at whether the workers are well."""
_LOOKS_KEPT: Final = 10
_MOST_STEPS: Final = (1 << 63) - 1


@dataclass(frozen=True)
class Timing:
    """How long one part of the learner's steps takes.

    Attributes:
        count: How often it was done.
        seconds: How long in all.
        mean_ms: Mean of the last 100 times, in milliseconds; 0 before the first.
    """

    count: int
    seconds: float
    mean_ms: float


@dataclass(frozen=True)
class AsyncReplayStats:
    """What an `AsyncReplay` has done, and how fast it is.

    Attributes:
        steps: Learner steps.
        items: Items that they learned from, over all buffers.
        rows_per_second: Rows written by all explorers, over the last ten seconds.
        items_per_second: Items learned from, over the last ten seconds.
        publications: Publications of weights by this learner.
        weight_syncs: How often an explorer's `ctx.pull_weights` gave it newer ones.
        dropped_updates: TD errors that came too late for their item (`stale_updates` and `unready_updates`).
        ready: Batches that were drawn when the learner asked for its next one, on average over the last 100 steps:
            near 0 the learner waits for draws (or rows), near `prefetch` it does not.
        timings: Of the parts of a step: waiting for and drawing a batch, learning, feedback, publishing.
        buffers: Statistics of each buffer by name; a single one is named "buffer".
        explorers: Statistics of each explorer.
        evaluation: The last result of the evaluator; None without one.
    """

    steps: int
    items: int
    rows_per_second: float
    items_per_second: float
    publications: int
    weight_syncs: int
    dropped_updates: int
    ready: float
    timings: Mapping[str, Timing]
    buffers: Mapping[str, Stats]
    explorers: tuple[ExplorerStats, ...]
    evaluation: Evaluation | None

    def as_dict(self) -> dict[str, Any]:
        """Returns plain nested dicts, ready for JSON but for NaN."""
        return asdict(self)


class AsyncReplay:
    """Runs a learner beside its explorers and its evaluator. A context manager.

    Each step draws a batch, calls `learn`, feeds the TD errors back and now and then publishes the weights. Who has to
    wait for whom is up to the buffer's limiter: `MinSize(n)` is what is called learning starts, `SamplesPerInsert`
    holds the ratio of learning to exploring. A pool of several buffers gives `learn` a dict of batches by name.

    Args:
        pool: The explorers, with the buffer or buffers that they fill and the weights that they pull.
        learn: Function of a batch that makes one step and returns the TD errors, `[B]`, or None for no feedback. Of
            several buffers it gets a dict of batches and returns a dict of TD errors.
        module: The module whose weights are published, or several by the names of the pool's weights.
        batch_size: Items in a batch, of each buffer.
        publish_every: Steps from one publication to the next.
        evaluator: Runs along; at the end of `run` it evaluates the last weights.
        prefetch: Batches drawn ahead, as in `ReplayDataset`.
        timeout: Seconds that a draw may wait, as in `ReplayDataset`.
        device: Where batches go before `learn` gets them, as in `ReplayDataset`.
        pin: How they go there, as in `ReplayDataset`.

    Raises:
        ValueError: A number is out of range, or the names of modules and weights differ.
        TypeError: `pool`, `learn`, `module` or `evaluator` is not what it has to be.

    Example:
        >>> pool = ExplorerPool(explore, 8, buffer, weights)
        >>> evaluator = Evaluator(evaluate, weights, QNetwork, every_seconds=30, directory="run")
        >>> print(AsyncReplay(pool, learn, q, evaluator=evaluator).run(10_000))
    """

    def __init__(
        self,
        pool: ExplorerPool,
        learn: Learn,
        module: OneOrNamed[nn.Module] | None = None,
        *,
        batch_size: int = 256,
        publish_every: int = 10,
        evaluator: Evaluator | None = None,
        prefetch: int = 2,
        timeout: float | None = None,
        device: torch.device | str | int | None = None,
        pin: Pin | None = None,
    ) -> None:
        self.pool = checked_instance("pool", pool, ExplorerPool, "a torchreplay.ray.ExplorerPool")
        if not callable(learn):
            raise TypeError(f"learn is {learn!r:.200}: expected a function of a batch")
        if evaluator is not None:
            checked_instance("evaluator", evaluator, Evaluator, "a torchreplay.ray.Evaluator")
        self.evaluator = evaluator
        self.publish_every = checked_int("publish_every", publish_every, 1, _MOST_STEPS)
        self._learn = learn
        self._modules, self._weights = named_modules(module), named_weights(pool.weights)
        if self._modules.keys() != self._weights.keys():
            raise ValueError(
                f"the modules are named {list(self._modules)} and the pool's weights {list(self._weights)}: expected a "
                "module for each of the weights (None stands for a single one)"
            )
        self._buffers = named_buffers(pool.buffer)
        self._dataset: ReplayDataset | MixedDataset = (
            MixedDataset(pool.buffer, batch_size, None, prefetch, device, timeout, pin)
            if isinstance(pool.buffer, Mapping)
            else ReplayDataset(pool.buffer, batch_size, None, prefetch, device, timeout, pin)
        )
        self._steps = self._publications = 0
        self._times: dict[str, deque[float]] = {part: deque(maxlen=_TIMES_KEPT) for part in _PARTS}
        self._ready: deque[int] = deque(maxlen=_TIMES_KEPT)
        self._counts, self._totals = dict.fromkeys(_PARTS, 0), dict.fromkeys(_PARTS, 0.0)
        self._looks: deque[tuple[float, int, int]] = deque(maxlen=_LOOKS_KEPT + 1)  # time, rows, items
        self._running = ExitStack()
        self._inside = False

    def run(self, steps: int) -> AsyncReplayStats:
        """Makes so many learner steps, with all workers running, and returns the statistics.

        Args:
            steps: Learner steps.

        Raises:
            ExplorersFailed: No explorer is left.
            EvaluatorFailed: The evaluator is not restarted any more.
            ValueError: TD errors of the last steps, still on their way from a device, are NaN or infinite.
            Exception: What `learn` or a draw raises.
        """
        with self:
            for _ in self.steps(steps):
                pass
            for buffer in self._buffers.values():
                buffer.flush()
            self.publish()
            if self.evaluator is not None:
                self.evaluator.wait()
            return self.stats()

    def steps(self, steps: int) -> Iterator[int]:
        """Makes learner steps one by one, inside `with`.

        Args:
            steps: How many; fewer when the buffer is stopped.

        Yields:
            The number of steps made so far, over all calls.

        Raises:
            RuntimeError: Outside of `with`.
            Exception: As for `run`.
        """
        steps = checked_int("steps", steps, 0, _MOST_STEPS)
        if not self._inside:
            raise RuntimeError("the explorers do not run: iterate inside `with replay:`, or call replay.run(steps)")
        batches = iter(self._dataset)
        try:
            for _ in range(steps):
                self._ready.append(self._dataset.ready)
                with self._timed("draw"):
                    batch = next(batches, None)
                if batch is None:  # the buffer was stopped
                    return
                with self._timed("learn"):
                    td = self._learn(batch)
                with self._timed("feedback"):
                    self._feed_back(batch, td)
                self._steps += 1
                if self._steps % self.publish_every == 0:
                    self.publish()
                self._look()
                yield self._steps
        finally:
            batches.close()  # type: ignore[attr-defined]  # it is a generator

    def publish(self) -> None:
        """Publishes the weights of every module."""
        if not self._weights:
            return
        with self._timed("publish"):
            for name, weights in self._weights.items():
                weights.publish(self._modules[name])
        self._publications += 1

    def stats(self) -> AsyncReplayStats:
        """What was done until now, and how fast."""
        buffers = {"buffer" if name is None else name: buffer.stats() for name, buffer in self._buffers.items()}
        explorers = self.pool.stats()
        rows_per_second, items_per_second = self._throughput()
        return AsyncReplayStats(
            steps=self._steps,
            items=self._items,
            rows_per_second=rows_per_second,
            items_per_second=items_per_second,
            publications=self._publications,
            weight_syncs=sum(explorer.weight_syncs for explorer in explorers),
            dropped_updates=sum(stats.stale_updates + stats.unready_updates for stats in buffers.values()),
            ready=sum(self._ready) / max(len(self._ready), 1),
            timings={part: self._timing(part) for part in _PARTS},
            buffers=buffers,
            explorers=explorers,
            evaluation=None if self.evaluator is None else self.evaluator.latest,
        )

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            starting.enter_context(self.pool)
            if self.evaluator is not None:
                starting.enter_context(self.evaluator)
            self._running = starting.pop_all()
        self._inside = True
        self._looks.clear()
        self._note()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside = False
        self._running.__exit__(kind, error, traceback)

    @property
    def _items(self) -> int:
        return self._steps * self._dataset.batch_size * len(self._buffers)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._times[part].append(seconds)
        self._counts[part] += 1
        self._totals[part] += seconds

    def _timing(self, part: str) -> Timing:
        times = self._times[part]
        return Timing(self._counts[part], self._totals[part], 1e3 * sum(times) / max(len(times), 1))

    def _feed_back(self, batch: Any, td: Any) -> None:
        if td is None:
            return
        if isinstance(self._dataset, MixedDataset):
            self._dataset.update_priorities(batch, td)
        else:
            self._dataset.buffer.update_priorities(batch, td)

    def _look(self) -> None:
        if time.monotonic() - self._looks[-1][0] >= _LOOK_EVERY:
            self._note()
            self.pool.check()
            if self.evaluator is not None:
                self.evaluator.check()

    def _note(self) -> None:
        rows = sum(buffer.stats().rows_written for buffer in self._buffers.values())
        if self._looks:
            rows = max(rows, self._looks[-1][1])  # those of a lost shard are no longer counted
        self._looks.append((time.monotonic(), rows, self._items))

    def _throughput(self) -> tuple[float, float]:
        """Rows and items a second from the oldest to the newest look."""
        if len(self._looks) < 2:
            return 0.0, 0.0
        (began, rows_then, items_then), (ended, rows, items) = self._looks[0], self._looks[-1]
        return (rows - rows_then) / (ended - began), (items - items_then) / (ended - began)

    def __repr__(self) -> str:
        return f"AsyncReplay({self._steps:,} steps, {self.pool!r})"
