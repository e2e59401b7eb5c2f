"""What a Trainer writes its checkpoints with, so that the replay buffer is saved beside each."""

from __future__ import annotations

import os
import shutil
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import strip_protocol
from fsspec.utils import get_protocol

from torchreplay.buffer.base import Replay, source_of
from torchreplay.checkpoint.directory import link_checkpoint, sync
from torchreplay.schema.samplers import Fifo
from torchreplay.segment.waits import logger

SUFFIX = ".replay"

HELD = "torchreplay.held"
"""Under which name the Trainer's checkpoint says what was held of a queue when it was made: for each rank."""


@dataclass(slots=True, eq=False)
class _Save:
    """A checkpoint that the Trainer has asked for.

    Attributes:
        path: Of the checkpoint.
        buffer: To be saved beside it.
        twin: The save just before, whose buffer serves for both; None: it does not.
        held: What the checkpoint says that was held of a queue.
        done: Whether the buffer is saved.
    """

    path: str
    buffer: Replay
    twin: _Save | None
    held: list[dict[str, Any]]
    done: bool = False


class BufferCheckpointIO:
    """A strategy's `checkpoint_io` that has the buffer saved where the checkpoint is written.

    Plugins may wrap the one that writes, as `AsyncCheckpointIO` does to write in a thread. This class stands before all
    of them and notes what is asked for. `_Writer` stands behind them, and saves the buffer right before the checkpoint
    is written: a checkpoint that is there has its buffer.

    Args:
        inner: What the strategy wrote with.
        buffer: To save.
        is_last: Returns whether a path is the `last` of a `ModelCheckpoint` which saved the other path just before.
    """

    def __init__(self, inner: Any, buffer: Replay, is_last: Callable[[str, str], bool]) -> None:
        self._buffer = buffer
        self._is_last = is_last
        self.ended = False  # whether `fit` is over
        self._latest: _Save | None = None
        self._asked: dict[str, deque[_Save]] = defaultdict(deque)  # that are not yet written
        self._unwanted: set[str] = set()  # to be removed when they are
        self._there: list[_Save] = []  # whose held items are not done
        self._lock = threading.Lock()
        self._inner = _before_writer(inner, self)

    def begin(self, buffer: Replay) -> None:
        """Begins anew, for another `fit`."""
        self._buffer, self.ended, self._latest = buffer, False, None

    def save_checkpoint(self, checkpoint: Any, path: Any, *args: Any, **options: Any) -> None:
        """Has a checkpoint written, and the buffer saved beside it.

        Raises:
            ValueError: `path` is on another machine.
        """
        if "state_dict" not in checkpoint:  # weights alone, on their way from a rank that "ddp_spawn" has started
            self._inner.save_checkpoint(checkpoint, path, *args, **options)
            return
        if not is_local(path):
            raise ValueError(
                f"{path} is not on a filesystem of this machine, and the replay buffer can be saved nowhere else: give "
                f"ModelCheckpoint a local dirpath, or call buffer.save(directory) yourself instead of ReplayCheckpoint"
            )
        place, latest = os.fspath(path), self._latest
        same = latest is not None and self._is_last(place, latest.path)
        self._latest = _Save(place, self._buffer, latest if same else None, checkpoint.get(HELD, []))
        with self._lock:
            self._asked[place].append(self._latest)
            self._unwanted.discard(place)
        self._inner.save_checkpoint(checkpoint, path, *args, **options)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint and its buffer, when it is written."""
        with self._lock:
            if self._asked.get(os.fspath(path)):  # a plugin's thread is about to write it
                self._unwanted.add(os.fspath(path))
                return
        self._remove(path)

    def load_checkpoint(self, *args: Any, **options: Any) -> Any:
        """Returns what is in a checkpoint, when it is written."""
        self.finish()
        return self._inner.load_checkpoint(*args, **options)

    def finish(self) -> None:
        """Waits until everything that was asked for is written.

        Raises:
            BaseException: What a plugin's thread has failed with.
        """
        with self._lock:
            is_over = not any(self._asked.values())
        if not is_over:
            self._inner.teardown()

    def asked(self, path: Any) -> _Save | None:
        """Returns the save of `path` whose turn it is; None: it is another Trainer's, with the same plugin."""
        with self._lock:
            waiting = self._asked.get(os.fspath(path))
            return waiting[0] if waiting else None

    def save_buffer(self, save: _Save) -> None:
        """Saves the buffer, or links what was saved of it just before."""
        place, twin = beside(save.path), save.twin
        if twin is not None and twin.done:
            with suppress(OSError):  # it was removed meanwhile
                link_checkpoint(beside(twin.path), place)
                save.done = True
                return
        try:
            save.buffer.save(place)
            save.done = True
        except RuntimeError as error:
            if not self.ended:
                raise
            logger.warning("%s is saved without a replay buffer beside it: %s", save.path, error)

    def is_there(self, save: _Save) -> None:
        """Says that a checkpoint is written. What was held of a queue is to be done once it is on the disk."""
        sampler = save.buffer.sampler
        if not save.held or not isinstance(sampler, Fifo) or sampler.commit != "manual":
            return
        sync(Path(local_name(save.path)))
        with self._lock:
            self._there.append(save)
        if self.ended:
            self.commit()

    def commit(self) -> None:
        """Ends what was held of a queue when the checkpoints were made that are on the disk, unless more are to come.

        So a `last` that is saved after another one is there, too. Who dies before this resumes from any of them, which
        ends these items, or from one before, and gets them again.
        """
        with self._lock:
            if not self._there or (any(self._asked.values()) and not self.ended):
                return
            there, self._there = self._there, []
        for save in there:
            with suppress(RuntimeError):  # it was closed since, and what was held has gone back
                source_of(save.buffer).end_held(save.held)

    def written(self, save: _Save) -> None:
        """Says that a checkpoint is written, or has failed."""
        save.twin = None
        with self._lock:
            waiting = self._asked[save.path]
            waiting.popleft()
            if not waiting:
                del self._asked[save.path]
            unwanted = not waiting and save.path in self._unwanted
            self._unwanted.discard(save.path)
        if unwanted:
            self._remove(save.path)

    def _remove(self, path: Any) -> None:
        self._inner.remove_checkpoint(path)
        if is_local(path):
            shutil.rmtree(beside(path), ignore_errors=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Writer:
    """What writes checkpoints, behind all plugins; a buffer goes first."""

    def __init__(self, inner: Any, saves: BufferCheckpointIO) -> None:
        self.inner, self._saves = inner, saves

    def save_checkpoint(self, checkpoint: Any, path: Any, *args: Any, **options: Any) -> None:
        save = self._saves.asked(path)
        if save is None:
            self.inner.save_checkpoint(checkpoint, path, *args, **options)
            return
        try:
            self._saves.save_buffer(save)
            self.inner.save_checkpoint(checkpoint, path, *args, **options)
            self._saves.is_there(save)
        finally:
            self._saves.written(save)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _before_writer(outermost: Any, saves: BufferCheckpointIO) -> Any:
    """Puts a `_Writer` behind the plugins; returns the outermost of them, or the `_Writer` where there are none."""
    plugin, inner = None, outermost
    while (wrapped := getattr(inner, "_checkpoint_io", None)) is not None and not isinstance(inner, _Writer):
        plugin, inner = inner, wrapped
    if isinstance(inner, _Writer):  # of another Trainer
        inner = inner.inner
    writer = _Writer(inner, saves)
    if plugin is None:
        return writer
    plugin._checkpoint_io = writer  # Lightning's own setter takes the first only
    return outermost


def beside(path: str | os.PathLike[str]) -> Path:
    """Returns where the buffer of the checkpoint `path` is saved."""
    return Path(f"{local_name(path)}{SUFFIX}")


def is_local(path: str | os.PathLike[str]) -> bool:
    """Returns whether Lightning, which takes URLs too, writes `path` to a filesystem of this machine."""
    return get_protocol(os.fspath(path)) in ("file", "local")


def local_name(path: str | os.PathLike[str]) -> str:
    """Returns the file that Lightning means by `path`."""
    return str(strip_protocol(os.fspath(path)))


def finish_saves(trainer: Any) -> None:
    """Waits until what a Trainer has asked for is written; see `BufferCheckpointIO.finish`."""
    saves = None if trainer is None else trainer.strategy.checkpoint_io
    if isinstance(saves, BufferCheckpointIO):
        saves.finish()
