"""The buffers that this process has open, and what becomes of them when it forks or ends."""

from __future__ import annotations

import atexit
import os
import weakref
from contextlib import suppress
from multiprocessing import util
from typing import Protocol

from torchreplay import _C


class OpenBuffer(Protocol):
    """A buffer, in the eyes of a process that forks or ends."""

    def before_fork(self) -> None:
        """Before a fork: two processes will use what the buffer has of the segment."""

    def in_child(self) -> None:
        """In a forked child: it has a place of its own in the segment from now on."""

    def at_exit(self) -> None:
        """Applies what was fed back and leaves; the process ends."""


open_buffers: weakref.WeakSet[OpenBuffer] = weakref.WeakSet()


def _all_open() -> list[OpenBuffer]:
    while True:
        with suppress(RuntimeError):  # other threads open and close some meanwhile
            return list(open_buffers)


def _before_fork() -> None:
    for buffer in _all_open():
        with suppress(RuntimeError):  # another thread has just closed it
            buffer.before_fork()


def _in_child() -> None:
    for buffer in _all_open():
        buffer.in_child()


def _settle() -> None:
    for buffer in _all_open():
        with suppress(Exception):  # nobody is left to hear of errors
            buffer.at_exit()


def _leave_files() -> None:
    _settle()
    _C.leave_files()


def _in_multiprocessing_child(_: object) -> None:
    # It has dropped what was to be done at the end until then, and has none of the interpreter's.
    util.Finalize(None, _leave_files, exitpriority=-100)


# Files are marked as closed when this process ends in order, even where their memory is still held: the native core
# leaves them when the interpreter has ended.
atexit.register(_settle)
atexit.register(_C.let_threads_sleep)  # daemon threads, where they would abort the process
util.register_after_fork(open_buffers, _in_multiprocessing_child)
os.register_at_fork(before=_before_fork, after_in_child=_in_child)
