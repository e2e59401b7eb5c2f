"""`AsyncReplay.fit`: a Lightning Trainer makes the learner's steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torchreplay.errors import ReplayTimeout, WouldBlockForever
from torchreplay.explorers import ExplorerPool
from torchreplay.lightning.datamodule import ReplayDataModule
from torchreplay.lightning.evaluation import EvaluationMonitor
from torchreplay.lightning.feedback import PriorityFeedback
from torchreplay.lightning.publisher import WeightPublisher
from torchreplay.loading.dataset import ReplayDataset
from torchreplay.loading.mixed_dataset import MixedDataset
from torchreplay.ray.evaluation.evaluator import Evaluator
from torchreplay.ray.training.throughput import Throughput
from torchreplay.schema.samplers import Prioritized

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class Fittable(Protocol):
    """What a Trainer needs of an `AsyncReplay`. Attributes and methods mean what they mean there."""

    learn: Any
    pool: ExplorerPool
    evaluator: Evaluator | None
    dataset: ReplayDataset | MixedDataset
    meter: Throughput

    def begin(self) -> None:
        """Begins to measure."""

    def end(self) -> None:
        """Ends measuring."""

    def resume(self) -> None:
        """Publishes the weights of a checkpoint."""

    def publish(self) -> None:
        """Publishes the weights."""

    def count_step(self, is_new: bool) -> bool:
        """Counts a learner step; returns whether the weights were published."""


def fit(replay: Fittable, trainer: Trainer, ckpt_path: Any) -> None:
    """Does what `AsyncReplay.fit` does."""
    module: Any = replay.learn
    if trainer.world_size > 1:
        raise ValueError(
            f"the Trainer has {trainer.world_size} processes, and each would start its own explorers: give the buffer, "
            f"and the pool as explorers=, to a ReplayDataModule instead"
        )
    given = trainer.callbacks  # type: ignore[attr-defined]  # it is set when the Trainer is made
    for callback in [*given, *_configured(module)]:
        if isinstance(callback, (PriorityFeedback, WeightPublisher, EvaluationMonitor)):
            raise ValueError(f"AsyncReplay does what {type(callback).__name__} does: leave it out of the callbacks")
    ours = [_Learner(replay)] if replay.evaluator is None else [_Learner(replay), EvaluationMonitor(replay.evaluator)]
    trainer.callbacks = [*ours, *given]  # type: ignore[attr-defined]
    try:
        if isinstance(replay.dataset, MixedDataset):
            trainer.fit(module, replay.dataset, ckpt_path=ckpt_path)
        else:
            data: Any = _data_of(replay.dataset, replay.pool)
            data.val_dataloader = module.val_dataloader  # a Trainer with a data module asks no other for it
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    except (WouldBlockForever, ReplayTimeout) as error:
        replay.pool.explain(error)
        raise
    finally:
        trainer.callbacks = given  # type: ignore[attr-defined]
        replay.pool.stop()


def _configured(module: Any) -> list[Any]:
    """Returns the callbacks that the module itself brings."""
    brought = module.configure_callbacks()
    return list(brought) if isinstance(brought, Sequence) else [brought]


def _data_of(batches: ReplayDataset, pool: ExplorerPool) -> ReplayDataModule:
    return ReplayDataModule(
        batches.buffer,
        batches.batch_size,
        prefetch=batches.prefetch,
        explorers=pool,
        timeout=batches.timeout,
        device=batches.device,
        pin=batches.pin,
    )


class _Learner(PriorityFeedback):
    """Does after each batch of a Trainer what an `AsyncReplay` does after its own steps."""

    def __init__(self, replay: Fittable) -> None:
        dataset = replay.dataset
        super().__init__(dataset if isinstance(dataset, MixedDataset) else dataset.buffer)
        buffers = dataset.buffers if isinstance(dataset, MixedDataset) else [dataset.buffer]
        self._wants_errors = any(isinstance(buffer.sampler, Prioritized) for buffer in buffers)
        self._replay, self._meter = replay, replay.meter
        self._since = 0.0
        self._published_at = 0  # in the Trainer's own steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publishes the weights of a checkpoint that the run resumes from, and begins to measure.

        Of several buffers every `ReplayCheckpoint` has restored its own by now, and their explorers begin.
        """
        if isinstance(self._replay.dataset, MixedDataset):
            self._replay.pool.start()
        if trainer.global_step > 0:
            self._replay.resume()
        self._published_at = trainer.global_step
        self._replay.begin()
        self._since = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notes how long the batch was waited for."""
        self._note("draw")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Feeds the batch's TD errors back, and counts the step; raises as `PriorityFeedback` and `AsyncReplay.run` do.

        Where no buffer has priorities, TD errors may be missing.
        """
        self._note("learn")
        if outputs and (self._wants_errors or self.key in outputs):
            with self._meter.timed("feedback"):
                super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._replay.count_step(trainer.global_step > self._published_at):
            self._published_at = trainer.global_step
        stream: Any = trainer.train_dataloader
        self._meter.note_ready(stream.ready)
        self._since = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publishes the final weights, after every callback that may still change them, and ends measuring."""
        self._replay.publish()
        self._replay.end()

    def _note(self, part: str) -> None:
        now = time.perf_counter()
        self._meter.add(part, now - self._since)
        self._since = now
