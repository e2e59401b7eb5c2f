"""`ReplayMonitor`: the health of the replay, in the Trainer's loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchreplay.buffer.base import Replay
from torchreplay.lightning.compat import Callback
from torchreplay.lightning.datamodule import resolve_buffer
from torchreplay.monitoring.metrics import HISTOGRAMS, PREFIX, Scalars, named, tensorboard_histogram
from torchreplay.validation import checked_instance, checked_int

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.loggers import Logger


class ReplayMonitor(Callback):
    """Logs every scalar of `buffer.stats()` as often as the Trainer logs, and histograms more rarely.

    The scalars appear as `replay/size`, `replay/samples_per_insert`, ... and the counters of rows inserted, items
    sampled and priorities updated also as rates, `replay/inserted_per_second`, ... A value that is not finite, such as
    the age of the last write before the first one, is left out. The step is that of Lightning's own metrics: batches
    after which optimisers stepped, however many they are.

    Args:
        buffer: The buffer to watch; None for the one of the Trainer's `ReplayDataModule`.
        histogram_every: Such steps between two sets of histograms (priority, age of rows), for loggers that take
            any. Each costs a pass over the buffer.

    Raises:
        ValueError: If `histogram_every` is not a positive integer.
        TypeError: If `buffer` is no buffer.
    """

    def __init__(self, buffer: Replay | None = None, histogram_every: int = 1000) -> None:
        super().__init__()
        if buffer is not None:
            checked_instance("buffer", buffer, Replay, "a ReplayBuffer, or None for the data module's")
        self.buffer = buffer
        self.histogram_every = checked_int("histogram_every", histogram_every, 1)
        self._logged_at = -1
        self._histograms_at = 0
        self._scalars = Scalars()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that there is a buffer to watch.

        Raises:
            ValueError: If neither this callback nor the Trainer has one.
        """
        if stage == "fit":
            resolve_buffer(self, self.buffer, trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the state at the start, from which the first rates are counted."""
        self._scalars.forget()
        self._log(trainer)
        self._histograms_at = logged_step(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs when the Trainer does."""
        step = logged_step(trainer)
        if step == self._logged_at or not trainer._logger_connector.should_update_logs:
            return
        self._log(trainer)
        if step + 1 - self._histograms_at >= self.histogram_every:  # this step is made
            self._log_histograms(trainer)

    def _log(self, trainer: Trainer) -> None:
        self._logged_at = logged_step(trainer)
        if not trainer.loggers or not trainer.is_global_zero:
            return
        _, values = self._scalars.take(resolve_buffer(self, self.buffer, trainer))
        for logger in trainer.loggers:
            logger.log_metrics(named(values, logger.group_separator), step=self._logged_at)

    def _log_histograms(self, trainer: Trainer) -> None:
        self._histograms_at = self._logged_at + 1
        loggers = [logger for logger in trainer.loggers if hasattr(_board(logger), "add_histogram_raw")]
        if not loggers or not trainer.is_global_zero:
            return
        tensors = resolve_buffer(self, self.buffer, trainer).histograms()
        for name in HISTOGRAMS:
            summary = tensorboard_histogram(tensors[name], tensors[f"{name}_edges"])
            for logger in loggers:
                tag = f"{PREFIX}{logger.group_separator}{name}"
                _board(logger).add_histogram_raw(tag, **summary, global_step=self._logged_at)


def logged_step(trainer: Trainer) -> int:
    """Returns the step of what the Trainer logs now: `global_step` counts each of several optimisers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _board(logger: Logger) -> Any:
    return getattr(logger, "experiment", None)
