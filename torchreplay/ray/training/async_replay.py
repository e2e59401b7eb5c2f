"""`AsyncReplay`: explorers, learner and evaluator, and what lies between them, in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import nn

from torchreplay.buffer.base import Pin
from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.buffer.stats import Stats
from torchreplay.evaluation.evaluation_log import Evaluation
from torchreplay.explorers import ExplorerPool
from torchreplay.explorers.named import OneOrNamed, named_buffers, named_modules, named_weights
from torchreplay.loading.dataset import ReplayDataset
from torchreplay.loading.mixed_dataset import MixedDataset
from torchreplay.ray.evaluation.evaluator import Evaluator
from torchreplay.ray.sharded.stats import ShardedStats
from torchreplay.ray.training.throughput import Throughput, Timing
from torchreplay.schema.spec import VERSION
from torchreplay.validation import checked_instance, checked_int
from torchreplay.weights.shared_weights import go_on_from
from torchreplay.workers.explorer_stats import ExplorerStats

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

Learn = Callable[[Any], Any]
"""A user's function of a batch, or of a dict of batches: makes a learner step, returns TD errors for them or None."""

_PARTS: Final = ("draw", "learn", "feedback", "publish")
_MOST_STEPS: Final = (1 << 63) - 1


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
        dropped_updates: TD errors that came too late for their item (`stale_updates` and `unready_updates`), or whose
            shard was lost (`lost_updates`).
        ready: Batches that lay ready when the learner asked for one; mean of the last 100 steps. Near 0 the learner
            waits for draws or rows. Near `prefetch` it does not wait.
        timings: Of the parts of a step: waiting for and drawing a batch, learning, feedback, publishing. Of a Trainer's
            steps what it does between two batches counts as drawing, and what it does with one as learning.
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
        """Returns plain nested dicts, ready for JSON unless a value is NaN."""
        return asdict(self)


