"""`PriorityFeedback`: the TD errors of a training step, back to the transitions they belong to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from torchreplay.buffer.base import Replay
from torchreplay.lightning.compat import Callback
from torchreplay.lightning.datamodule import resolve_buffer
from torchreplay.lightning.fetching import take_in_turn
from torchreplay.lightning.stopping import end_fit, refuse_epoch
from torchreplay.loading.mixed_dataset import MixedDataset
from torchreplay.schema.batch import ReplayBatch
from torchreplay.validation import checked_instance

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


IN_VAIN: Final = 100
"""Steps without a result, from the first, after which that looks like a mistake."""


class PriorityFeedback(Callback):
    """Updates priorities from what `training_step` returns, once per batch.

    The training step returns `{"loss": loss, "td_error": td}` with `td` of shape `[B]`, of any float dtype, on any
    device, with or without gradient. With manual optimisation the loss may be left out. Under gradient accumulation
    each micro-batch gives its own feedback. A step that returns None was skipped and changes nothing; where the first
    hundred do, a warning says so. Each TD error goes to the keys in its own batch, so it does not matter how far ahead
    batches are drawn.

    Batches of a `MixedDataset`, which the Trainer takes like any loader, are its to give feedback to::

        trainer = Trainer(max_steps=10_000, callbacks=[PriorityFeedback(dataset)])
        trainer.fit(module, dataset)

    Of a dict of several loaders' batches, this callback is for one `part`, and so it is of a dict of TD errors::

        callbacks = [PriorityFeedback(red, part="red"), PriorityFeedback(blue, part="blue")]
        trainer.fit(module, {"red": tr.ReplayDataset(red), "blue": tr.ReplayDataset(blue), "images": loader})
        # training_step returns {"loss": loss, "td_error": {"red": red_td, "blue": blue_td}}

    When the buffer is stopped, so that no batch will come, `fit` ends, as under a `ReplayDataModule`.

    Args:
        buffer: The buffer to update, or the `MixedDataset` of several, for which `td` is what its `update_priorities`
            takes; None for the buffer of the Trainer's `ReplayDataModule`.
        key: Under which name the training step returns the TD errors.
        part: Which of several loaders' batches has the items; None where there is one loader.
    """

    def __init__(
        self, buffer: Replay | MixedDataset | None = None, key: str = "td_error", part: str | None = None
    ) -> None:
        super().__init__()
        if buffer is not None:
            checked_instance("buffer", buffer, (Replay, MixedDataset), "a ReplayBuffer or a MixedDataset")
        self.buffer = buffer
        self._receiver: Replay | MixedDataset | None = None  # while there is something to receive
        self._takes_whole = False  # whatever the batch is, the receiver knows its parts
        self._in_vain = 0  # steps that returned nothing, before any that did in this fit; -1: one did
        self.key = checked_instance("key", key, str, "the name under which training_step returns the TD errors")
        if part is not None:
            checked_instance("part", part, str, "the name of one of several loaders, or None")
        self.part = part

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that there is a buffer to give feedback to.

        Raises:
            ValueError: If neither this callback nor the Trainer has one.
        """
        if stage == "fit":
            self._receiver = resolve_buffer(self, None, trainer) if self.buffer is None else self.buffer
            self._takes_whole = self.part is None and isinstance(self._receiver, MixedDataset)
            self._in_vain = 0
            take_in_turn(trainer, self._receiver)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins no second epoch without batches.

        Raises:
            Stopped: The buffer was stopped, and the Trainer goes on, or has several ranks.
        """
        if self._is_stopped:
            refuse_epoch(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Applies the batch's TD errors.

        Raises:
            KeyError: If the training step returned something else under other names.
            ValueError: If `update_priorities` refuses the TD errors: another length than the batch, NaN or infinite.
                For TD errors on a CUDA device a later step raises it, or the end of the training. Or if the batch is
                one of several loaders and `part` does not say which of them.
        """
        if not outputs:
            self._in_vain += self._in_vain >= 0
            if self._in_vain == IN_VAIN:
                warnings.warn(
                    f"no training_step of the first {IN_VAIN} has returned anything: PriorityFeedback needs "
                    f"{self.key!r}, with manual optimisation too: return {{{self.key!r}: td}}",
                    stacklevel=2,
                )
            return
        if self.key not in outputs:
            raise KeyError(
                f"training_step returned {sorted(outputs)}; PriorityFeedback needs {self.key!r}: "
                f"return {{'loss': loss, {self.key!r}: td}}"
            )
        assert self._receiver is not None  # `setup` comes first
        td = outputs[self.key]
        if (batch.__class__ is not ReplayBatch or self.part is not None) and not self._takes_whole:
            batch, td = self._part_of(batch, td)
        if td is not None:
            self._receiver.update_priorities(batch, td)
        self._in_vain = -1

    def _part_of(self, batch: Any, td: Any) -> tuple[Any, Any]:
        """Returns this callback's batch of several loaders' and its TD errors, None where the step gave it none."""
        part = self.part
        several = "key" not in batch if isinstance(batch, Mapping) else isinstance(batch, list | tuple)
        if part is None and not several:
            return batch, td
        if not several:
            raise ValueError(f"part is {part!r}, and the batch is that of a single loader: leave part out")
        if not isinstance(batch, Mapping) or part not in batch:
            found = f"a dict of {list(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise ValueError(
                f"the batch is {found} and no ReplayBatch: give the Trainer its loaders as a dict, and say which of "
                f"them draws from the buffer, PriorityFeedback(..., part=...); part is {part!r}"
            )
        return batch[part], td.get(part) if isinstance(td, Mapping) else td

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has `fit` end if the buffer was stopped."""
        if self._is_stopped and trainer.world_size == 1:  # of several ranks others may be in the next step already
            end_fit(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits until all ranks' TD errors are applied: those on their way from a device, too.

        Raises:
            ValueError: Some are NaN or infinite.
        """
        try:
            if self._receiver is not None:
                self._receiver.flush()
        finally:
            trainer.strategy.barrier("PriorityFeedback")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lets go of the buffer."""
        if stage == "fit":
            self._receiver = None

    @property
    def _is_stopped(self) -> bool:
        receiver = self._receiver
        buffers = receiver.buffers if isinstance(receiver, MixedDataset) else (receiver,)
        return any(buffer.stopped for buffer in buffers if buffer is not None)

    def __repr__(self) -> str:
        return f"PriorityFeedback(key={self.key!r})"
