"""Saying that writers will come, so that nobody gives up waiting for them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from torchreplay._C import Segment


class WriterLease:
    """The announcement of `ReplayBuffer.expect_writers()`: it holds until closed, or until its process is gone."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._pid = os.getpid()
        self._id = segment.join_supervisor()

    def close(self) -> None:
        """No more writers will come. Idempotent."""
        if self._id and os.getpid() == self._pid and not self._segment.closed:
            self._segment.leave(self._id)
        self._id = 0

    def __enter__(self) -> WriterLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
