"""Page-locking of memory that is there already, such as a buffer's own."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch

from torchreplay.segment.reservation import size_text

PORTABLE, MAPPED = 1, 2
"""cudaHostRegisterPortable: for every device, as torch itself registers memory; cudaHostRegisterMapped: devices may
read it where it lies."""


class Registry(Protocol):
    """Where memory is registered as page-locked."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Registers memory; returns None, or why it was refused."""

    def unregister(self, address: int, readers: Collection[torch.device]) -> None:
        """Takes that back, before the memory is unmapped, once the devices that were given work with it are done."""


class CudaRegistry:
    """CUDA's own.

    Args:
        device: Of those that are to read or copy the memory, the first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> str | None:
        """Registers memory; returns None, or why it was refused."""
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            code = runtime.cudaHostRegister(address, nbytes, PORTABLE | MAPPED)
        if int(code) == 0:
            return None
        # The refusal would come up again in whatever is called next: checking a launch reports it, and so clears it.
        with suppress(RuntimeError):
            torch.ones((), device="cuda")
        return f"{runtime.cudaGetErrorString(code)}, CUDA error {int(code)}"

    def unregister(self, address: int, readers: Collection[torch.device]) -> None:
        """Takes that back, once nothing on these devices reads from there any more."""
        for device in {self._device, *readers}:
            with suppress(RuntimeError):  # of a device that has failed; those who use it have been told
                torch.cuda.synchronize(device)
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(address)


class PageLock:
    """Memory that is page-locked, where the system allows it, until `release()`.

    It is so for this process alone. A refusal is a warning, no error.

    Args:
        owner: When it is collected, the memory is released; it keeps the memory mapped until then.
        address: Of the memory: whole pages.
        nbytes: Its length.
        registry: Where it is registered.
    """

    def __init__(self, owner: object, address: int, nbytes: int, registry: Registry) -> None:
        self._lock = threading.RLock()
        self._working = self._ending = False
        self._readers = set[torch.device]()
        refusal = registry.register(address, nbytes)
        release = partial(_release, os.getpid(), address, registry, self._readers)
        self._release = None if refusal else weakref.finalize(owner, release)
        if refusal:
            warnings.warn(
                f'pin="ring" cannot page-lock the {size_text(nbytes)} of the replay buffer ({refusal}): copies from '
                f"`buffer.storage` go through pageable memory. A limit on locked memory may be the reason, or that the "
                f"buffer lies in a file on a disk. Batches are staged in page-locked memory all the same",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def held(self) -> bool:
        """Whether the memory is page-locked."""
        return self._release is not None and self._release.alive

    @contextmanager
    def in_use(self, device: torch.device) -> Iterator[None]:
        """Has `release` wait while work is given to a device that reads the memory, and then for that work.

        Raises:
            RuntimeError: It is not page-locked any more.
        """
        with self._lock:
            if not self.held:
                raise RuntimeError("the replay buffer is closed: a device cannot read its memory any more")
            self._readers.add(device)
            self._working = True
            try:
                yield
            finally:
                self._working = False
                if self._ending:
                    self.release()

    def release(self) -> None:
        """Ends it. Idempotent. A signal handler that calls it where its own thread gives work returns before that."""
        with self._lock:
            self._ending = True
            if self._release is not None and not self._working:
                self._release()


def _release(process: int, address: int, registry: Registry, readers: Collection[torch.device]) -> None:
    if os.getpid() == process:  # a forked child has the memory, and no CUDA
        registry.unregister(address, readers)
