"""The buffers that this process has open, and what becomes of them when it forks or ends."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from multiprocessing import util
from typing import TYPE_CHECKING

from . import _C

if TYPE_CHECKING:
    from .buffer import ReplayBuffer

open_buffers: weakref.WeakSet[ReplayBuffer] = weakref.WeakSet()


def _before_fork() -> None:
    for buffer in list(open_buffers):
        buffer._become_shared()


def _in_child() -> None:
    for buffer in list(open_buffers):
        buffer._become_childs()
    _leave_files_at_the_end()


def _leave_files() -> None:
    for buffer in list(open_buffers):
        with suppress(Exception):  # what cannot be applied has nobody left to be told
            buffer._end()
    _C.leave_files()


def _leave_files_at_the_end(_: object = None) -> None:
    """Has files put to rest when this process ends in order, whoever still holds their memory then.

    After its exit handlers and its child processes. multiprocessing's own children have no other end that can be told.
    """
    util.Finalize(None, _leave_files, exitpriority=-100)


_leave_files_at_the_end()
# In multiprocessing's children, which drop what was to be done at the end until then.
util.register_after_fork(open_buffers, _leave_files_at_the_end)
os.register_at_fork(before=_before_fork, after_in_child=_in_child)
