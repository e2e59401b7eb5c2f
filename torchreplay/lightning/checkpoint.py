"""`ReplayCheckpoint`: the buffer saved beside each of the Trainer's checkpoints, and brought back with it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import checked_instance
from ..checkpoint_directory import is_checkpoint
from ..replay import Replay
from .datamodule import resolve_buffer
from .libraries import Callback

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

SUFFIX = ".replay"


class ReplayCheckpoint(Callback):
    """Saves the replay buffer beside every checkpoint, as `<checkpoint>.replay`, and restores it on `ckpt_path`.

    The checkpoint itself stays small. Whoever removes a checkpoint, such as a `ModelCheckpoint` that keeps the best,
    removes the buffer beside it. On several ranks only the first saves. A sharded checkpoint (FSDP's `"sharded"`
    states) does not go through the Trainer's `checkpoint_io` and has no buffer beside it: call `buffer.save` yourself.

    A `fit(..., ckpt_path=...)` fills the buffer before its explorers start; it must not hold rows of its own. A
    checkpoint without a buffer beside it leaves the buffer empty.

    Args:
        buffer: What to save, a `ReplayBuffer` or a `torchreplay.ray.ShardedReplay`, whose nodes must all see the
            checkpoints; None for the buffer of the Trainer's `ReplayDataModule`.
    """

    restores_buffer = True  # explorers start after it has

    def __init__(self, buffer: Replay | None = None) -> None:
        if buffer is not None:
            checked_instance("buffer", buffer, Replay, "a ReplayBuffer, or None for the data module's")
        self.buffer = buffer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Has the Trainer's checkpoints go through this callback."""
        if stage != "fit":
            return
        self.saved_buffer(trainer)  # or the first save would be the first to say that there is none
        strategy: Any = trainer.strategy
        if not isinstance(strategy.checkpoint_io, _Beside):
            strategy.checkpoint_io = _Beside(strategy.checkpoint_io, self, trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Fills the buffer from beside the checkpoint that `fit` resumes from.

        Raises:
            CheckpointError: It is damaged, of another spec or view, or the buffer holds rows already.
        """
        path = trainer.ckpt_path
        if trainer.state.fn != "fit":  # both packages' enums are strings; validation and tests draw nothing
            return
        if trainer.is_global_zero and path is not None and is_checkpoint(beside(path)):
            self.saved_buffer(trainer).restore(beside(path))

    def saved_buffer(self, trainer: Trainer) -> Replay:
        """Returns the buffer to save.

        Raises:
            ValueError: There is none.
        """
        return resolve_buffer(self, self.buffer, trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the Trainer's checkpoints as they were."""
        strategy: Any = trainer.strategy
        if stage == "fit" and isinstance(strategy.checkpoint_io, _Beside):
            strategy.checkpoint_io = strategy.checkpoint_io.inner


class _Beside:
    """The Trainer's way of writing checkpoints, with a directory beside each."""

    def __init__(self, inner: Any, callback: ReplayCheckpoint, trainer: Trainer) -> None:
        self.inner = inner
        self._callback = callback
        self._trainer = trainer

    def save_checkpoint(self, checkpoint: Any, path: Any, *args: Any, **options: Any) -> None:
        # The buffer first: a checkpoint that is there has its buffer.
        self._callback.saved_buffer(self._trainer).save(beside(path))
        self.inner.save_checkpoint(checkpoint, path, *args, **options)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)
        shutil.rmtree(beside(path), ignore_errors=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def beside(path: str | os.PathLike[str]) -> Path:
    """Returns where the buffer of the checkpoint `path` is saved."""
    return Path(f"{os.fspath(path)}{SUFFIX}")
