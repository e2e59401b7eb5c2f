"""Which weights the explorers of pools act on, from the tables that pools keep in shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from torchreplay import _C
from torchreplay.monitoring.advice import WeightsInUse
from torchreplay.monitoring.discovery import NoSuchBuffer, SharedFile, shared_files
from torchreplay.segment.closeable import Closeable
from torchreplay.workers.explorer_stats import explorer_stats
from torchreplay.workers.worker_table import read_entries

SCAN_SECONDS = 20.0
"""Between two looks for pools and weights: each goes through all open files of this user."""


class ExplorerWeights(Closeable):
    """The pools and shared weights of this user on this machine, open for reading. A context, which closes them."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._scanned = -SCAN_SECONDS
        self._tables: list[int] = []
        self._published: list[tuple[frozenset[int], int]] = []  # the processes that have them, and a descriptor

    def of(self, writers: set[int]) -> tuple[WeightsInUse, ...]:
        """Returns what the explorers among these processes act on."""
        if time.monotonic() - self._scanned >= SCAN_SECONDS:
            self._scan()
            self._scanned = time.monotonic()
        found = [weights for fd in self._tables for weights in self._entries(fd)]
        return tuple(weights for weights in found if weights.pid in writers)

    def _scan(self) -> None:
        self.close()
        for file in shared_files():
            if file.kind == "buffer":
                continue
            try:
                fd = self._opened(file)
            except NoSuchBuffer:  # gone meanwhile
                continue
            if file.kind == "weights":
                self._published.append((frozenset(pid for pid, _ in file.holders), fd))
            else:
                with suppress(ValueError):  # being made just now, or of another version of torchreplay
                    read_entries(fd)
                    self._tables.append(fd)

    def _opened(self, file: SharedFile) -> int:
        fd = file.open()
        self._open.callback(os.close, fd)
        return fd

    def _entries(self, fd: int) -> Iterator[WeightsInUse]:
        for index, entry in enumerate(read_entries(fd)):
            stats = explorer_stats(index, entry)
            published = self._newest(stats.pid)
            yield WeightsInUse(stats.index, stats.pid, stats.weight_version, published, stats.heartbeat_age)

    def _newest(self, pid: int) -> int | None:
        """Returns the newest version of the weights that a process has; None where it has none, or several."""
        held = [fd for pids, fd in self._published if pid in pids]
        try:
            return _C.published_version(held[0]) if len(held) == 1 else None
        except ConnectionError:  # of another version of torchreplay
            return None

    def close(self) -> None:
        """Lets go of all memory. Idempotent."""
        self._open.close()
        self._tables, self._published = [], []
