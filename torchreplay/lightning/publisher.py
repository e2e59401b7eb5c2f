"""`WeightPublisher`: the learner's weights, out to the explorers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.lightning.compat import Callback
from torchreplay.validation import checked_instance, checked_int
from torchreplay.weights.shared_weights import SharedWeights, go_on_from

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class WeightPublisher(Callback):
    """Publishes weights every few batches, and once more at the end of `fit`.

    Local rank 0 publishes, for all explorers of its machine. A run that resumes from a checkpoint publishes at its
    start as well, since its weights are then not those that explorers began with.

    Args:
        weights: Where to publish.
        every: Batches from one publication to the next. A batch counts if an optimiser stepped in it: accumulated
            micro-batches do not, and several optimisers that step in one batch are one.
        module: Name of the attribute of the LightningModule to publish, dotted for a part of a part; None for the
            LightningModule itself.
        buffer: Whose `policy_version` becomes that of what is published; None: none's.

    Raises:
        ValueError: If `every` is not a positive integer.
        TypeError: If `weights` are no `SharedWeights`, `module` is no name, or `buffer` no `ReplayBuffer`.
    """

    def __init__(
        self,
        weights: SharedWeights,
        every: int = 1,
        module: str | None = None,
        *,
        buffer: ReplayBuffer | None = None,
    ) -> None:
        super().__init__()
        self.weights = checked_instance("weights", weights, SharedWeights, "torchreplay.SharedWeights(module)")
        self.every = checked_int("every", every, 1)
        if module is not None:
            checked_instance("module", module, str, "the name of an attribute of the LightningModule, or None")
        self.module = module
        if buffer is not None:
            checked_instance("buffer", buffer, ReplayBuffer, "a torchreplay.ReplayBuffer, or None")
        self.buffer = buffer
        self._step = 0  # the Trainer's own, which counts each optimiser
        self._batches = 0  # since the last publication

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the part to publish exists.

        Raises:
            ValueError: If the LightningModule has no such part.
        """
        if stage == "fit":
            self._part(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publishes the weights of a checkpoint that the run resumes from.

        They are of the version after that of the buffer, which a `ReplayCheckpoint` has restored by now.
        """
        self._step, self._batches = trainer.global_step, 0
        if trainer.global_step > 0:
            if self.buffer is not None and trainer.local_rank == 0:
                go_on_from(self.weights, self.buffer.policy_version)
            self._publish(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Publishes when `every` batches have changed the weights since the last time."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._batches += 1
        if self._batches == self.every:
            self._batches = 0
            self._publish(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publishes the final weights, after every callback that may still change them."""
        self._publish(trainer, pl_module)

    def __repr__(self) -> str:
        return f"WeightPublisher(every={self.every}, module={self.module!r})"

    def _publish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.local_rank == 0:
            self.weights.publish(self._part(pl_module), buffer=self.buffer)

    def _part(self, pl_module: LightningModule) -> nn.Module:
        if self.module is None:
            return pl_module
        try:
            return pl_module.get_submodule(self.module)
        except AttributeError as error:
            parts = [name for name, _ in pl_module.named_children()]
            raise ValueError(
                f"WeightPublisher is to publish {self.module!r}, which {type(pl_module).__name__} does not have as a "
                f"module; its modules are {parts}"
            ) from error
