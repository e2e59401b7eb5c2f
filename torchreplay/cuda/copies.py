"""Copies to and from CUDA devices that nobody waits for."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

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
        with torch.inference_mode(False):  # it outlives the call, and is written to outside of such a mode
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        warnings.warn(
            f"{math.prod(shape) * dtype.itemsize:,} bytes of memory cannot be page-locked "
            f"({str(error).splitlines()[0]}): they go to or from the device as pageable memory, which is slower and "
            f"makes the learner wait for each copy",
            RuntimeWarning,
            stacklevel=2,
        )
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device="cpu")


class DeviceCopy:
    """A block on its way to a device.

    Args:
        block: There.
        ended: What was recorded after it.
    """

    def __init__(self, block: torch.Tensor, ended: torch.Event) -> None:
        self._block: torch.Tensor | None = block
        self._ended = ended

    def done(self) -> bool:
        """Returns whether the copy has ended, so that its source may change."""
        return bool(self._ended.query())

    def wait(self) -> None:
        """Returns when it has."""
        self._ended.synchronize()

    def take(self) -> torch.Tensor:
        """Returns the block, for the current stream of the calling thread; once."""
        block, self._block = self._block, None
        assert block is not None
        stream = torch.accelerator.current_stream(block.device)
        stream.wait_event(self._ended)
        block.record_stream(stream)
        return block


class DeviceCopies:
    """Copies blocks of page-locked memory to a device: one after the other, on a stream of their own. No host waits.

    What makes this safe without a wait of the host:

    - The block on the device is allocated on the stream of the copies, so the allocator gives it only memory whose
      last use precedes the copy there. On the learner's stream, queued kernels could still use that memory. The copy
      would have to wait for them all, and nothing would overlap.
    - The learner's stream waits for the copy's own event (`wait_event`), not for all of its stream (`wait_stream`),
      where the next copy may be queued already. It is the stream that is current where the batch is handed out.
    - The learner's kernels use the block on another stream than the one it was allocated on. `record_stream` says so.
      Once the batch is garbage, the block is used again only after the work that this stream had queued by then.
    - The memory that the copy reads is drawn into again only when the event has completed. torch waits for that itself
      before it reuses freed memory (its allocator records each copy). It knows nothing of memory that stays.

    Args:
        device: A CUDA device; without an index the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.cuda.current_stream(device).device  # which has an index
        self._stream = torch.Stream(self.device)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Returns memory to copy from: uint8 `[nbytes]`, the whole of its storage."""
        return page_locked((nbytes,), torch.uint8)

    def start(self, block: torch.Tensor) -> DeviceCopy:
        """Starts the copy of a block, which must not change until it is done.

        Args:
            block: uint8 `[n]`, in such memory.
        """
        with self._stream:
            there = torch.empty(block.shape, dtype=block.dtype, device=self.device)
            there.copy_(block, non_blocking=True)
            ended = torch.Event(self.device)
            ended.record(self._stream)
        return DeviceCopy(there, ended)


class HostCopy:
    """Values on their way from a device.

    Attributes:
        values: In page-locked memory; there from when the copy is done until `release()`.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.values = page_locked(shape, dtype)
        self._device = device
        self._ended = torch.Event(device)
        keep_in_children(self)

    def start(self, values: torch.Tensor) -> None:
        """Starts a copy of what the current stream of the values' device will have computed by then."""
        self.values.copy_(values, non_blocking=True)
        self._ended.record(torch.accelerator.current_stream(self._device))

    def done(self) -> bool:
        """Returns whether they are there."""
        return bool(self._ended.query())

    def wait(self) -> None:
        """Returns when they are."""
        self._ended.synchronize()

    def release(self) -> None:
        """Lends the memory to another copy. The values have been read."""
        if len(_released) >= RELEASED_KINDS:
            _released.clear()
        _released[self.values.shape, self.values.dtype, self._device].append(self)


RELEASED_KINDS = 16
"""Shapes, dtypes and devices of values whose memory is kept for the next ones."""

_released = defaultdict[tuple[torch.Size, torch.dtype, torch.device], list[HostCopy]](list)


def to_host(values: torch.Tensor) -> HostCopy:
    """Starts a copy of what the current stream will have computed by then.

    It is made on that stream: what the stream does later, such as the next replay of a CUDA graph, comes after it.

    Args:
        values: On a CUDA device, and computed, or to be computed, by its current stream.
    """
    try:
        copy = _released[values.shape, values.dtype, values.device].pop()
    except IndexError:
        copy = HostCopy(values.shape, values.dtype, values.device)
    copy.start(values.detach())
    return copy


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
