"""`SampleRequestStream`: batches from all shards one after the other, with some under way ahead."""

from __future__ import annotations

from collections import deque
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from torchreplay import _C
from torchreplay.buffer.base import StreamSpec
from torchreplay.buffer.replay_buffer import local_sampler
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.errors import ReplayTimeout
from torchreplay.ray.sharded.local_shard import LocalShard
from torchreplay.ray.sharded.sample_request import SampleRequest
from torchreplay.ray.sharded.sampling_rounds import SamplingRounds
from torchreplay.ray.sharded.shard_feedback import ShardFeedback
from torchreplay.schema.batch import ReplayBatch
from torchreplay.segment.waits import SLICE_NS, Wait

if TYPE_CHECKING:
    from torchreplay._C import DrawnFrom
    from torchreplay.buffer.local_sampler import Into


class SampleRequestStream:
    """Batches of a `ShardedReplay` one after the other, `prefetch` rounds being under way ahead of the one asked for.

    Calls reach a shard in the order in which they were made: what is fed back while a round is under way does not
    change its batch.
    """

    def __init__(self, rounds: SamplingRounds, feedback: ShardFeedback, spec: StreamSpec) -> None:
        self._rounds, self._feedback, self._spec = rounds, feedback, spec
        self._batch_size, self._left = spec.batch_size, spec.count
        self._prefetch, self._timeout, self._waiting = spec.prefetch, spec.timeout, spec.waiting
        # Nanoseconds for which the native core alone waits for a batch. A timeout is counted from then on.
        self._patience = SLICE_NS if spec.timeout is None else int(min(SLICE_NS, spec.timeout * 1e9 / 20))
        self._finishes = spec.staging is None or not spec.prefetch
        self._ahead: deque[SampleRequest] = deque()
        self._here: tuple[LocalShard, _C.Prefetcher] | None = None  # the only shard, and what draws from it ahead
        self._ordered = 0  # of that, and not taken
        self._draws: tuple[LocalShard, _C.DrawsHere] | None = None  # from the shard here, where there are others
        self._drawn_from: DrawnFrom = (0.0, 0, 0.0, 0.0)  # of the batch handed out last

    @property
    def drawn_from(self) -> TreeSummary:
        """What the weights of the batch handed out last were computed from."""
        return TreeSummary(*self._drawn_from)

    def __iter__(self) -> SampleRequestStream:
        return self

    def __next__(self) -> ReplayBatch:
        """Returns the next batch, if there were fewer than `count`.

        Raises:
            ReplayTimeout, WouldBlockForever, Stopped: As `sample` does.
        """
        if self._rounds.shards.closed:
            self._rounds.shards.require_open()
        self._feedback.apply_arrived()
        if self._left is None and (batch := self._take_natively()) is not None:
            return batch
        if self._left is not None and self._left <= 0:
            self.close()
            self._rounds.shards.report(last=True)
            raise StopIteration
        waiting, self._waiting = self._waiting, Wait
        wait = waiting(self._rounds.shards, self._timeout)
        try:
            while (batch := self._take(wait)) is None:
                self._rounds.pause(self._batch_size, wait)
        finally:
            wait.end()
        if self._left is not None:
            self._left -= 1
        return batch

    def drawn(self) -> list[dict[str, Any]]:
        """Returns nothing: rounds under way cannot be named, and have not been drawn."""
        return []

    @property
    def ready(self) -> int:
        """How many batches are drawn ahead, of the only shard.

        The caller wants to know how many lie in the memory of the staging, to copy the next one to the device from
        there. A round of several shards does not count: its batch is not in that memory before it is handed out.
        """
        return 0 if self._here is None else self._here[1].ready()

    @property
    def answered(self) -> int:
        """How many of the next batches are made ahead."""
        return self.ready + sum(1 for _ in takewhile(lambda ahead: ahead.is_answered, self._ahead))

    def close(self) -> None:
        """Forgets the rounds under way."""
        self._leave()
        draws, self._draws = self._draws, None
        if draws is not None:
            draws[1].close()
        while self._ahead:
            self._ahead.pop().give_up()

    def _leave(self) -> None:
        """Draws ahead from the only shard no more; batches that were drawn have not been."""
        here, self._here, self._ordered = self._here, None, 0
        if here is not None:
            here[1].close()

    def _take_here(self, wait: Wait) -> ReplayBatch | None:
        """Returns the next batch of the only shard, as a local buffer gives it; None: shards are to be asked."""
        here = self._rounds.shards.alone()
        if self._here is not None and self._here[0] is not here:
            self._leave()
        if here is None:
            return None
        if self._prefetch == 0:
            drawn = self._rounds.draw_here(self._batch_size, None, self._place(here))
            if drawn is None:
                return None
            batch, told = drawn
        else:
            self._here = self._here or (here, _C.Prefetcher(local_sampler(here.buffer).segment, self._batch_size))
            ahead = self._here[1]
            while self._ordered < self._most:
                ahead.order(self._rounds.exponent(None, self._ordered), self._place(here))
                self._ordered += 1
            while (taken := ahead.take(wait.slice_ns())) is None:
                if wait.expired:
                    raise ReplayTimeout(
                        f"no batch of {self._batch_size:,} in time: the buffer's lock does not come free"
                    )
            if taken.__class__ is not ReplayBatch:  # why there is none is found out by a round of calls
                self._leave()
                return None
            self._ordered -= 1
            batch, told = here.with_base(taken), ahead.drawn_from
            self._rounds.count(batch)
        self._drawn_from = told
        return self._rounds.finished(batch, self._finishes)

    def _place(self, here: LocalShard) -> Into:
        budget = self._spec.budget
        return local_sampler(here.buffer).limits(budget) if budget else self._spec.place()

    @property
    def _most(self) -> int:
        return self._prefetch + 1 if self._left is None else min(self._left, self._prefetch + 1)

    def _take_natively(self) -> ReplayBatch | None:
        """Returns the next batch where it comes soon, and another round can be ordered without a look at anything.

        Else it returns None, and `_take` does the same at length.
        """
        rounds, ahead, spec, n = self._rounds, self._ahead, self._spec, self._batch_size
        shards = rounds.shards
        if not ahead or len(ahead) != self._prefetch or (union := shards.union_now) is None or not union.drawable:
            return None
        first, limiter, here = ahead[0], shards.limiter, shards.local.shard is not None
        if not limiter.covers(n):
            return None
        beta, draws = rounds.exponent(None, len(ahead)), self._draws_here()
        ahead.append(rounds.ask(n, limiter, union, beta, here, spec.place(), spec.budget, draws))
        shards.report()
        batch = first.made_within(self._patience)
        if batch is None or not ahead or ahead[0] is not first:
            return None
        ahead.popleft()
        self._drawn_from = first.drawn_from
        return rounds.taken(first, batch, self._finishes)

    def _take(self, wait: Wait) -> ReplayBatch | None:
        if not self._ahead:
            if not self._rounds.shards.limiter.covers(self._batch_size):
                self._rounds.admit(self._batch_size, wait)
            if (batch := self._take_here(wait)) is not None:
                return batch
            self._rounds.admit(self._batch_size, wait)
        self._order(wait)
        if self._ahead[-1].calls:  # they travel while this batch is made, and while its user works
            self._rounds.shards.calls.fetch(
                call for later in islice(self._ahead, 1, None) for call in later.calls.values()
            )
        first = self._ahead[0]
        first.await_answers(wait)  # one that is late stays under way
        try:
            batch = self._rounds.take(first, wait, self._finishes)
        finally:
            if self._ahead and self._ahead[0] is first:  # a signal handler may have closed the stream
                self._ahead.popleft()
        if batch is not None:
            self._drawn_from = first.drawn_from
        return batch

    def _draws_here(self) -> _C.DrawsHere | None:
        """Returns what draws ahead from the shard here, in the order of the batches."""
        here = self._rounds.shards.local.shard
        if here is None or not self._prefetch:
            return None
        if self._draws is None or self._draws[0] is not here or self._draws[1].is_closed:
            self._draws = here, _C.DrawsHere(here.segment)
        return self._draws[1]

    def _order(self, wait: Wait) -> None:
        rounds, spec, ahead, n = self._rounds, self._spec, self._ahead, self._batch_size
        while not ahead or len(ahead) < self._most:
            union = rounds.shards.union_now
            if ahead and (rounds.shards.alone() is not None or not rounds.admits(n, union)):
                break
            beta, draws = rounds.exponent(None, len(ahead)), self._draws_here()
            ahead.append(rounds.begin(n, wait, beta, spec.place(), spec.budget, draws, union))
        rounds.shards.report()
