"""The shard on this process's own node, attached through shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.buffer.replay_buffer import ReplayBuffer, attached_here, local_sampler
from torchreplay.buffer.writer import Autoreset, Writer, streams_of
from torchreplay.errors import AttachError, Stopped
from torchreplay.ray.runtime.session import logger
from torchreplay.ray.sharded.batch_block import Layout
from torchreplay.ray.sharded.shard_keys import pack
from torchreplay.ray.sharded.shard_sampler import Answer, ShardReport, ShardSampler
from torchreplay.ray.sharded.shard_table import ShardEntry
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config
from torchreplay.segment.handle import Handle
from torchreplay.segment.waits import NEVER, Audience, Wait

if TYPE_CHECKING:
    from torchreplay._C import DrawnFrom
    from torchreplay.buffer.local_sampler import Into

T = TypeVar("T")

_GONE = (
    "the shard of this node is gone, and its rows with it: call writer() again for the one that takes its place, and "
    "start a new episode"
)


class ShardLost(RuntimeError):
    """The shard that a writer wrote to is gone, with its rows: make a new writer for the one that takes its place."""


class ShardWriter(Writer):
    """A writer of the shard on this node: an ordinary one, whose keys are the union's.

    Made by `ShardedReplay.writer()`. Its calls raise `ShardLost` some seconds after the shard's actor has died.
    """

    def __init__(
        self, segment: _C.Segment, config: Config, first_key: int, num_envs: int | None, autoreset: Autoreset
    ) -> None:
        super().__init__(segment, config, num_envs, autoreset, first_key)
        self._audience = Audience(segment, ("owners",))  # learners on the node may have it attached for a while yet

    def _refuse_closed_buffer(self) -> None:
        raise ShardLost(f"the ShardedReplay was closed, or {_GONE}")

    def _look_around(self) -> None:
        try:
            super()._look_around()
        except Stopped:
            raise ShardLost(_GONE) from None


class Gone(Exception):
    """The shard that was asked is not there any more."""


class ShardBuffer(ReplayBuffer):
    """A shard's buffer, as processes of its node write to it: keys are the union's."""

    number: int

    def writer(
        self, envs: Any = None, autoreset: Autoreset | None = None, *, num_envs: int | None = None
    ) -> ShardWriter:
        """Returns a writer whose keys are the union's, and which notices when the shard is gone."""
        sampler = local_sampler(self)
        return ShardWriter(sampler.segment, sampler.config, pack(self.number), *streams_of(envs, num_envs, autoreset))


class LocalShard:
    """One shard in this process's memory: what is drawn from it and fed back to it needs no message and no copy.

    The calling thread does both. Answers are there at once, and are taken as those of other shards are. They are
    cancelled once this process has let go of the shard.

    Raises:
        AttachError: It cannot be attached.
    """

    def __init__(self, number: int, handle: Handle) -> None:
        self.number = number
        self.buffer = attached_here(ShardBuffer, handle)
        self.buffer.number = number
        self._segment = local_sampler(self.buffer).segment
        self._candidates, self._base = ShardSampler(self.buffer, number), pack(number)

    @property
    def segment(self) -> _C.Segment:
        """The memory, for the native core."""
        return self._segment

    @property
    def alive(self) -> bool:
        """Whether the shard's actor is there."""
        return self._segment.census(False)["owners"] > 0

    @property
    def stopped(self) -> bool:
        """Whether the buffer was stopped; False where another thread has let go of it."""
        try:
            return self.buffer.stopped
        except RuntimeError:
            return False

    def own_writers(self, unused_count_as_others: bool) -> int:
        """Returns how many of its writers nobody but the calling thread uses.

        Those of this process that nobody has used yet may be another thread's: they count so if the caller says it.
        """
        try:
            census = self._segment.census(unused_count_as_others)
        except RuntimeError:  # closed by another thread
            return 0
        return census["writers"] - census["others_writing"]

    def sample(self, n: int, beta: float, out: Into = None) -> tuple[ReplayBatch | None, DrawnFrom | None]:
        """Draws a batch as a local buffer does, with its weights, and returns what it was drawn from.

        No batch: it cannot be drawn now, or this process has let go of the shard.
        """
        try:
            batch, told = self._segment.sample_told(n, beta, NEVER, out)
        except RuntimeError:
            if self._segment.closed:
                return None, None
            raise
        return (None, None) if batch is None else (self.with_base(batch), told)

    def with_base(self, batch: ReplayBatch) -> ReplayBatch:
        """Makes a batch's keys the union's."""
        if self._base:
            batch["key"] += self._base
        return batch

    def feed_back(self, keys: torch.Tensor, td: Any) -> bool:
        """Feeds back TD errors for keys of the union; returns whether all could be taken, else none is."""
        try:
            return self._segment.update(keys - self._base if self._base else keys, td)
        except (RuntimeError, TypeError, ValueError):  # whoever looks at each of them says why
            return False

    def settle(self) -> None:
        """Returns when all that was fed back is applied, also behind batches that are drawn ahead."""
        with suppress(RuntimeError):  # closed by another thread
            self._segment.settle(NEVER)

    def report(self) -> ShardReport | None:
        """Returns what it has to say of itself; None once its process is gone, or this one has let go of it."""
        with suppress(RuntimeError):
            if self.alive:
                return self._candidates.look()
        return None

    def look(self) -> Future[Answer]:
        """Says what there is, as the shard's actor does."""
        return self._answered(lambda: (self._candidates.look(), None))

    def draw(self, candidates: int, largest: float, layout: Layout, room: ReplayBatch | None) -> Future[Answer]:
        """Draws candidates as `Shard.draw` does, into the first rows of `room` where it is given."""
        out = None if room is None else _first(room, candidates)
        return self._answered(lambda: self._candidates.draw(candidates, largest, layout, out))

    def gather(self, keys: NDArray[np.int64], layout: Layout) -> Future[Answer]:
        """Finds items under keys of this shard's own, into a block."""
        return self._answered(lambda: self._candidates.gather(keys, layout))

    def update(self, keys: NDArray[np.int64], td: NDArray[np.float64]) -> Future[bool]:
        """Feeds back TD errors for keys of this shard's own; both were checked."""
        return self._answered(lambda: self._segment.update(keys, td))

    def close(self) -> None:
        """Detaches from the shard. Writers that are held keep the memory."""
        self.buffer.close()

    def _answered(self, work: Callable[[], T]) -> Future[T]:
        answer = Future[T]()
        try:
            if not self.alive:
                raise Gone("its process is gone")
            self._segment.settle(NEVER)
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(CancelledError() if self._segment.closed else error)
        return answer


