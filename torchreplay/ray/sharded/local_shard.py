"""`LocalShard`: the shard on this process's own node, attached through shared memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from torchreplay.buffer.replay_buffer import ReplayBuffer, local_sampler
from torchreplay.buffer.writer import Autoreset
from torchreplay.ray.sharded.global_distribution import pack
from torchreplay.ray.sharded.messages import Answer, Gathered
from torchreplay.ray.sharded.shard_sampler import ShardSampler
from torchreplay.ray.sharded.shard_writer import ShardWriter
from torchreplay.schema.batch import ReplayBatch
from torchreplay.segment.handle import Handle

T = TypeVar("T")


class Gone(Exception):
    """The shard that was asked is not there any more."""


class Detached(Exception):
    """This process has let go of the shard that was asked, which may be there for others."""


class ShardBuffer(ReplayBuffer):
    """A shard's buffer, as processes of its node write to it: keys are the union's."""

    number: int

    def writer(self, num_envs: int | None = None, autoreset: Autoreset = "next_step") -> ShardWriter:
        """Returns a writer whose keys are the union's, and which notices when the shard is gone."""
        sampler = local_sampler(self)
        return ShardWriter(sampler.segment, sampler.config, pack(self.number), num_envs, autoreset)


class LocalShard:
    """One shard in this process's memory: what is drawn from it and fed back to it needs no message and no copy.

    A thread of its own does both, in the order of the calls, as the shard's actor does for learners on other nodes. It
    holds the interpreter lock only in between.

    Args:
        number: Of the shard.
        handle: Of its buffer.

    Raises:
        AttachError: It cannot be attached.

    Attributes:
        buffer: The shard's.
        number: Of the shard.
    """

    def __init__(self, number: int, handle: Handle) -> None:
        self.number = number
        self.buffer = cast(ShardBuffer, ShardBuffer.attach(handle))
        self.buffer.number = number
        self._segment = local_sampler(self.buffer).segment
        self._candidates = ShardSampler(self.buffer, number)
        self._hands = ThreadPoolExecutor(1, "torchreplay-nearby")

    @property
    def alive(self) -> bool:
        """Whether the shard's actor is there."""
        return self._segment.census(False)["owners"] > 0

    def own_writers(self, unused_count_as_others: bool) -> int:
        """Returns how many of its writers nobody but the calling thread uses.

        Args:
            unused_count_as_others: Whether those of this process that nobody has used yet may be another thread's.
        """
        try:
            census = self._segment.census(unused_count_as_others)
        except RuntimeError:  # closed by another thread
            return 0
        return census["writers"] - census["others_writing"]

    def draw(self, candidates: int, largest: float, room: ReplayBatch) -> Future[Answer]:
        """Draws candidates into the first rows of `room`; the answer has no block. Arguments as in `Shard.draw`."""
        return self._hand_over(lambda: self._draw(candidates, largest, room))

    def gather(self, keys: NDArray[np.int64]) -> Future[Gathered]:
        """Finds items under keys of this shard's own; the answer has them as a batch."""
        return self._hand_over(lambda: self._candidates.gather(keys))

    def update(self, keys: NDArray[np.int64], td: NDArray[np.float64]) -> Future[int]:
        """Feeds back TD errors for keys of this shard's own; both were checked. The answer is how many."""
        return self._hand_over(lambda: self._update(keys, td))

    def close(self) -> None:
        """Detaches from the shard; what is not done is not done any more. Writers that are held keep the memory."""
        self._hands.shutdown(wait=False, cancel_futures=True)
        self.buffer.close()

    def _draw(self, candidates: int, largest: float, room: ReplayBatch) -> Answer:
        self._candidates.raise_largest(largest)
        return self._candidates.draw(candidates, _first(room, candidates)), None

    def _update(self, keys: NDArray[np.int64], td: NDArray[np.float64]) -> int:
        self.buffer.update_priorities(keys, td)
        return len(keys)

    def _hand_over(self, work: Callable[[], T]) -> Future[T]:
        try:
            return self._hands.submit(self._while_alive, work)
        except RuntimeError as error:  # closed by another thread
            refusal = Future[T]()
            refusal.set_exception(Detached(str(error)))
            return refusal

    def _while_alive(self, work: Callable[[], T]) -> T:
        try:
            if self.alive:
                return work()
        except RuntimeError as error:
            if not self._segment.closed:
                raise
            raise Detached(str(error)) from None
        raise Gone("its process is gone")


def _first(batch: Any, n: int) -> Any:
    """Returns a batch over the memory of the first `n` items of another."""
    if isinstance(batch, dict):
        return type(batch)({name: _first(value, n) for name, value in batch.items()})
    return batch[:n]
