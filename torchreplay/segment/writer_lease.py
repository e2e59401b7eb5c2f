"""Saying that writers will come, so that nobody gives up waiting for them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchreplay.segment.closeable import Closeable
from torchreplay.segment.process_hooks import open_leases

if TYPE_CHECKING:
    from torchreplay._C import Segment


class WriterLease(Closeable):
    """The announcement of `ReplayBuffer.expect_writers()`: it holds until closed, or until its process is gone."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._pid = os.getpid()
        self._id = segment.join_supervisor()
        open_leases.add(self)

    def close(self) -> None:
        """No more writers will come. Idempotent."""
        if self._id and os.getpid() == self._pid and not self._segment.closed:
            self._segment.leave(self._id)
        self._id = 0
