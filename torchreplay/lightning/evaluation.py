"""`EvaluationMonitor`: what an `Evaluator` finds, in the Trainer's loggers and its progress bar."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from torchreplay.lightning.compat import Callback
from torchreplay.lightning.monitor import logged_step
from torchreplay.ray.evaluation.evaluator import Evaluator
from torchreplay.validation import checked_instance

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_PREFIX: Final = "evaluation"
_LOOK_EVERY: Final = 0.1
"""Seconds between looks for results."""


class EvaluationMonitor(Callback):
    """Runs an `Evaluator` for as long as `fit`, and logs its results.

    The figures of each result appear as `evaluation/mean_return`, `evaluation/std_return`, ... at the step at which the
    result came, as Lightning counts steps for its own metrics; `evaluation/version` names the evaluated weights. The
    mean is also in the progress bar and in `trainer.callback_metrics`, for
    `ModelCheckpoint(monitor="evaluation/mean_return")` and the like. The first epoch may end before the first result:
    give `EarlyStopping` its `strict=False`.

    On several ranks the first one's evaluator runs. All ranks get its newest mean at the same steps: when the Trainer
    logs, and at the end of an epoch.

    Args:
        evaluator: A `torchreplay.ray.Evaluator`, which evaluates what a `WeightPublisher` publishes.
        last: Whether `fit` ends with an evaluation of the weights published last, and waits for it.

    Raises:
        TypeError: If `evaluator` is none.
    """

    def __init__(self, evaluator: Evaluator, last: bool = True) -> None:
        super().__init__()
        self.evaluator = checked_instance("evaluator", evaluator, Evaluator, "a torchreplay.ray.Evaluator")
        self.last = last
        self._reported = 0
        self._looked_at = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Starts the evaluator."""
        if stage == "fit" and trainer.is_global_zero:
            self._reported = len(self.evaluator.evaluations)
            self.evaluator.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs what has come.

        Raises:
            EvaluatorFailed: The evaluator's restarts are used up.
        """
        if not self._is_time(trainer):
            return
        self._looked_at = time.monotonic()
        mean = None
        if trainer.is_global_zero and self._log(trainer):
            mean = self.evaluator.evaluations[-1].mean_return
        mean = trainer.strategy.broadcast(mean)  # who monitors it enters collectives only where it is known
        if mean is not None and not trainer.barebones:
            pl_module.log(f"{_PREFIX}/mean_return", mean, prog_bar=True, logger=False)
        if trainer.is_global_zero:
            self.evaluator.check()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Evaluates the last weights, after every callback that may have published them, and stops the evaluator."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        try:
            if self.last:
                self.evaluator.wait()
        finally:
            self.evaluator.stop()
            self._log(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops the evaluator."""
        if trainer.is_global_zero:
            self.evaluator.stop()

    def _is_time(self, trainer: Trainer) -> bool:
        """Returns whether to look for results. Ranks meet by step: their clocks differ."""
        if trainer.world_size > 1:
            return trainer._logger_connector.should_update_logs or trainer.is_last_batch
        return time.monotonic() - self._looked_at >= _LOOK_EVERY

    def _log(self, trainer: Trainer) -> bool:
        """Logs new results; returns whether there were any."""
        new = self.evaluator.evaluations[self._reported :]
        self._reported += len(new)
        for evaluation in new:
            for logger in trainer.loggers:
                named = {f"{_PREFIX}{logger.group_separator}{n}": float(v) for n, v in evaluation.as_dict().items()}
                logger.log_metrics(named, step=logged_step(trainer))
        return bool(new)
