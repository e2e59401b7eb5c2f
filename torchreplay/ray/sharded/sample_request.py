"""Rounds: how a batch comes about from the candidates of all shards."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.cuda.staging import Staging
from torchreplay.ray.sharded.batch_block import Layout, keep
from torchreplay.ray.sharded.client import Answers, ShardClient
from torchreplay.ray.sharded.global_distribution import GlobalDistribution, candidates, chosen
from torchreplay.ray.sharded.shard_sampler import Answer
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import Sampler
from torchreplay.segment.waits import Wait

if TYPE_CHECKING:
    from torchreplay.ray.sharded.sampler import ShardedSampler

LEAST_SLACK: Final = 1 / 64
"""Candidates asked for beyond a shard's share, so that it may have grown since the last answer."""


class SampleRequest:
    """One batch under way: every shard was asked once for its total and for candidates drawn from just that.

    Those totals alone decide how many items the batch takes of each shard. So P(i) is the item's leaf divided by the
    sum of all leaves, each shard being as it was when its candidates were drawn. A shard whose total has outgrown its
    candidates is asked again, and its first answer is forgotten. Only the totals decide that, never the items or random
    numbers. `docs/sharding.md` has the derivation.

    Args:
        shards: The shards.
        layout: Of blocks.
        step: Its number.
        n: Items in the batch.
        chance: Its random numbers.
        slack: By which share a shard's part of the total may have grown since it was heard last.
        here: Whether the shard that is attached draws its candidates right into the batch.
        place: The batch, whose tensors are overwritten; None: it is made.
        rule: Number of the limiter that has admitted it.
    """

    drawn_from: TreeSummary  # what the batch's weights were computed from, once it is finished

    def __init__(
        self,
        shards: ShardClient,
        layout: Layout,
        step: int,
        n: int,
        chance: np.random.Generator,
        slack: float,
        here: bool = False,
        place: ReplayBatch | None = None,
        rule: int = 0,
    ) -> None:
        self.step, self.n, self.rule = step, n, rule
        self.asked_again = False
        self._shards, self._layout, self._chance = shards, layout, chance
        self._batch = layout.new_batch(n) if here and place is None else place
        self._room = self._batch if here else None
        numbers = sorted(shards.table.places)
        known = [shards.figures[k].drawn.total if k in shards.figures else 0.0 for k in numbers]
        asked = candidates(known, n, slack)
        self._calls = shards.order(dict(zip(numbers, asked, strict=True)), self._room)

    @property
    def calls(self) -> list[Any]:
        """What the answers will be got by."""
        return list(self._calls.values())

    def finish(self, sampler: Sampler, beta: float, wait: Wait) -> ReplayBatch | None:
        """Returns the batch; None if no shard has an item that can be drawn.

        Raises:
            ReplayTimeout: A shard does not answer in time.
            RuntimeError: A shard can never draw.
            Stopped: The buffer was stopped.
        """
        answers = self._complete(self._shards.hear(self._calls, wait), wait)
        self._calls = {}
        numbers = [number for number, (figures, _) in answers.items() if figures.drawn.total > 0]
        if not numbers:
            return None
        # The shard that drew into the batch comes first.
        numbers.sort(key=lambda number: (answers[number][1] is not None, number))
        union = GlobalDistribution(tuple(answers[number][0].drawn for number in numbers))
        counts = union.counts(self.n, self._chance.random(self.n))
        batch = self._layout.new_batch(self.n) if self._batch is None else self._batch
        parts = [answers[number] for number in numbers]
        if len(parts) > 1 or parts[0][1] is not None:  # if only that shard has items, they are the batch
            self._fill(batch, parts, counts)
        union.weigh(batch, np.repeat([part.total / union.total for part in union.parts], counts), beta, sampler)
        self.drawn_from = TreeSummary(union.total, union.drawable, union.smallest, beta)
        return batch

    def _fill(self, batch: ReplayBatch, answers: list[Answer], counts: NDArray[np.int64]) -> None:
        """Puts the items together: so many of each answer's candidates, each set of so many being equally likely."""
        room, at = self._layout.item_bytes(batch), 0
        for (figures, block), count in zip(answers, counts.tolist(), strict=True):
            which = chosen(self._chance, figures.candidates, count)
            if block is None:
                keep(room, which)
            else:
                self._layout.copy(block, figures.candidates, which, room, at)
            at += count

    def _complete(self, answers: Answers, wait: Wait) -> Answers:
        """Asks those shards again whose candidates might not be enough, until all are."""
        tries = 0
        while True:
            numbers = sorted(answers)
            union = GlobalDistribution(tuple(answers[number][0].drawn for number in numbers))
            if not union.total:
                return answers
            short = {
                number: min(self.n, (most + 3) << tries)
                for number, most in zip(numbers, union.most(self.n), strict=True)
                if most > answers[number][0].candidates
            }
            if not short:
                return answers
            self.asked_again, tries = True, tries + 1
            answers = {number: answer for number, answer in answers.items() if number not in short}
            answers |= self._shards.hear(self._shards.order(short, self._room), wait)