class AsyncReplay:
    """Runs a learner beside its explorers and its evaluator. A context manager.

    Each step draws a batch, calls `learn`, feeds the TD errors back and now and then publishes the weights. The
    buffer's limiter decides which side waits: `MinSize(n)` is the usual "learning starts", `SamplesPerInsert` holds the
    ratio of learning to exploring. A pool of several buffers gives `learn` a dict of batches by name.

    The learner is a function, for `run` and `steps`, or a LightningModule, which `fit` has a Trainer train.

    Args:
        pool: The explorers, with the buffer or buffers that they fill and the weights that they pull.
        learn: Function of a batch that makes one step and returns the TD errors, `[B]`, or None for no feedback. Of
            several buffers it gets a dict of batches and returns a dict of TD errors. Or a LightningModule, whose
            `training_step` gets the same, and returns `{"loss": loss, "td_error": td}` where priorities are wanted.
        module: The module whose weights are published, or several by the names of the pool's weights.
        batch_size: Items in a batch, of each buffer.
        publish_every: Steps from one publication to the next. A step is a batch that was learned from: with gradient
            accumulation a micro-batch, and weights that no optimiser has changed since are not published.
        evaluator: Runs along; at the end of `run` it evaluates the last weights.
        prefetch: Batches drawn ahead, as in `ReplayDataset`.
        timeout: Seconds that a draw may wait, as in `ReplayDataset`.
        device: Where batches go before `learn` gets them, as in `ReplayDataset`.
        pin: How they go there, as in `ReplayDataset`.

    Raises:
        ValueError: A number is out of range, the names of modules and weights differ, or a module does not fit its
            weights. Or the evaluator's weights are none of the pool's, so nobody would publish them.
        TypeError: `pool`, `learn`, `module` or `evaluator` is not what it has to be.

    Example:
        >>> pool = ExplorerPool(explore, 8, buffer, weights)
        >>> evaluator = Evaluator(evaluate, weights, QNetwork, every_seconds=30, directory="run")
        >>> print(AsyncReplay(pool, learn, q, evaluator=evaluator).run(10_000))
    """

    def __init__(
        self,
        pool: ExplorerPool,
        learn: Learn | LightningModule,
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
            raise TypeError(f"learn is {learn!r:.200}: expected a function of a batch, or a LightningModule")
        if evaluator is not None:
            checked_instance("evaluator", evaluator, Evaluator, "a torchreplay.ray.Evaluator")
        self.evaluator = evaluator
        self.publish_every = checked_int("publish_every", publish_every, 1, _MOST_STEPS)
        self.learn = learn
        self._modules, self._weights = named_modules(module), named_weights(pool.weights)
        if self._modules.keys() != self._weights.keys():
            raise ValueError(
                f"the modules are named {list(self._modules)} and the pool's weights {list(self._weights)}: expected a "
                "module for each of the weights (None stands for a single one)"
            )
        for name, weights in self._weights.items():
            weights.require_like(self._modules[name])
        if evaluator is not None and evaluator.weights not in self._weights.values():
            raise ValueError(
                "the evaluator's weights are none of the pool's, and only those are published: give both the same "
                "SharedWeights"
            )
        self._buffers = named_buffers(pool.buffer)
        self.dataset: ReplayDataset | MixedDataset = (
            MixedDataset(pool.buffer, batch_size, None, prefetch, device, timeout, pin)
            if isinstance(pool.buffer, Mapping)
            else ReplayDataset(pool.buffer, batch_size, None, prefetch, device, timeout, pin)
        )
        self.meter = Throughput(_PARTS)
        self._steps = self._publications = 0
        self._due = False  # a publication, which has waited for weights that are new
        self._running = ExitStack()
        self._inside = False

    def run(self, steps: int) -> AsyncReplayStats:
        """Makes so many learner steps, with all workers running, and returns the statistics.

        Inside `with` the workers run already, and go on afterwards.

        Args:
            steps: Learner steps.

        Raises:
            ExplorersFailed: No explorer is left.
            EvaluatorFailed: The evaluator is not restarted any more.
            ValueError: TD errors of the last steps, still on their way from a device, are NaN or infinite.
            Exception: What `learn` or a draw raises.
        """
        steps = self._checked_steps(steps)
        with nullcontext() if self._inside else self:
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
            TypeError: `learn` is a LightningModule.
            Exception: As for `run`.
        """
        steps = self._checked_steps(steps)
        if not self._inside:
            raise RuntimeError("the explorers do not run: iterate inside `with replay:`, or call replay.run(steps)")
        return self._make_steps(steps)

    def _checked_steps(self, steps: int) -> int:
        if self.is_for_trainer:
            raise TypeError("learn is a LightningModule: have a Trainer train it, replay.fit(trainer)")
        return checked_int("steps", steps, 0, _MOST_STEPS)

    def _make_steps(self, steps: int) -> Iterator[int]:
        batches = iter(self.dataset)
        try:
            for _ in range(steps):
                self.meter.note_ready(self.dataset.ready)
                with self.meter.timed("draw"):
                    batch = next(batches, None)
                if batch is None:  # the buffer was stopped
                    return
                with self.meter.timed("learn"):
                    td = self.learn(batch)
                with self.meter.timed("feedback"):
                    if td is not None:
                        self.dataset.update_priorities(batch, td)
                self.count_step()
                yield self._steps
        finally:
            batches.close()  # type: ignore[attr-defined]  # it is a generator

    def fit(self, trainer: Trainer, ckpt_path: Any = None) -> AsyncReplayStats:
        """Has a Lightning Trainer train the LightningModule, with all workers running, and returns the statistics.

        The Trainer gets batches. Its steps' TD errors are fed back and the weights published as in `run`. The evaluator
        runs in an `EvaluationMonitor`. The module's own `val_dataloader` and `validation_step` validate. Callbacks,
        loggers and bounds are the user's: set `max_steps`, or with several optimisers, each of whose steps that counts,
        `limit_train_batches` and `max_epochs`. A `ReplayCheckpoint` among them saves and restores the buffer; explorers
        begin when it is restored.

        Args:
            trainer: Of either Lightning package, for one process.
            ckpt_path: A checkpoint to resume from, as `trainer.fit` takes it.

        Raises:
            TypeError: `learn` is no LightningModule.
            ValueError: The Trainer has several processes, or a callback that does what this does.
            Exception: What `trainer.fit` raises.
        """
        if not self.is_for_trainer:
            raise TypeError(f"learn is {self.learn!r:.200}, no LightningModule: replay.run(steps) makes its steps")
        from torchreplay.ray.training.lightning_fit import fit  # which needs Lightning

        fit(self, trainer, ckpt_path)
        return self.stats()

    def state_dict(self) -> dict[str, Any]:
        """Returns what is counted here and the place in the stream of batches, without the experience.

        That is the buffers' own, `buffer.save`, and the weights are the module's; with `load_state_dict` after a
        restart the learner goes on with the next batch. A Trainer saves as much by itself.
        """
        return {"steps": self._steps, "publications": self._publications, "dataset": self.dataset.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken.

        Raises:
            ValueError: It is no such state.
            TypeError: `learn` is a LightningModule: a Trainer resumes from `ckpt_path`.
        """
        if self.is_for_trainer:
            raise TypeError("learn is a LightningModule: its Trainer resumes, replay.fit(trainer, ckpt_path)")
        given: Any = state_dict
        if not isinstance(given, Mapping) or set(given) != {"steps", "publications", "dataset"}:
            raise ValueError(f"state_dict is {state_dict!r:.200}; an AsyncReplay's has steps, publications and dataset")
        steps, publications = (checked_int(n, state_dict[n], 0, _MOST_STEPS) for n in ("steps", "publications"))
        self.dataset.load_state_dict(state_dict["dataset"])
        self._steps, self._publications = steps, publications
        if self._inside:
            self.begin()

    @property
    def is_for_trainer(self) -> bool:
        """Whether the learner is a LightningModule, for `fit`, and no function."""
        return hasattr(self.learn, "training_step")

    def begin(self) -> None:
        """Begins to measure the rates anew."""
        self.meter.start(self._rows(), self._items)

    def end(self) -> None:
        """Ends measuring: from here on the rates are those until now."""
        with suppress(RuntimeError):  # a buffer that was closed: they are those until the last look
            self.meter.look(self._rows(), self._items)

    def count_step(self, is_new: bool = True) -> bool:
        """Counts a learner step; publishes the weights, and sees whether the workers are well, when it is time to.

        It returns whether the weights were published. Where they have not changed since the last time, and are not
        `is_new`, that is put off. Raises as `run` does.
        """
        self._steps += 1
        self._due |= self._steps % self.publish_every == 0
        publishes = self._due and is_new
        if publishes:
            self.publish()
        if self.meter.is_due:
            self.meter.look(self._rows(), self._items)
            self.pool.check()
            if self.evaluator is not None:
                self.evaluator.check()
        return publishes

    def resume(self) -> None:
        """Publishes the weights of a checkpoint that a Trainer resumes from.

        They are of the version after that of their buffer, which a `ReplayCheckpoint` has restored by now.
        """
        for name, weights in self._weights.items():
            buffer = self._versioned(name)
            if buffer is not None:
                go_on_from(weights, buffer.policy_version)
        self.publish()

    def publish(self) -> None:
        """Publishes the weights of every module."""
        self._due = False
        if not self._weights:
            return
        with self.meter.timed("publish"):
            for name, weights in self._weights.items():
                weights.publish(self._modules[name], buffer=self._versioned(name))
        self._publications += 1

    def _versioned(self, name: str | None) -> ReplayBuffer | None:
        """Returns the buffer whose rows come from the weights of that name, and say from which version of them."""
        buffers = self._buffers
        buffer = next(iter(buffers.values())) if len(buffers) == len(self._weights) == 1 else buffers.get(name)
        return buffer if isinstance(buffer, ReplayBuffer) and VERSION in buffer.spec else None

    def stats(self) -> AsyncReplayStats:
        """What was done until now, and how fast."""
        buffers = {name: buffer.stats() for name, buffer in self._buffers.items()}
        explorers = self.pool.stats()
        now = (self._rows(buffers), self._items) if self._inside else None
        rows_per_second, items_per_second = self.meter.throughput(now)
        return AsyncReplayStats(
            steps=self._steps,
            items=self._items,
            rows_per_second=rows_per_second,
            items_per_second=items_per_second,
            publications=self._publications,
            weight_syncs=sum(explorer.weight_syncs for explorer in explorers),
            dropped_updates=sum(_dropped(stats) for stats in buffers.values()),
            ready=self.meter.ready,
            timings=self.meter.timings,
            buffers={"buffer" if name is None else name: stats for name, stats in buffers.items()},
            explorers=explorers,
            evaluation=None if self.evaluator is None else self.evaluator.latest,
        )

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            starting.enter_context(self.pool)
            if self.evaluator is not None:
                starting.enter_context(self.evaluator)
            self.begin()
            self._running = starting.pop_all()
        self._inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._inside and error is None:
                self.end()
        finally:
            self._inside = False
            self._running.__exit__(kind, error, traceback)

    @property
    def _items(self) -> int:
        return self._steps * self.dataset.batch_size * len(self._buffers)

    def _rows(self, buffers: Mapping[str | None, Stats] | None = None) -> dict[tuple[str | None, int], int]:
        """Returns the rows written, by buffer and shard; `buffers` are their statistics, where they are known."""
        rows: dict[tuple[str | None, int], int] = {}
        for name, buffer in self._buffers.items():
            stats = buffer.stats() if buffers is None else buffers[name]
            shards = [(shard.number, shard.stats) for shard in stats.shards] if isinstance(stats, ShardedStats) else ()
            rows |= {(name, number): one.rows_written for number, one in shards or [(0, stats)]}
        return rows

    def __repr__(self) -> str:
        return f"AsyncReplay({self._steps:,} steps, {self.pool!r})"


def _dropped(stats: Stats) -> int:
    lost = stats.lost_updates if isinstance(stats, ShardedStats) else 0
    return stats.stale_updates + stats.unready_updates + lost
