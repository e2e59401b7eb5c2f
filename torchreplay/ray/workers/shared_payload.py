"""What a pool's workers unpickle, in shared memory and not in Ray's object store."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any, Final

from torchreplay.ray.runtime.session import import_ray
from torchreplay.segment.handle import make_handle, new_nonce, open_handle
from torchreplay.segment.ray_node import is_elsewhere
from torchreplay.segment.reservation import reserve

_WHAT: Final = "work of a pool of workers"


class SharedPayload:
    """Bytes that the workers of a pool read on the pool's node, and ask for elsewhere.

    The pool keeps them for restarts. Ray ends a program that refers to an object of its store when the store dies with
    its raylet, and it stores larger arguments of calls, too. So the workers get a handle.

    Attributes:
        server: The actor on the pool's node whose `payload()` gives them to workers on other nodes; None: there is
            none.
    """

    def __init__(self, content: bytes) -> None:
        fd = reserve(len(content), _WHAT)
        weakref.finalize(self, os.close, fd)  # others read through the descriptor: it stays open
        with mmap.mmap(fd, 0) as memory:
            memory[:] = content
        self._handle = make_handle(fd, new_nonce())
        self.server: Any = None

    def __bytes__(self) -> bytes:
        """Reads them.

        Raises:
            AttachError: The pool is gone.
        """
        if self.server is not None and is_elsewhere(self._handle.node):
            content: bytes = import_ray().get(self.server.payload.remote())
            return content
        fd = open_handle(self._handle, _WHAT)
        try:
            with mmap.mmap(fd, 0) as memory:
                return memory[:]
        finally:
            os.close(fd)