class SampleRequestStream:
    """Batches of a `ShardedReplay` one after the other, `prefetch` rounds being under way ahead of the one asked for.

    Calls reach a shard in the order in which they were made: what is fed back while a round is under way does not
    change its batch.

    Args:
        draws: What draws them.
        batch_size: Items in a batch.
        count: Batches; None for endlessly many.
        prefetch: Rounds under way ahead.
        timeout: Seconds to wait for each batch at most.
        waiting: How the wait for the first one looks.
        staging: What gives each batch its place; None: memory of its own.
    """

    drawn_from: TreeSummary  # what the weights of the batch handed out last were computed from

    def __init__(
        self,
        draws: ShardedSampler,
        batch_size: int,
        count: int | None,
        prefetch: int,
        timeout: float | None,
        waiting: type[Wait],
        staging: Staging | None = None,
    ) -> None:
        self._draws, self._batch_size, self._left, self._staging = draws, batch_size, count, staging
        self._prefetch, self._timeout, self._waiting = prefetch, timeout, waiting
        self._ahead: deque[SampleRequest] = deque()

    def __iter__(self) -> SampleRequestStream:
        return self

    def __next__(self) -> ReplayBatch:
        """Returns the next batch, if there were fewer than `count`.

        Raises:
            ReplayTimeout, WouldBlockForever, Stopped: As `sample` does.
        """
        self._draws.feedback.apply_arrived()
        if self._left is not None and self._left <= 0:
            self.close()
            self._draws.shards.report(last=True)
            raise StopIteration
        waiting, self._waiting = self._waiting, Wait
        wait = waiting(self._draws.shards, self._timeout)
        try:
            while (batch := self._take(wait)) is None:
                self._draws.pause(self._batch_size, wait)
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
        """0: no batch is made before it is asked for.

        The caller wants to know how many lie in the memory of the staging, to copy the next one to the device from
        there. A round whose answers have all come does not count: its batch is chosen from the candidates only when it
        is put together.
        """
        return 0

    @property
    def answered(self) -> int:
        """How many of the next rounds have all their answers."""
        count = 0
        for ahead in self._ahead:
            if not self._draws.shards.calls.are_there(ahead.calls):
                break
            count += 1
        return count

    def close(self) -> None:
        """Forgets the rounds under way."""
        while self._ahead:
            self._draws.forget(self._ahead.pop())

    def _take(self, wait: Wait) -> ReplayBatch | None:
        self._order(wait)
        # They travel while this batch is made, and while its user works.
        self._draws.shards.calls.fetch(call for later in islice(self._ahead, 1, None) for call in later.calls)
        first = self._ahead.popleft()
        batch = self._draws.take(first, None, wait, self._staging is None or not self._prefetch)
        if batch is not None:
            self.drawn_from = first.drawn_from
        return batch

    def _order(self, wait: Wait) -> None:
        most = self._prefetch + 1 if self._left is None else min(self._left, self._prefetch + 1)
        if not self._ahead:
            self._ahead.append(self._draws.order(self._batch_size, wait, self._place()))
        while len(self._ahead) < most and self._draws.admits_now(self._batch_size):
            self._ahead.append(self._draws.begin(self._batch_size, wait, self._place()))
        self._draws.shards.report()

    def _place(self) -> ReplayBatch | None:
        return None if self._staging is None else self._staging.place()
