"""A shard of another node, written to through Ray by processes whose own node has none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchreplay.buffer.writer import Autoreset
from torchreplay.errors import AttachError, ReplayLost
from torchreplay.ray.remote.remote_buffer import RemoteBuffer, RemoteWriter
from torchreplay.ray.sharded.local_shard import ShardLost
from torchreplay.ray.sharded.shard_table import ShardEntry
from torchreplay.segment.waits import Wait


@contextmanager
def _losses_of_a_shard() -> Iterator[None]:
    """Says what it means for a writer of a union that one shard is gone."""
    try:
        yield
    except ReplayLost as error:
        raise ShardLost(
            f"the shard that this writer wrote to is gone, and its rows with it: call writer() again for another one, "
            f"and start a new episode ({error})"
        ) from None


class RemoteShardWriter(RemoteWriter):
    """A writer of another node's shard, made by `ShardedReplay.writer()`: a remote one, whose calls return no keys.

    They raise `ShardLost` some seconds after the shard's actor, or its node, has died.
    """

    def end_episode(self, mask: Any = None) -> None:
        """Ends the running episode, as `RemoteWriter.end_episode` does."""
        with _losses_of_a_shard():
            super().end_episode(mask)

    def flush(self) -> None:
        """Returns when everything written so far is in the shard, as `RemoteWriter.flush` does."""
        with _losses_of_a_shard():
            super().flush()

    def _look(self, stalled: bool, waited: float, pages: bool = False) -> None:
        with _losses_of_a_shard():
            super()._look(stalled, waited, pages)


class RemoteShard(RemoteBuffer):
    """The buffer of a shard on another node."""

    _listeners = ("owners",)  # learners on its node may have it attached for a while after its actor has died
    _writer_kind = RemoteShardWriter

    def __init__(self, entry: ShardEntry) -> None:
        super().__init__(entry.handle)
        self.number = entry.number

    def writer(
        self, envs: Any = None, autoreset: Autoreset | None = None, *, num_envs: int | None = None
    ) -> RemoteWriter:
        """Returns a writer, as `RemoteBuffer.writer` does; `ShardLost` where the shard is gone."""
        with _losses_of_a_shard():
            return super().writer(envs, autoreset, num_envs=num_envs)


class RemoteAttachment:
    """Which shard of another node this process writes to, if it does: the same for all its writers.

    Args:
        choose: Returns the entry of the shard with this number, or of another one where that is gone; None: none
            answers.
        answers: Whether a shard's actor answers, by number.
    """

    def __init__(self, choose: Callable[[int], ShardEntry | None], answers: Callable[[int, Wait | None], bool]) -> None:
        self.shard: RemoteShard | None = None
        self._choose, self._answers = choose, answers
        self._choosing = threading.RLock()
        self._stopped = False  # what was let go of was stopped

    def attach(self) -> RemoteShard | None:
        """Returns the shard to write to, chosen anew where the one before is gone; None: it is gone in this moment.

        Raises:
            AttachError: It cannot be reached, and its actor is alive.
        """
        with self._choosing:
            before = self.shard
            if before is not None and before.ending is not None:
                self._answers(before.number, None)  # if its actor has died, everyone hears of that
                before = None
            entry = self._choose(-1 if before is None else before.number)
            if entry is None:
                return None
            if before is not None and before.number == entry.number:
                return before
            shard = RemoteShard(entry)
            try:
                shard.connect()
            except AttachError:
                if self._answers(entry.number, None):
                    raise
                return None
            self.shard = shard
            return shard

    @property
    def stopped(self) -> bool:
        """Whether the buffer was stopped, as far as the shard's node has said so."""
        shard = self.shard  # another thread may let go of it
        return self._stopped or (shard is not None and _was_stopped(shard))

    def release(self) -> None:
        """Lets go of it. Rows that its writers have written are sent all the same."""
        shard, self.shard = self.shard, None
        if shard is not None:
            self._stopped = self._stopped or _was_stopped(shard)
            shard.close()


def _was_stopped(shard: RemoteShard) -> bool:
    return shard.ending is not None and not isinstance(shard.ending, ReplayLost)
