"""The buffers that this process has open, and what becomes of them when it forks or ends."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import util
from typing import Protocol, TypeVar

from torchreplay import _C
from torchreplay.segment.closeable import Closeable
from torchreplay.segment.waits import STARTUP_GRACE


class OpenBuffer(Protocol):
    """A buffer, in the eyes of a process that forks or ends."""

    def before_fork(self) -> None:
        """Before a fork: two processes will use what the buffer has of the segment."""

    def in_child(self) -> None:
        """In a forked child: it has a place of its own in the segment from now on."""

    def at_exit(self) -> None:
        """Applies what was fed back and leaves; the process ends."""

    @property
    def is_learning(self) -> bool:
        """Whether this process has drawn from it."""

    def depart(self, seconds: float) -> None:
        """Has others count no more on this process, as owner (for so long) and as learner, until it draws again."""


T = TypeVar("T")

open_buffers: weakref.WeakSet[OpenBuffer] = weakref.WeakSet()
open_writers: weakref.WeakSet[_C.Writer] = weakref.WeakSet()
open_leases: weakref.WeakSet[Closeable] = weakref.WeakSet()
"""Promises that writers will come."""
open_rings: weakref.WeakSet[Closeable] = weakref.WeakSet()
"""Learners by the torch operators, which have places of their own."""


def _all(of: weakref.WeakSet[T]) -> list[T]:
    while True:
        with suppress(RuntimeError):  # other threads open and close some meanwhile
            return list(of)


def _before_fork() -> None:
    for buffer in _all(open_buffers):
        with suppress(RuntimeError):  # another thread has just closed it
            buffer.before_fork()


def _in_child() -> None:
    for buffer in _all(open_buffers):
        buffer.in_child()


def _settle() -> None:
    for buffer in _all(open_buffers):
        with suppress(Exception):  # nobody is left to hear of errors
            buffer.at_exit()


def _depart() -> None:
    """Has others count no more on this process. `multiprocessing` then waits for its children, which may wait for it.

    A program that has neither drawn nor failed has only started them. Their learner may still be to come: so long they
    go on counting on this process as the owner.
    """
    buffers, rings = _all(open_buffers), _all(open_rings)
    has_failed = getattr(sys, "last_value", None) is not None
    is_over = has_failed or bool(rings) or any(buffer.is_learning for buffer in buffers)
    departures: list[Callable[[], object]] = [writer._depart for writer in _all(open_writers)]
    departures += [partial(buffer.depart, 0.0 if is_over else STARTUP_GRACE) for buffer in buffers]
    if is_over:
        departures += [each.close for each in (*_all(open_leases), *rings)]
    for depart in departures:
        with suppress(Exception):  # nobody is left to hear of errors
            depart()


def _leave_files() -> None:
    _settle()
    _C.leave_files()


def _in_multiprocessing_child(_: object) -> None:
    # It has dropped what was to be done at the end until then, and has none of the interpreter's.
    util.Finalize(None, _leave_files, exitpriority=-100)
    util.Finalize(None, _depart, exitpriority=0)


# Files are marked as closed when this process ends in order, even where their memory is still held: the native core
# leaves them when the interpreter has ended.
atexit.register(_settle)
atexit.register(_C.let_threads_sleep)  # daemon threads, where they would abort the process
util.Finalize(None, _depart, exitpriority=0)  # the lowest that comes before children are waited for: pools stop first
util.register_after_fork(open_buffers, _in_multiprocessing_child)
os.register_at_fork(before=_before_fork, after_in_child=_in_child)
