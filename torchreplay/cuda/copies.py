"""Copies to and from CUDA devices that nobody waits for."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torchreplay.cuda.long_rows import LongRows
    from torchreplay.cuda.pinned_memory import PageLock

_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_of_parent: list[Any] = []


def keep_in_children(holder: Any) -> None:
    """Has what holds page-locked memory live on in children that are forked, unused.

    torch frees memory that was copied from or to by way of CUDA, which does not work in a forked process and ends it.
    """
    _holders.add(holder)


os.register_at_fork(after_in_child=lambda: _of_parent.extend(_holders))


def page_locked(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor in page-locked memory; where none is to be had, in other memory, with a warning."""
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        warnings.warn(
            f"{math.prod(shape) * dtype.itemsize:,} bytes of memory cannot be page-locked "
            f"({str(error).splitlines()[0]}): they go to or from the device as pageable memory, which is slower and "
            f"makes the learner wait for each copy",
            RuntimeWarning,
            stacklevel=2,
        )
        return torch.empty(shape, dtype=dtype, device="cpu")


class DeviceCopy:
    """A block on its way to a device.

    Args:
        block: There.
        begun: What was recorded before, to tell the time; None: nobody wants to know.
        ended: What was recorded after it.
        intact: bool `[]` in page-locked memory, there once it has ended: the block is what it was to be; None: it is.
    """

    def __init__(
        self,
        block: torch.Tensor,
        begun: torch.cuda.Event | None,
        ended: torch.cuda.Event,
        intact: torch.Tensor | None,
    ) -> None:
        self._block: torch.Tensor | None = block
        self._begun, self._ended, self._intact = begun, ended, intact

    def done(self) -> bool:
        """Returns whether the copy has ended."""
        return bool(self._ended.query())

    def wait(self) -> None:
        """Returns when it has."""
        self._ended.synchronize()

    def intact(self) -> bool:
        """Returns whether the block is what it was to be; where that is not certain, once the copy has ended."""
        if self._intact is None:
            return True
        if not self.done():
            self.wait()
        return bool(self._intact)

    def seconds(self) -> float:
        """Returns how long the copy took, which has ended, and was to be timed."""
        assert self._begun is not None
        return float(self._begun.elapsed_time(self._ended)) / 1e3

    def take(self) -> torch.Tensor:
        """Returns the block, for the current stream of the calling thread; once."""
        block, self._block = self._block, None
        assert block is not None
        stream = torch.cuda.current_stream(block.device)
        stream.wait_event(self._ended)
        block.record_stream(stream)
        return block


class DeviceCopies:
    """Copies blocks of page-locked memory to a device, on a stream of their own.

    What makes this safe without a wait of the host:

    - The block on the device is allocated on the stream of the copies, so the allocator gives it only memory whose
      last use precedes the copy there. On the learner's stream it could be memory that kernels still queued go on
      using; the copy would have to wait for them all, and nothing would overlap.
    - The learner's stream waits for the copy's own event (`wait_event`), not for all of its stream (`wait_stream`),
      where the next copy may be queued already. It is the stream that is current where the batch is handed out.
    - The learner's kernels use the block on another stream than the one it was allocated on, which `record_stream`
      says: once the batch is garbage, the block is used again only when what that stream had queued by then has ended.
    - The memory that the copy reads is drawn into again only when the event has completed. torch waits for that itself
      before it reuses memory that was freed (its allocator records each copy), but knows nothing of memory that stays.

    Args:
        device: A CUDA device; without an index the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.cuda.current_stream(device).device  # which has an index
        self._stream = self._make_stream()

    def memory(self, nbytes: int) -> torch.Tensor:
        """Returns memory to copy from: uint8 `[nbytes]`."""
        return page_locked((nbytes,), torch.uint8)

    def start(self, block: torch.Tensor, timed: bool = False) -> DeviceCopy:
        """Starts the copy of a block, which must not change until it is done.

        Args:
            block: uint8 `[n]`, in such memory.
            timed: Somebody will want to know how long it took.
        """
        with torch.cuda.stream(self._stream):
            begun = self._record(timed) if timed else None
            there, intact = self._carry(block)
            ended = self._record(timed)
        return DeviceCopy(there, begun, ended, intact)

    def _make_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def _record(self, timed: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self._stream)
        return event

    def _carry(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Has the current stream bring a block to the device; returns it there, and what tells whether it is intact."""
        there = torch.empty(block.shape, dtype=block.dtype, device=self.device)
        there.copy_(block, non_blocking=True)
        return there, None


