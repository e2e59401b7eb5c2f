"""`ReplayDataModule`: a replay buffer, and the explorers that fill it, as a Lightning data module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from torchreplay.buffer.base import MAX_BATCH, Pin, Replay, source_of
from torchreplay.distributed.explorers import Explorers
from torchreplay.distributed.learners import Learners, several_machines
from torchreplay.errors import LearnerLost
from torchreplay.lightning.checkpoint_io import finish_saves
from torchreplay.lightning.compat import LightningDataModule
from torchreplay.lightning.fetching import take_in_turn
from torchreplay.lightning.stopping import end_fit, refuse_epoch, stopped_among_ranks
from torchreplay.loading.dataset import ReplayDataset
from torchreplay.loading.destination import require_device, require_pin
from torchreplay.schema.batch import ReplayBatch
from torchreplay.validation import checked_int, checked_timeout

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class ReplayDataModule(LightningDataModule):
    """Feeds a Trainer from a replay buffer and runs the explorers for as long as `fit` does.

    The loader is a `ReplayDataset` itself. With a plain iterable Lightning asks neither for workers nor for a sampler,
    and saves the place in the stream with every checkpoint. Without `steps_per_epoch` the stream is endless: bound the
    run by `max_steps`, or set `limit_train_batches` to an integer to have epochs. `max_steps` counts the steps of each
    optimiser. To count batches where there are several, set `steps_per_epoch` and the Trainer's `max_epochs`. There is
    no `epochs`, as explorers bring items within one: for offline data give the Trainer a
    `ReplayDataset(buffer, epochs=1)`.

    Each batch is taken for the step that learns from it, where Lightning would take one ahead of an endless stream. So
    a run that resumes from a checkpoint, with the buffer as it was then, learns from the batches of one that was never
    interrupted (`docs/resuming.md`).

    With several processes on one machine (DDP, FSDP), rank 0 makes the buffer and starts the explorers. The other ranks
    attach to it. Each rank draws its own batches from the one buffer. When a rank dies or fails, `fit` ends on all of
    them with `LearnerLost`, or with the collective's own error and a note that says the same (`Learners`).

    A buffer is no hyperparameter: a class that takes one calls `save_hyperparameters(ignore=["buffer"])`. Checkpoints
    leave it out in any case, with a warning, and `load_from_checkpoint(path, buffer=buffer)` gives another.

    To validate, define `val_dataloader` in a subclass: with a data module, Lightning does not ask the LightningModule
    for its own (`AsyncReplay.fit` does).

    `buffer.stop()` ends `fit` in order, as `trainer.should_stop` does; where the Trainer's `min_steps` or `min_epochs`
    ask for more, and on several ranks, with `Stopped`.

    Args:
        buffer: A `ReplayBuffer`, which stays open afterwards, or a function without arguments that makes one. The
            function is called at the start of `fit` on rank 0. Its buffer is stopped and closed when `fit` ends. With
            several ranks give the function: under `strategy="ddp"` the script runs once per rank, and so would make one
            buffer per rank; under `"ddp_spawn"` it must pickle.
        batch_size: Items in each rank's batch.
        steps_per_epoch: Batches per epoch; None for one endless epoch.
        prefetch: Batches drawn ahead of the one asked for, as in `ReplayDataset`.
        explorers: An object with `start()` and `stop()`, or a function of the buffer that makes one. Started in
            `setup`, or once a `ReplayCheckpoint` has restored the buffer. Stopped in `teardown` and on any exception,
            at the latest when the module is collected or the process exits.
        timeout: Seconds that one draw may wait for data, as in `ReplayDataset`.
        device: Where batches go before the Trainer gets them, as in `ReplayDataset`. `"cuda"`, each rank's own device,
            copies the next batch during the step; None: the Trainer moves each batch.
        pin: How they go there, as in `ReplayDataset`.
        budget: Of ragged fields: the most elements that each rank's batch may have, as in `ReplayDataset`. What it
            names is looked at when there is a buffer: at the latest in `setup`.

    Raises:
        TypeError: If `buffer` or `explorers` is neither of the two things it may be, or `budget` is no dict.
        ValueError: If a number is out of range, or `budget` names no ragged field of a batch.
    """

    def __init__(
        self,
        buffer: Replay | Callable[[], Replay],
        batch_size: int = 256,
        *,
        steps_per_epoch: int | None = None,
        prefetch: int = 2,
        explorers: Explorers | Callable[[Any], Explorers] | None = None,
        timeout: float | None = None,
        device: torch.device | str | int | None = None,
        pin: Pin | None = None,
        budget: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._learners = Learners(buffer, explorers)
        self.batch_size = checked_int("batch_size", batch_size, 1, MAX_BATCH)
        self.steps_per_epoch = None if steps_per_epoch is None else checked_int("steps_per_epoch", steps_per_epoch, 1)
        self.prefetch = checked_int("prefetch", prefetch, 0)
        self.timeout = checked_timeout(timeout)
        self.device = None if device is None else require_device(device)
        self.pin = require_pin(pin, self.device)
        self._given = buffer if isinstance(buffer, Replay) else None
        self.budget = budget if budget is None or self._given is None else source_of(self._given).checked_budget(budget)
        self._buffer = self._given
        self._stream: _Stream | None = None
        self._explorers_wait = False  # until a `ReplayCheckpoint` has restored the buffer
        self._place: dict[str, Any] = {"draws": 0}  # in the stream: of the last `fit`, or of a checkpoint
        self._resumes = False  # from that place, when the Trainer asks for the stream

    @property
    def buffer(self) -> Replay:
        """The buffer that batches come from.

        Raises:
            RuntimeError: If the module was given a function and `fit` is not running.
        """
        if self._buffer is None:
            raise RuntimeError(
                "this ReplayDataModule makes its buffer when `fit` starts and closes it when `fit` ends; "
                "pass it a ReplayBuffer to have one outside of `fit`"
            )
        return self._buffer

    def setup(self, stage: str) -> None:
        """Makes or attaches the buffer and starts the explorers; acts only for the stage "fit".

        Raises:
            RuntimeError: If the Trainer spans several machines, or its ranks are no `torch.distributed` run.
            ValueError: If the buffer's weights would differ between ranks (`Prioritized(weights="batch")`).
            LearnerLost: If another rank could not make the buffer or attach to it.
        """
        if stage != "fit" or self._stream is not None:
            return
        _refuse_other_runs(self.trainer)
        self._explorers_wait = any(
            getattr(callback, "restores_buffer", False) for callback in getattr(self.trainer, "callbacks", ())
        )
        self._buffer = self._learners.join(start_explorers=not self._explorers_wait)
        try:
            self._stream = _Stream(
                self._buffer,
                self.batch_size,
                self.steps_per_epoch,
                self.prefetch,
                device=self.device,
                timeout=self.timeout,
                pin=self.pin,
                budget=self.budget,
            )
        except BaseException as error:  # Lightning's hooks find no stream to end
            self._buffer = self._given
            self._learners.leave(error)
            raise
        self._stream.learners, self._stream.trainer = self._learners, self.trainer
        if self.trainer is not None:
            take_in_turn(self.trainer, self._stream)

    def train_dataloader(self) -> ReplayDataset:
        """Returns the stream of batches, the same object on every call.

        What was set on this module since, `batch_size`, `steps_per_epoch` or `prefetch`, holds from here on. Explorers
        that had to wait for a `ReplayCheckpoint` to restore the buffer start here.

        Raises:
            RuntimeError: If called before `setup`.
            ValueError: If a number that was set is out of range.
        """
        if self._stream is None:
            raise RuntimeError('ReplayDataModule has no stream of batches yet; call `setup("fit")` first')
        if self._resumes:  # here, as a `ReplayCheckpoint` sets the place that the buffer was saved at
            self._resumes = False
            self._stream.load_state_dict(self._place)
        self._stream.adapt(self.batch_size, self.steps_per_epoch, self.prefetch)
        if self._explorers_wait:
            self._explorers_wait = False
            self._learners.start()
        return self._stream

    def teardown(self, stage: str) -> None:
        """Stops the explorers and closes a buffer that this module made; acts only for the stage "fit"."""
        if stage == "fit":
            self._finish()

    def on_exception(self, exception: BaseException) -> None:
        """Does what `teardown` does, which Lightning skips after an exception, and ends the other ranks.

        Where another rank is the reason, the exception gets a note that says so.
        """
        self._finish(exception)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream, as `ReplayDataset.state_dict` does."""
        return self._place if self._stream is None else self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where a checkpoint was taken.

        Lightning drops the loader's own state where `trainer.estimated_stepping_batches` was read before the resume;
        this copy is always loaded.

        Raises:
            ValueError: If it is not such a state.
        """
        given: Any = state_dict
        if not isinstance(given, dict) or "draws" not in given:
            raise ValueError(f"state_dict is {given!r:.200}; a ReplayDataModule's state has 'draws'")
        checked_int("draws", given["draws"], 0)
        self._place = {"position": 0, "drawn": []} | given
        self._resumes = True
        if self._stream is not None:  # it was asked for already where strategies restore late
            self._stream.load_state_dict(self._place)

    def __repr__(self) -> str:
        buffer = "made when fit starts" if self._buffer is None else repr(self._buffer)
        return (
            f"ReplayDataModule(batch_size={self.batch_size}, steps_per_epoch={self.steps_per_epoch}, buffer={buffer})"
        )

    __str__ = __repr__  # Lightning's own iterates every loader to describe it

    def _finish(self, error: BaseException | None = None) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            # A plugin's thread may be saving the buffer. Lightning asks for its errors later.
            with suppress(Exception):
                finish_saves(self.trainer)
            self._buffer = self._given
            self._place, self._resumes = stream.retire(), False
            # TD errors of the last steps. After an exception it is that one which says what went wrong.
            with nullcontext() if error is None else suppress(Exception):
                stream.buffer.flush()
        finally:  # also where the user has closed the buffer already
            loss = self._learners.leave(error)
        if loss is not None and error is not None and not isinstance(error, LearnerLost):
            error.add_note(loss)


def resolve_buffer(callback: object, buffer: Replay | None, trainer: Trainer) -> Replay:
    """Returns the buffer a callback was given, or that of the Trainer's data module.

    Raises:
        ValueError: If there is neither; the text names the callback.
    """
    if buffer is not None:
        return buffer
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(datamodule, ReplayDataModule):
        return datamodule.buffer
    raise ValueError(
        f"{type(callback).__name__} was given no buffer and the Trainer has no ReplayDataModule to take it from; "
        f"write {type(callback).__name__}(buffer), or fit with datamodule=ReplayDataModule(...)"
    )


class _Ranks(NamedTuple):
    """What a worker of a `DataLoader` knows of the `Learners`, which stay in the process that trains."""

    several: bool
    leads: bool
    loss: str | None = None


class _Stream(ReplayDataset):
    """The batches of one `fit`, for one rank."""

    learners: Learners | _Ranks  # other ranks among them wait for this one in every step
    trainer: Any = None
    _last_state: dict[str, Any] | None = None

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self._home = os.getpid()  # where Trainer and learners can be asked; a worker of a loader has copies

    def _batches(self) -> Iterator[ReplayBatch]:
        trainer = self.trainer if self._home == os.getpid() else None
        if trainer is not None and not self.learners.several and self.buffer.stopped:
            refuse_epoch(trainer)
        yield from super()._batches()
        if not self.buffer.stopped:
            return
        # One rank that just ends leaves the others in the next gradient exchange, without a word.
        if self.learners.several:
            loss = self.learners.loss if self._home == os.getpid() else None
            raise stopped_among_ranks() if loss is None else LearnerLost(loss)
        if trainer is not None:
            end_fit(trainer)

    def __getstate__(self) -> dict[str, Any]:
        ranks = _Ranks(self.learners.several, self.learners.leads)
        return super().__getstate__() | {"learners": ranks, "trainer": None}

    def adapt(self, batch_size: int, steps: int | None, prefetch: int) -> None:
        """Has the iterations from now on give so many batches of that size."""
        self.batch_size = checked_int("batch_size", batch_size, 1)
        self.steps = None if steps is None else checked_int("steps_per_epoch", steps, 1)
        self.prefetch = checked_int("prefetch", prefetch, 0)
        self.forget_drawn_of_other_sizes()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._last_state is None else self._last_state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A checkpoint has the state of rank 0: the other ranks had drawn other batches ahead.
        super().load_state_dict(state_dict if self.learners.leads else state_dict | {"drawn": []})

    def retire(self) -> dict[str, Any]:
        """Ends the iteration, and keeps its state, which it returns, for checkpoints saved later."""
        self.end()
        self._last_state = self._place_in_stream()
        return self._last_state


def _refuse_other_runs(trainer: Any) -> None:
    """Raises for a Trainer whose ranks cannot share memory, or do not form a group that could agree on it."""
    world_size = 1 if trainer is None else trainer.world_size
    if world_size > 1 and trainer.num_nodes > 1:
        raise RuntimeError(several_machines(f"the Trainer spans {trainer.num_nodes} machines"))
    if world_size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"the Trainer's {type(trainer.strategy).__name__} has {world_size} ranks and no torch.distributed process "
            f"group; ReplayDataModule needs one, as DDP and FSDP have"
        )
