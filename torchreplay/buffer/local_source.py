"""`LocalSource`: what a `ReplayBuffer` hands its batches to datasets with."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from torchreplay.buffer.base import BatchSource, Pin, StreamSpec
from torchreplay.buffer.local_sampler import LocalSampler
from torchreplay.buffer.prefetch import PrefetchIterator
from torchreplay.cuda.copies import DeviceCopies
from torchreplay.cuda.pinned_memory import CudaRegistry, PageLock
from torchreplay.cuda.staging import Staging
from torchreplay.segment.process_hooks import open_buffers
from torchreplay.segment.waits import SLICE_NS

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LocalSource(BatchSource):
    """A buffer that this process has attached, until it is closed: its batches, and what is page-locked for them.

    Args:
        sampler: What draws them.

    Attributes:
        sampler: What draws them.
    """

    def __init__(self, sampler: LocalSampler) -> None:
        self.sampler, self.config, self.nonce = sampler, sampler.config, sampler.nonce
        self._page_lock: PageLock | None = None
        self._end_attaching: weakref.finalize[..., LocalSource] | None = None
        open_buffers.add(self)

    @property
    def attach_fd(self) -> int:
        """A descriptor of the memory that is open until `close`: handles name it.

        Writers and `storage` may hold the memory, and its own descriptor, for longer.
        """
        segment = self.sampler.segment
        if self._end_attaching is None:
            self._end_attaching = weakref.finalize(self, segment.close_attach_fd)
            self._end_attaching.atexit = False  # children that the program waits for at its end may be about to attach
        return segment.attach_fd

    @property
    def seed(self) -> int:
        """The seed of the draws."""
        return self.sampler.segment.seed

    def unissued(self, keys: NDArray[np.int64]) -> int | None:
        """Returns the index of the first of `keys` that the buffer never issued."""
        return self.sampler.segment.unissued(keys)

    def batches(self, spec: StreamSpec) -> PrefetchIterator:
        """Returns a stream of batches; a native thread draws `prefetch` of them ahead."""
        return PrefetchIterator(self.sampler, spec)

    def staging(self, batch_size: int, prefetch: int, device: torch.device, pin: Pin | None) -> Staging | None:
        """Returns what takes batches to a CUDA device while the learner computes; None: each is copied by itself."""
        if pin == "off":
            return None
        copies = DeviceCopies(device)
        if pin == "ring":
            self.lock_pages(CudaRegistry(copies.device))
        return Staging(self.config, batch_size, prefetch, copies)

    def lock_pages(self, registry: CudaRegistry) -> PageLock:
        """Page-locks the whole memory for copies to devices, once, if the system allows it."""
        if self._page_lock is None:
            segment = self.sampler.segment
            self._page_lock = PageLock(self, segment.address, segment.nbytes, registry)
        return self._page_lock

    def before_fork(self) -> None:
        """Says that the child can write: waits for rows must not conclude that nobody else could."""
        self.sampler.segment.mark_shared()

    def in_child(self) -> None:
        """Forgets what is on its way from a device, and page-locked: that is the parent's."""
        self.sampler.forget_pending()
        self._page_lock = None

    def at_exit(self) -> None:
        """Has TD errors applied before a file is left."""
        if not self.sampler.segment.closed and self.sampler.segment.in_file:
            self.sampler.flush(time.monotonic_ns() + 4 * SLICE_NS)
            self._release_pages()

    @property
    def is_learning(self) -> bool:
        """Whether this process has drawn from the buffer."""
        return self.sampler.segment.learning

    def depart(self, seconds: float) -> None:
        """Has others count no more on this process, as owner (for so long) and as learner, until it draws again."""
        self.sampler.segment.depart(seconds)

    def close(self) -> None:
        """Does what `ReplayBuffer.close` does."""
        try:
            self.sampler.flush(time.monotonic_ns() + 4 * SLICE_NS)  # who holds the lock may have been stopped
        finally:
            self.sampler.delivery_log = None
            self._release_pages()
            segment = self.sampler.segment
            self.sampler.ended = self.sampler.ended or (not segment.closed and segment.stopped)
            segment.close()
            open_buffers.discard(self)

    def _release_pages(self) -> None:
        if self._page_lock is not None:
            self._page_lock.release()
