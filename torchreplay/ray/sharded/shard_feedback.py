"""`ShardFeedback`: TD errors on their way to their shards."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.buffer.pending_updates import PendingUpdates, require_one_each
from torchreplay.cuda.copies import to_host
from torchreplay.loading.mixture import checked_errors
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.ray.sharded.shard_keys import as_keys, unpack
from torchreplay.ray.sharded.shard_wire import ShardReply
from torchreplay.schema.batch import ReplayBatch, keys_of

IN_FLIGHT: Final = 32
"""Calls to shards that have not been answered; the next one waits for the oldest."""


class ShardFeedback:
    """What a process feeds back to the shards. Batches of theirs are signed with `nonce`."""

    def __init__(self, shards: ShardClient, nonce: int) -> None:
        self._shards, self._nonce = shards, nonce
        self._deferred = PendingUpdates(self._apply)
        self._calls: deque[tuple[int, int, Any]] = deque()  # shard, number of TD errors, answer to come
        # Held while answers are taken. It is re-entrant: a signal handler that saves may take answers, too.
        self._lock = threading.RLock()

    def send(self, batch_or_keys: ReplayBatch | Any, td: Any) -> None:
        """Does what `ShardedReplay.update_priorities` does."""
        if self._feed_back_at_once(batch_or_keys, td):
            return
        keys = self.checked_keys(batch_or_keys)
        if isinstance(td, torch.Tensor) and td.is_cuda:
            require_one_each(td, len(keys))
            self.require_issued(keys)
            self._deferred.add(torch.from_numpy(keys.copy()), to_host(td))
            self._deferred.apply_arrived()
            return
        errors = checked_errors("the TD errors", td, len(keys))
        self.require_issued(keys)
        try:
            self._deferred.flush()
        finally:
            self._send(keys, errors)

    def _feed_back_at_once(self, batch_or_keys: ReplayBatch | Any, td: Any) -> bool:
        """Has the native core feed back to all shards, or to the only one, as to a buffer; returns whether it could."""
        if self._deferred.waiting or (isinstance(td, torch.Tensor) and td.is_cuda):
            return False
        if (union := self._shards.union_now) is not None:
            sent = union.feed_back(batch_or_keys, td, self._nonce)
            if sent is None:  # something is wrong: `send` finds out what
                return False
            self._calls.extend(sent)
            if len(self._calls) >= IN_FLIGHT:
                self.hear(IN_FLIGHT // 2)
            return True
        here = self._shards.alone()
        keys = keys_of(batch_or_keys, self._nonce) if isinstance(batch_or_keys, dict) else batch_or_keys
        if here is None or not isinstance(keys, torch.Tensor):
            return False
        if self._calls:
            self.hear(0)
        return here.feed_back(keys, td)

    def apply_arrived(self) -> None:
        """Sends those TD errors that have come from a device.

        Raises:
            ValueError: Some are NaN or infinite: they are dropped.
        """
        if self._deferred.waiting:
            self._deferred.apply_arrived()

    def flush(self) -> None:
        """Does what `ShardedReplay.flush` does."""
        try:
            self._deferred.flush()
        finally:
            self.hear(0)
            if (here := self._shards.local.shard) is not None:
                here.settle()

    def _apply(self, keys: torch.Tensor, td: torch.Tensor) -> None:
        self._send(keys.numpy(), checked_errors("the TD errors", td, len(keys)))

    def _send(self, keys: NDArray[np.int64], errors: NDArray[np.float64]) -> None:
        numbers, own = unpack(keys)
        for number in np.flatnonzero(np.bincount(numbers)).tolist():
            mine = numbers == number
            call = self._shards.update(number, own[mine], errors[mine])
            if call is None:
                self._shards.coordinator.tell("dropped", int(mine.sum()))
            else:
                self._calls.append((number, int(mine.sum()), call))
        self.hear(IN_FLIGHT)

    def hear(self, most: int) -> None:
        """Waits until at most so many calls are unanswered."""
        with self._lock:
            while len(self._calls) > most:
                oldest = number, count, call = self._calls[0]  # there until it is answered, for a handler to wait for
                if isinstance(call, _C.Reply):
                    if call.is_well:
                        self._take(oldest)
                        continue
                    call = ShardReply(call, None)
                try:
                    answers = self._shards.calls.collect({number: call})
                except Exception:
                    self._take(oldest)  # it is said once
                    raise
                if self._take(oldest) and not answers:
                    self._shards.coordinator.tell("dropped", count)

    def _take(self, oldest: tuple[int, int, Any]) -> bool:
        """Takes a call that has been answered out; returns False if a signal handler was faster."""
        try:
            self._calls.remove(oldest)
        except ValueError:
            return False
        return True

    def checked_keys(self, given: Any) -> NDArray[np.int64]:
        """Returns the keys, or those of a batch; ValueError if they are none, or of another buffer's batch."""
        if isinstance(given, dict):
            given = keys_of(given, self._nonce)
        return as_keys(given)

    def unissued(self, keys: NDArray[np.int64]) -> int | None:
        """Returns the index of the first key that names no row that any shard has or had."""
        numbers, own = unpack(keys)
        for fresh in (False, True):  # figures are of the last answer: newer keys are looked for once
            if fresh:
                self._shards.exchange()
            told, lost = self._shards.figures, self._shards.table.lost
            issued = np.zeros(max([*told, *(shard.number for shard in lost)], default=0) + 2, np.int64)
            issued[list(told)] = [figures.stats.rows_written for figures in told.values()]
            issued[[shard.number for shard in lost]] = 1 << 62
            bad = own >= issued[numbers.clip(-1, len(issued) - 1)]  # the last one is that of no shard
            if not bad.any():
                return None
        return int(bad.argmax())

    def require_issued(self, keys: NDArray[np.int64]) -> None:
        """Raises ValueError where a key names no row that any shard has or had."""
        index = self.unissued(keys)
        if index is not None:
            (number,), (row,) = unpack(keys[index : index + 1])
            raise ValueError(
                f"key {keys[index]} at index {index} was never issued by this buffer (shard {number}, row {row}); "
                f"nothing was applied"
            )
