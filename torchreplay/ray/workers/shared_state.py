"""A small piece of shared memory that pickles to its address, and to a copy of it on other nodes of a Ray cluster."""

from __future__ import annotations

import mmap
import os
import weakref
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, Self

from torchreplay.segment.handle import Handle, make_handle, new_nonce, open_handle
from torchreplay.segment.ray_node import is_elsewhere, ray_node
from torchreplay.segment.reservation import reserve


class SharedState(ABC):
    """Shared memory that every process of this machine which unpickles it attaches to; freed with its last user.

    On another node of a Ray cluster it unpickles to a copy, all zero. A `StateReplica` keeps it like the original: what
    the worker there writes is told to the original, and what the pool writes, the orders, is told to the copy.

    Args:
        nbytes: Its size. It is zero at first.

    Attributes:
        is_copy: Whether it is such a copy.
    """

    is_copy = False

    what: ClassVar[str]
    """Its name, in errors and in /proc."""

    def __init__(self, nbytes: int) -> None:
        fd = reserve(nbytes, self.what)
        self.lay_out(mmap.mmap(fd, 0))
        self._handle = make_handle(fd, new_nonce())
        weakref.finalize(self, os.close, fd)  # others attach through the descriptor: it stays open

    @abstractmethod
    def lay_out(self, memory: mmap.mmap) -> None:
        """Names the parts of the memory."""

    @abstractmethod
    def told(self, index: int) -> bytes:
        """Returns what worker `index` has written, for `hear` of the same page on another node."""

    @abstractmethod
    def hear(self, index: int, told: bytes) -> None:
        """Takes over what `told` returned there."""

    @abstractmethod
    def orders(self, index: int) -> bytes:
        """Returns what the pool has written for worker `index`, for `obey` of the same page on another node."""

    @abstractmethod
    def obey(self, index: int, orders: bytes) -> None:
        """Takes over what `orders` returned there."""

    @classmethod
    def attach(cls, handle: Handle) -> Self:
        """Attaches to memory that another process has made, or makes a copy of it on another node than its own.

        Raises:
            AttachError: That process is gone, or runs on another machine that is no node of this one's Ray cluster.
        """
        page = cls.__new__(cls)
        page._handle = handle
        if is_elsewhere(handle.node):
            page.is_copy = True
            page.lay_out(mmap.mmap(-1, handle.size))
            return page
        fd = open_handle(handle, cls.what)
        try:
            page.lay_out(mmap.mmap(fd, 0))
        finally:
            os.close(fd)
        return page

    def __reduce__(self) -> tuple[object, tuple[type[SharedState], Handle]]:
        handle = self._handle  # of a page that was made before Ray was started: it is of this node all the same
        return attached_page, (type(self), handle if handle.node else replace(handle, node=ray_node()))


def attached_page(kind: type[SharedState], handle: Handle) -> SharedState:
    """Returns `kind.attach(handle)`. Pickles name it: see `torchreplay.buffer.replay_buffer.attached`."""
    return kind.attach(handle)