class GatherCopies(DeviceCopies):
    """Copies what is short of a batch, and has the device read what is long in the buffer's own, page-locked memory.

    Its stream goes before others, so that a step's kernels do not make it late: who takes the batch waits until it is
    known to be intact. That is the link's time, not the step's.

    Args:
        device: A CUDA device; without an index the current one.
        rows: What is read there.
        lock: By which the memory is page-locked.
    """

    def __init__(self, device: torch.device, rows: LongRows, lock: PageLock) -> None:
        super().__init__(device)
        self._rows, self._lock = rows, lock

    def _make_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device, priority=-1)

    def _carry(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        there = torch.empty(self._rows.end, dtype=block.dtype, device=self.device)
        there[: len(block)].copy_(block, non_blocking=True)
        with self._lock.in_use(self.device):
            read = self._rows.read(there)
        intact = page_locked((), torch.bool)
        intact.copy_(read, non_blocking=True)
        return there, intact


class _Seen:
    """Memory of the host as CUDA describes memory of its own; it keeps it mapped."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": np.dtype(str(tensor.dtype).removeprefix("torch.")).str,
            "data": (tensor.data_ptr(), False),
        }


def seen_by(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of page-locked memory of the host as one that kernels on a device may read, over the link.

    Devices read it at the host's addresses: CUDA on 64-bit Linux has one range of addresses for both.

    Args:
        device: Of CUDA, with an index.
        tensor: Of integers.

    Raises:
        RuntimeError: torch has made a copy of it.
    """
    seen = torch.as_tensor(_Seen(tensor), device=device)  # without the device a default one of the user's is taken
    if seen.data_ptr() != tensor.data_ptr():
        raise RuntimeError("this version of torch copies memory that is to be read where it lies")
    return seen


class HostCopy:
    """Values on their way from a device.

    Attributes:
        values: In page-locked memory; there once the copy is done.
    """

    def __init__(self, values: torch.Tensor, ended: torch.cuda.Event) -> None:
        self.values = values
        self._ended = ended
        keep_in_children(self)

    def done(self) -> bool:
        """Returns whether they are there."""
        return bool(self._ended.query())

    def wait(self) -> None:
        """Returns when they are."""
        self._ended.synchronize()


def to_host(values: torch.Tensor) -> HostCopy:
    """Starts a copy of what the current stream will have computed by then, on a stream of its own.

    The values are put aside on the current stream first: whatever comes after, such as the next replay of a CUDA graph,
    may overwrite them before the copy is made. The copy's stream waits for that (`wait_stream`), and the memory put
    aside is kept for it (`record_stream`).

    Args:
        values: On a CUDA device, and computed, or to be computed, by its current stream.
    """
    device = values.device
    stream = _stream_of_copies(device)
    aside = values.detach().clone(memory_format=torch.contiguous_format)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        here = page_locked(aside.shape, aside.dtype)
        here.copy_(aside, non_blocking=True)
        ended = torch.cuda.Event()
        ended.record(stream)
    aside.record_stream(stream)
    return HostCopy(here, ended)


@cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def require_devices(device: torch.device) -> None:
    """Checks that there is such a CUDA device, without starting CUDA: processes may still be forked.

    Raises:
        ValueError: There is none.
    """
    count = torch.cuda.device_count()
    if not count:
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device here"
        raise ValueError(f"device is {str(device)!r}, and {why}; give device=None to have the batches on the CPU")
    if (device.index or 0) >= count:
        raise ValueError(f"device is {str(device)!r}: this machine has CUDA devices 0 to {count - 1}")
