"""`ReplayDataModule`: a replay buffer, and the explorers that fill it, as a Lightning data module."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..batch import ReplayBatch
from ..buffer import ReplayBuffer
from ..dataset import ReplayDataset, require_count, require_timeout
from ..errors import Stopped
from .libraries import LightningDataModule

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


@runtime_checkable
class Explorers(Protocol):
    """What fills a buffer during `fit`: an `ExplorerPool`, or anything with an idempotent `start` and `stop`."""

    def start(self) -> Any:
        """Starts exploring; returns at once."""

    def stop(self) -> Any:
        """Ends all exploring; called more than once, and also where `start` failed."""


class ReplayDataModule(LightningDataModule):
    """Feeds a Trainer from a replay buffer and runs the explorers for as long as `fit` does.

    The loader is a `ReplayDataset` itself: with a plain iterable Lightning neither asks for workers nor for a sampler,
    and saves the place in the stream with every checkpoint. Without `steps_per_epoch` the stream is endless: bound the
    run by `max_steps`, or set `limit_train_batches` to an integer to have epochs. Lightning then draws one batch
    ahead, which is harmless: priorities go by the keys in the batch.

    With several processes on one machine (DDP), local rank 0 makes the buffer and starts the explorers, and the other
    ranks attach to it; each rank draws its own batches from the one buffer.

    Args:
        buffer: A `ReplayBuffer`, which stays open afterwards, or a function without arguments that makes one, which is
            called at the start of `fit` on local rank 0 and whose buffer is stopped and closed when `fit` ends. Under
            DDP give the function: the script runs once per rank, and so would make one buffer per rank.
        batch_size: Items in each rank's batch.
        steps_per_epoch: Batches per epoch; None for one endless epoch.
        prefetch: Batches drawn ahead of the one asked for, as in `ReplayDataset`.
        explorers: An object with `start()` and `stop()`, or a function of the buffer that makes one. Started in
            `setup`, or once a `ReplayCheckpoint` has restored the buffer; stopped in `teardown`, on any exception, and
            at the latest when the module is collected or the process exits.
        timeout: Seconds that one draw may wait for data, as in `ReplayDataset`.

    Raises:
        TypeError: If `buffer` or `explorers` is neither of the two things it may be.
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        buffer: ReplayBuffer | Callable[[], ReplayBuffer],
        batch_size: int = 256,
        *,
        steps_per_epoch: int | None = None,
        prefetch: int = 2,
        explorers: Explorers | Callable[[ReplayBuffer], Explorers] | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        _check_sources(buffer, explorers)
        self.batch_size = require_count("batch_size", batch_size, at_least=1)
        self.steps_per_epoch = (
            None if steps_per_epoch is None else require_count("steps_per_epoch", steps_per_epoch, at_least=1)
        )
        self.prefetch = require_count("prefetch", prefetch, at_least=0)
        self.timeout = require_timeout(timeout)
        self._buffer_source = buffer
        self._explorers_source = explorers
        self._buffer: ReplayBuffer | None = buffer if isinstance(buffer, ReplayBuffer) else None
        self._stream: _Stream | None = None
        self._release: Callable[[], Any] = lambda: None
        self._unstarted: Explorers | None = None
        self._draws = 0  # of the last `fit`, for checkpoints that are saved after it

    @property
    def buffer(self) -> ReplayBuffer:
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
            RuntimeError: If the Trainer spans several machines.
        """
        if stage != "fit" or self._stream is not None:
            return
        place = _Place.of(self.trainer)
        buffer, ours = self._join_buffer(place)
        explorers: list[Explorers] = []
        # Registered before anything is started, so that a failure half-way is cleaned up too.
        closing = buffer if ours else None
        self._release = weakref.finalize(self, _shut_down, os.getpid(), explorers, closing, place.leads)
        self._buffer = buffer
        self._stream = _Stream(buffer, self.batch_size, self.steps_per_epoch, self.prefetch, timeout=self.timeout)
        self._stream.lockstep = place.world_size > 1
        if place.leads and self._explorers_source is not None:
            explorers.append(_made_explorers(self._explorers_source, buffer))
            restored_later = any(getattr(callback, "restores_buffer", False) for callback in _callbacks(self.trainer))
            self._unstarted = explorers[0] if restored_later else None
            if not restored_later:
                explorers[0].start()

    def train_dataloader(self) -> ReplayDataset:
        """Returns the stream of batches, the same object on every call.

        Explorers that had to wait for a `ReplayCheckpoint` to restore the buffer start here.

        Raises:
            RuntimeError: If called before `setup`.
        """
        if self._stream is None:
            raise RuntimeError('ReplayDataModule has no stream of batches yet; call `setup("fit")` first')
        unstarted, self._unstarted = self._unstarted, None
        if unstarted is not None:
            unstarted.start()
        return self._stream

    def teardown(self, stage: str) -> None:
        """Stops the explorers and closes a buffer that this module made; acts only for the stage "fit"."""
        if stage == "fit":
            self._finish()

    def on_exception(self, exception: BaseException) -> None:
        """Does what `teardown` does, which Lightning skips after an exception."""
        self._finish()

    def state_dict(self) -> dict[str, int]:
        """Returns the number of draws made, which is all that a checkpoint needs to continue the stream."""
        return {"draws": self._draws if self._stream is None else self._stream.buffer.draws}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues the stream of draws of a checkpoint.

        Lightning drops the loader's own state where `trainer.estimated_stepping_batches` was read before the resume;
        this copy is always loaded.
        """
        self._draws = require_count("draws", state_dict["draws"], at_least=0)
        if self._stream is not None:
            self._stream.buffer.draws = self._draws

    def __repr__(self) -> str:
        buffer = "made when fit starts" if self._buffer is None else repr(self._buffer)
        return (
            f"ReplayDataModule(batch_size={self.batch_size}, steps_per_epoch={self.steps_per_epoch}, buffer={buffer})"
        )

    __str__ = __repr__  # Lightning's own iterates every loader to describe it

    def _join_buffer(self, place: _Place) -> tuple[ReplayBuffer, bool]:
        """Returns this process's buffer, and whether it is this module's to close."""
        if place.world_size == 1:
            return self._own_buffer()
        mine = self._own_buffer() if place.leads else None
        handle = place.broadcast(mine[0].handle() if mine else None)
        return mine or (ReplayBuffer.attach(handle), True)

    def _own_buffer(self) -> tuple[ReplayBuffer, bool]:
        if isinstance(self._buffer_source, ReplayBuffer):
            return self._buffer_source, False
        buffer = self._buffer_source()
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(f"the function given as `buffer` returned {buffer!r}; it must return a ReplayBuffer")
        return buffer, True

    def _finish(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        self._buffer = self._buffer_source if isinstance(self._buffer_source, ReplayBuffer) else None
        try:
            self._draws = stream.retire()["draws"]
        finally:  # also where the user has closed the buffer already
            self._release()


def resolve_buffer(callback: object, buffer: ReplayBuffer | None, trainer: Trainer) -> ReplayBuffer:
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


class _Stream(ReplayDataset):
    """The batches of one `fit`, for one rank."""

    lockstep = False  # whether other ranks wait for this one in every step
    _last_state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[ReplayBatch]:
        yield from super().__iter__()
        # One rank that just ends leaves the others in the next gradient exchange, without a word, until it times out.
        if self.lockstep and self.buffer.stopped:
            raise Stopped("the buffer was stopped while several ranks train from it; stop it after `fit` has ended")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._last_state is None else self._last_state

    def retire(self) -> dict[str, Any]:
        """Ends the iteration, and keeps its state, which it returns, for checkpoints saved later."""
        self.end()
        self._last_state = self.state_dict()
        return self._last_state


@dataclass(frozen=True)
class _Place:
    """Where this process stands among those that train together."""

    world_size: int
    leads: bool  # it makes the buffer and runs the explorers, for all ranks of this machine
    broadcast: Callable[[Any], Any]  # from rank 0 to all

    @classmethod
    def of(cls, trainer: Trainer | None) -> _Place:
        if trainer is None or trainer.world_size == 1:
            return cls(world_size=1, leads=True, broadcast=lambda value: value)
        if trainer.num_nodes > 1:
            raise RuntimeError(
                f"the Trainer spans {trainer.num_nodes} machines, and a ReplayDataModule's buffer lies in the memory "
                "of one; use num_nodes=1"
            )
        return cls(trainer.world_size, trainer.local_rank == 0, trainer.strategy.broadcast)


def _callbacks(trainer: Any) -> list[Any]:
    return [] if trainer is None else trainer.callbacks


def _check_sources(buffer: object, explorers: object) -> None:
    if not isinstance(buffer, ReplayBuffer) and not callable(buffer):
        raise TypeError(
            f"buffer is {type(buffer).__name__}; it must be a ReplayBuffer or a function without arguments that makes "
            "one"
        )
    if explorers is not None and not isinstance(explorers, Explorers) and not callable(explorers):
        raise TypeError(
            f"explorers is {type(explorers).__name__}; it must have start() and stop(), such as an ExplorerPool, "
            "or be a function of the buffer that makes such an object"
        )


def _made_explorers(source: Explorers | Callable[[ReplayBuffer], Explorers], buffer: ReplayBuffer) -> Explorers:
    # A class has the methods of its objects, but is a function that makes one.
    given = isinstance(source, Explorers) and not isinstance(source, type)
    explorers: object = source if given else source(buffer)  # type: ignore[operator]
    if not isinstance(explorers, Explorers):
        raise TypeError(
            f"the function given as `explorers` returned {explorers!r}; it must return an object with start() and "
            "stop()"
        )
    return explorers


def _shut_down(pid: int, explorers: list[Explorers], buffer: ReplayBuffer | None, leads: bool) -> None:
    """Ends what `setup` began; `buffer` is None where it is the user's to close."""
    if os.getpid() != pid:  # a forked child holds a copy of the finalizer, not of the duty
        return
    if buffer is not None and leads:
        buffer.stop()  # explorers that wait for room return at once
    try:
        for running in explorers:
            running.stop()
    finally:
        if buffer is not None:
            buffer.close()
