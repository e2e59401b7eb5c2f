"""Page-locking of memory that is there already, such as a buffer's own."""

from __future__ import annotations

import os
import warnings
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from torchreplay.segment.reservation import size_text

PORTABLE = 1
"""cudaHostRegisterPortable: for every device, as torch itself registers memory."""


class CudaRegistry:
    """CUDA's list of page-locked memory.

    Args:
        device: By which the memory is registered.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> str | None:
        """Registers memory; returns None, or why it was refused."""
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            code = runtime.cudaHostRegister(address, nbytes, PORTABLE)
        if int(code) == 0:
            return None
        # The next call of CUDA would report the refusal again. Checking a launch reports it, and so clears it.
        with suppress(RuntimeError):
            torch.ones((), device="cuda")
        return f"{runtime.cudaGetErrorString(code)}, CUDA error {int(code)}"

    def unregister(self, address: int) -> None:
        """Takes that back, once the device has ended its work."""
        with suppress(RuntimeError):  # of a device that has failed; its users know it already
            torch.cuda.synchronize(self._device)
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

    def __init__(self, owner: object, address: int, nbytes: int, registry: CudaRegistry) -> None:
        refusal = registry.register(address, nbytes)
        release = partial(_release, os.getpid(), address, registry)
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

    def release(self) -> None:
        """Ends it. Idempotent."""
        if self._release is not None:
            self._release()


def _release(process: int, address: int, registry: CudaRegistry) -> None:
    if os.getpid() == process:  # a forked child has the memory, and no CUDA
        registry.unregister(address)
