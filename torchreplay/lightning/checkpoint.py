"""`ReplayCheckpoint`: the buffer saved beside each of the Trainer's checkpoints, and brought back with it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchreplay.buffer.base import Replay, source_of
from torchreplay.checkpoint.directory import is_checkpoint
from torchreplay.errors import CheckpointError
from torchreplay.lightning.checkpoint_io import HELD, SUFFIX, BufferCheckpointIO, beside, is_local, local_name
from torchreplay.lightning.compat import Callback
from torchreplay.lightning.datamodule import resolve_buffer
from torchreplay.lightning.fetching import take_in_turn
from torchreplay.lightning.lineage import Origin, Reached
from torchreplay.schema.samplers import Fifo
from torchreplay.segment.waits import logger
from torchreplay.validation import checked_instance

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

ORIGIN = "torchreplay.origin"
"""Under which name the Trainer's checkpoint says what buffer lies beside it."""


class ReplayCheckpoint(Callback):
    """Saves the replay buffer beside every checkpoint, as `<checkpoint>.replay`, and restores it on `ckpt_path`.

    The checkpoint itself stays small. When a checkpoint is removed, by a `ModelCheckpoint` that keeps the best for
    example, the buffer beside it goes too. On several ranks only the first saves. A sharded checkpoint (FSDP's
    `"sharded"` states) does not go through the Trainer's `checkpoint_io` and has no buffer beside it: call
    `buffer.save` yourself. Saving to another machine (`s3://` and its like) is a `ValueError`.

    The buffer is saved where the checkpoint is written: under Lightning's `AsyncCheckpointIO` in a thread, while
    training goes on. Its errors come with the next save, or at the end of `fit`, which waits for it. Where a
    `ModelCheckpoint` saves `last` right after another checkpoint, both buffers have the same files, by hard links where
    the filesystem has them.

    A `fit(..., ckpt_path=...)` fills an empty buffer before its explorers start. The buffer that the checkpoint was
    saved of keeps the rows and priorities that it has, as in a second `fit` of one process. It may have got more since:
    a warning says how much. To go back to the rows of then, give a new buffer. Rows of another run are never
    overwritten.

    A queue and its model agree after every death: a resumed run gets the items that the saved model had not seen, each
    once and in order. The checkpoint names the items that were held when it was made. A resume ends these, if they are
    not done. With `Fifo(commit="manual")` they are done, on all ranks, when the next step begins and the checkpoint is
    on the disk. Until then the capacity must hold them, so save often enough. Resume from the newest checkpoint: what
    it has learnt from is done for those before. With `commit="next"` all this holds only for a queue in memory, and not
    under `AsyncCheckpointIO`.

    Of a link to a checkpoint, such as `ModelCheckpoint(save_last="link")` makes, the buffer is beside what it leads to.
    A checkpoint without a buffer beside it leaves the buffer as it is, which is logged. So is a
    `trainer.save_checkpoint` after the fit that finds the buffer closed, as one that the data module made is then, and
    saves none.

    Args:
        buffer: What to save, a `ReplayBuffer` or a `torchreplay.ray.ShardedReplay`, whose nodes must all see the
            checkpoints; None for the buffer of the Trainer's `ReplayDataModule`.
    """

    restores_buffer = True  # explorers start after it has

    def __init__(self, buffer: Replay | None = None) -> None:
        if buffer is not None:
            checked_instance("buffer", buffer, Replay, "a ReplayBuffer, or None for the data module's")
        self.buffer = buffer
        self._held_by_ranks = False  # the checkpoints name what each rank holds of a queue

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Has the Trainer's checkpoints go through this callback.

        Raises:
            ValueError: There is no buffer to save.
        """
        if stage != "fit":
            return
        # Asked for now: a missing buffer is an error here, and not at the first save.
        buffer = resolve_buffer(self, self.buffer, trainer)
        self._held_by_ranks = isinstance(buffer.sampler, Fifo) and trainer.world_size > 1
        take_in_turn(trainer)
        strategy: Any = trainer.strategy
        saves = strategy.checkpoint_io
        if not isinstance(saves, BufferCheckpointIO):
            strategy.checkpoint_io = BufferCheckpointIO(saves, buffer, _last_of(trainer))
        elif saves.ended:
            saves.begin(buffer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Notes which buffer the checkpoint is of, and of a queue what is held."""
        held = None
        with suppress(RuntimeError, ValueError):  # it is closed, or there is none: none will be saved
            buffer = resolve_buffer(self, self.buffer, trainer)
            checkpoint[ORIGIN] = Origin.of(buffer).as_data()
            held = source_of(buffer).held()
        by_ranks = _from_all_ranks(held) if self._held_by_ranks else [held]
        checkpoint[HELD] = [held for held in by_ranks if held is not None]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Fills the buffer from beside the checkpoint that `fit` resumes from, unless it has those rows.

        Raises:
            CheckpointError: It is damaged, of another spec or view, or the buffer holds rows of another run, or was
                cleared.
        """
        path = trainer.ckpt_path
        fits = trainer.state.fn == "fit"  # both packages' enums are strings; validation and tests draw nothing
        if not fits or path is None:
            return
        if not trainer.is_global_zero:  # the first one ends what all ranks held
            source_of(resolve_buffer(self, self.buffer, trainer)).go_on_from([])
            return
        place = next(filter(is_checkpoint, _places(path)), None)
        if place is None:
            logger.warning("there is no %s%s: the buffer stays as it is", path, SUFFIX)
        else:
            origin = Origin.from_data(checkpoint[ORIGIN]) if ORIGIN in checkpoint else None
            _fill(resolve_buffer(self, self.buffer, trainer), place, origin)
        if checkpoint.get(HELD):
            source_of(resolve_buffer(self, self.buffer, trainer)).go_on_from(checkpoint[HELD])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ends what a queue's last checkpoints have learnt from."""
        strategy: Any = trainer.strategy
        if isinstance(strategy.checkpoint_io, BufferCheckpointIO):
            strategy.checkpoint_io.commit()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """From here on the Trainer's checkpoints have a buffer beside them as long as it is open."""
        if stage == "fit":
            self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Does what `teardown` does, which Lightning skips after an exception."""
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        self._held_by_ranks = False  # the others' buffers may be closed
        strategy: Any = trainer.strategy
        if isinstance(strategy.checkpoint_io, BufferCheckpointIO):
            strategy.checkpoint_io.ended = True
            strategy.checkpoint_io.commit()


def _fill(buffer: Replay, place: Path, origin: Origin | None) -> None:
    """Brings a buffer to where a checkpoint was saved, or leaves it where it has gone on to from there."""
    since = None if origin is None else origin.since(buffer)
    if since is not None and buffer.stats().rows_written:
        _keep(buffer, place, since)
        return
    try:
        buffer.restore(place)
    except CheckpointError as error:
        if len(buffer):
            error.add_note(
                f"fit(ckpt_path=...) brings the rows of {place}: write rows of your own only where a run begins"
            )
        raise
    if origin is not None:
        origin.note_restored(buffer)


def _keep(buffer: Replay, place: Path, since: Reached) -> None:
    held = len(buffer)
    if not held:
        raise CheckpointError(
            f"the buffer was cleared since {place} was saved of it, and takes no rows under their old keys again: fit "
            f"with a new one"
        )
    if any(since):
        logger.warning(
            "the buffer keeps its %s rows, and does not go back to those of %s, which was saved of it: since then %s "
            "rows were written and %s TD errors applied; a new buffer would get the rows of then",
            f"{held:,}",
            place,
            f"{since.rows:,}",
            f"{since.updates:,}",
        )


def _from_all_ranks(held: dict[str, Any] | None) -> list[dict[str, Any] | None]:
    values: list[dict[str, Any] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, held)
    return values


def _last_of(trainer: Trainer) -> Callable[[str, str], bool]:
    """Returns what says whether a `ModelCheckpoint` of the Trainer saves its `last`, just after its best."""
    owner = weakref.ref(trainer)

    def is_last(path: str, before: str) -> bool:
        alive: Any = owner()
        return alive is not None and any(
            getattr(callback, "last_model_path", None) == path
            and before in (callback.best_model_path, *callback.best_k_models)
            for callback in alive.checkpoint_callbacks
        )

    return is_last


def _places(path: str | os.PathLike[str]) -> list[Path]:
    """Returns where the buffer of the checkpoint `path` may lie: first where the file is that a link leads to."""
    if not is_local(path):
        return []
    return [beside(os.path.realpath(local_name(path))), beside(path)]