class LocalAttachment:
    """Which shard of this process's node is attached, if one is.

    Args:
        lock: What its owner guards the entries with; it is re-entrant.
        entry: Returns the shard of this node, as far as this process knows, with the lock held; None: there is none.
        answers: Whether a shard's actor answers, by number; asked without the lock.
    """

    def __init__(
        self, lock: threading.RLock, entry: Callable[[], ShardEntry | None], answers: Callable[[int, Wait | None], bool]
    ) -> None:
        self.shard: LocalShard | None = None
        self._lock, self._entry, self._answers = lock, entry, answers
        self._refused = -1  # the number of the one that cannot be attached
        self._stopped = False  # what was attached was stopped

    def attach(self, wait: Wait | None = None) -> LocalShard | None:
        """Attaches the shard of this node, unless it is already; returns it, or None if there is none, or it is gone.

        `wait` says how long it may take to find out that it is gone; None: as long as it is silent.

        Raises:
            AttachError: It cannot be attached, and its actor is alive.
            ReplayTimeout: It takes too long.
        """
        with self._lock:
            entry, shard = self._entry(), self.shard
            if entry is None or (shard is not None and shard.number == entry.number):
                return shard
            self.release()
            try:
                self.shard = LocalShard(entry.number, entry.handle)
                return self.shard
            except AttachError as error:
                refusal = error
        if self._answers(entry.number, wait):
            raise refusal
        return None

    def try_attach(self, wait: Wait | None = None) -> bool:
        """Does what `attach` does, once for a shard that cannot be attached, and returns whether it is."""
        with self._lock:
            entry = self._entry()
        if entry is None or entry.number == self._refused:
            return False
        try:
            return self.attach(wait) is not None
        except AttachError as error:
            self._refused = entry.number
            logger.warning("shard %d is on this node, and draws from it go through Ray: %s", entry.number, error)
            return False

    @property
    def stopped(self) -> bool:
        """Whether the buffer was stopped, as the memory of the one that is attached, or was, has it."""
        shard = self.shard
        return self._stopped or (shard is not None and shard.stopped)

    def release(self) -> None:
        """Lets go of it."""
        with self._lock:
            shard, self.shard = self.shard, None
        if shard is not None:
            self._stopped = self._stopped or shard.stopped
            shard.close()


def _first(batch: Any, n: int) -> Any:
    """Returns a batch over the memory of the first `n` items of another."""
    if isinstance(batch, dict):
        return type(batch)({name: _first(value, n) for name, value in batch.items()})
    return batch[:n]
