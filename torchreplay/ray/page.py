"""A small piece of shared memory that pickles to its address."""

from __future__ import annotations

import mmap
import os
import weakref
from abc import ABC, abstractmethod
from typing import ClassVar, Self

from torchreplay.segment import Handle, make_handle, new_nonce, open_handle, reserve


class SharedPage(ABC):
    """Shared memory that every process of this machine which unpickles it attaches to; freed with its last user.

    Args:
        nbytes: Its size. It is zero at first.
    """

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

    @classmethod
    def attach(cls, handle: Handle) -> Self:
        """Attaches to memory that another process of this machine has made.

        Raises:
            AttachError: That process is gone, or runs on another machine.
        """
        fd = open_handle(handle, cls.what)
        page = cls.__new__(cls)
        page._handle = handle
        try:
            page.lay_out(mmap.mmap(fd, 0))
        finally:
            os.close(fd)
        return page

    def __reduce__(self) -> tuple[object, tuple[Handle]]:
        return self.attach, (self._handle,)
