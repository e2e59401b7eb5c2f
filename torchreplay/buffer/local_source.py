"""`LocalSource`: how a process uses a `ReplayBuffer` that it has attached, until it closes it."""

from __future__ import annotations

import functools
import os
import secrets
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchreplay import _C
from torchreplay.buffer.base import BatchSource, Pin, StreamSpec
from torchreplay.buffer.group_iterator import GroupIterator
from torchreplay.buffer.local_sampler import LocalSampler
from torchreplay.buffer.pending_updates import PendingUpdates
from torchreplay.buffer.prefetch import DRAWS, PrefetchIterator, count_draws
from torchreplay.buffer.queue_iterator import QueueIterator
from torchreplay.cuda.copies import DeviceCopies
from torchreplay.cuda.pinned_memory import CudaRegistry, PageLock
from torchreplay.cuda.staging import Staging
from torchreplay.schema.config import Config
from torchreplay.schema.samplers import Fifo, counts_draws, takes_what_it_draws
from torchreplay.segment.process_hooks import open_buffers
from torchreplay.segment.waits import SLICE_NS, logger

if TYPE_CHECKING:
    from numpy.typing import NDArray


@functools.cache
def _mark_of(pid: int) -> str:
    """Returns what names this process, which has that number: a forked child has another."""
    return secrets.token_hex(8)


class LocalSource(LocalSampler, BatchSource):
    """What draws from a buffer and feeds back, what datasets use, and what is page-locked; it ends when it is closed.

    Args:
        segment: The buffer's memory.
        nonce: Its identity.
        config: What it was made of.
    """

    def __init__(self, segment: _C.Segment, nonce: int, config: Config) -> None:
        super().__init__(segment, nonce, config)
        self._page_lock: PageLock | None = None
        self._end_attaching: weakref.finalize[..., LocalSource] | None = None
        open_buffers.add(self)

    @property
    def seed(self) -> int:
        """The seed of the draws."""
        return self.segment.seed

    def unissued(self, keys: NDArray[np.int64]) -> int | None:
        """Returns the index of the first of `keys` that the buffer never issued."""
        return self.segment.unissued(keys)

    def epoch(self, begin: bool = False) -> tuple[int, int, int]:
        """Does what `BatchSource.epoch` says."""
        return self.segment.epoch(begin)

    def give_back(self, *drawn: dict[str, Any]) -> None:
        """Does what `BatchSource.give_back` says."""
        if not takes_what_it_draws(self.config.sampler) or self.segment.closed:
            return
        for batch in drawn:  # an item may be in several
            count_draws(self.segment, batch)
        for batch in drawn:
            self.segment.give_back(batch["key"])

    @property
    def drawn_here(self) -> str | None:
        """Does what `BatchSource.drawn_here` says."""
        return f"{self.nonce:x} {_mark_of(os.getpid())}" if takes_what_it_draws(self.config.sampler) else None

    def with_draws(self, drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Does what `BatchSource.with_draws` says."""
        if not counts_draws(self.config.sampler):
            return drawn
        return [batch | {DRAWS: self.segment.draws_of(batch["key"])} for batch in drawn]

    def held(self) -> dict[str, Any] | None:
        """Does what `BatchSource.held` says."""
        if not isinstance(self.config.sampler, Fifo):
            return None
        key, draws = self.segment.held_draws()
        return {"queue": self.nonce, "key": key, "draws": draws}

    def end_held(self, held: Iterable[dict[str, Any]]) -> None:
        """Does what `BatchSource.end_held` says. Items of another queue stay, and a warning says so."""
        if not isinstance(self.config.sampler, Fifo):
            return
        for of_one in held:
            if of_one["queue"] == self.nonce or self.segment.imports:  # which brought the rows of another one
                self.segment.end_draws(of_one["key"], of_one["draws"])
            elif len(of_one["key"]) and self.segment.head:
                logger.warning(
                    "a state says that %s items of a queue are done, and %s is another one: open or load that one "
                    "first",
                    f"{len(of_one['key']):,}",
                    self.config.called,
                )

    def go_on_from(self, held: Iterable[dict[str, Any]]) -> None:
        """Does what `BatchSource.go_on_from` says."""
        super().go_on_from(held)
        if isinstance(self.config.sampler, Fifo) and self.config.sampler.commit == "manual":
            self.segment.release(None)

    def batches(self, spec: StreamSpec) -> PrefetchIterator:
        """Returns a stream of batches; a native thread draws `prefetch` of them ahead."""
        if spec.groups is not None:
            return GroupIterator(self, spec)
        kind = QueueIterator if isinstance(self.config.sampler, Fifo) else PrefetchIterator
        return kind(self, spec)

    def staging(
        self,
        batch_size: int,
        prefetch: int,
        device: torch.device,
        pin: Pin | None,
        budget: Mapping[str, int] | None = None,
    ) -> Staging | None:
        """Returns what takes batches to a CUDA device while the learner computes; None: each is copied by itself."""
        if pin == "off" or isinstance(self.config.sampler, Fifo):  # the last batch of a queue may be shorter
            return None
        copies = DeviceCopies(device)
        if pin == "ring":
            self.lock_pages(CudaRegistry(copies.device))
        return Staging(self.config, batch_size, prefetch, copies, None if budget is None else self.limits(budget))

    def lock_pages(self, registry: CudaRegistry) -> PageLock:
        """Page-locks the whole memory for copies to devices, once, if the system allows it."""
        if self._page_lock is None:
            self._page_lock = PageLock(self, self.segment.address, self.segment.nbytes, registry)
        return self._page_lock

    @property
    def attach_fd(self) -> int:
        """A descriptor of the memory that is open until `close`: handles name it.

        Writers and `storage` may hold the memory, and its own descriptor, for longer.
        """
        if self._end_attaching is None:
            self._end_attaching = weakref.finalize(self, self.segment.close_attach_fd)
            self._end_attaching.atexit = False  # children that the program waits for at its end may be about to attach
        return self.segment.attach_fd

    def before_fork(self) -> None:
        """Says that the child can write: waits for rows must not conclude that nobody else could."""
        self.segment.mark_shared()

    def in_child(self) -> None:
        """Forgets what is on its way from a device, and page-locked: that is the parent's."""
        self.pending = PendingUpdates(self.segment.update)
        self._page_lock = None

    def at_exit(self) -> None:
        """Has TD errors applied before a file is left."""
        if not self.segment.closed and self.segment.in_file:
            self.flush(time.monotonic_ns() + 4 * SLICE_NS)
            self._release_pages()

    @property
    def is_learning(self) -> bool:
        """Whether this process has drawn from the buffer."""
        return self.segment.learning

    def depart(self, seconds: float) -> None:
        """Has others count no more on this process, as owner (for so long) and as learner, until it draws again."""
        self.segment.depart(seconds)

    def close(self) -> None:
        """Does what `ReplayBuffer.close` does."""
        try:
            self.flush(time.monotonic_ns() + 4 * SLICE_NS)  # who holds the lock may have been stopped
        finally:
            self.delivery_log = None
            self._release_pages()
            self.ended = self.ended or (not self.segment.closed and self.segment.stopped)
            self.segment.close()
            open_buffers.discard(self)

    def _release_pages(self) -> None:
        if self._page_lock is not None:
            self._page_lock.release()
