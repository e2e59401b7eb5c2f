"""`SampleRequest`: how a batch comes about from the candidates of all shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.errors import ReplayTimeout
from torchreplay.ray.sharded.batch_block import Chosen, Layout, RaggedItems, keep
from torchreplay.ray.sharded.global_distribution import GlobalDistribution, candidates, chosen
from torchreplay.ray.sharded.rate_limiter import Round
from torchreplay.ray.sharded.shard_client import Answers, ShardClient
from torchreplay.ray.sharded.shard_sampler import Answer
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import Sampler
from torchreplay.segment.waits import Wait

LEAST_SLACK: Final = 1 / 64
"""Candidates asked for beyond a shard's share, so that it may have grown since the last answer."""


class SampleRequest:
    """One batch under way: every shard was asked once for its total and for candidates drawn from just that.

    Those totals alone decide how many items the batch takes of each shard. So P(i) is the item's leaf divided by the
    sum of all leaves, each shard being as it was when its candidates were drawn. A shard whose total has outgrown its
    candidates is asked again, and its first answer is forgotten. Only the totals decide that, never the items or random
    numbers. `docs/sharding_in_depth.md` has the derivation.

    Args:
        round: What counts it, with the number of its items, while it is under way.
        slack: By which share a shard's part of the total may have grown since it was heard last.
        here: Whether the shard that is attached draws its candidates here, right into the batch where that can be.
        place: The batch, whose tensors are overwritten; None: it is made.
    """

    drawn_from: TreeSummary  # what the batch's weights were computed from, once it is finished

    def __init__(
        self,
        shards: ShardClient,
        layout: Layout,
        round: Round,
        chance: np.random.Generator,
        slack: float,
        here: bool = False,
        place: ReplayBatch | None = None,
    ) -> None:
        self.round, self.n = round, (n := round.n)
        self.asked_again = self.offered = False  # offered: to a thread, which is to make it
        self._lock, self._claimed, self._given_up = threading.RLock(), False, False
        # What the thread has come to: what shards have answered, and the batch, if no shard is to be asked again.
        self._made: tuple[Answers, ReplayBatch | None] | BaseException | None = None
        self._bell = threading.Lock()  # let go of once there is that
        self._bell.acquire()
        self._shards, self._layout, self._chance = shards, layout, chance
        into = here and not layout.is_ragged
        self._batch = layout.new_batch(n) if into and place is None else place
        self._has_place = place is not None
        self._room = self._batch if into else None
        numbers = sorted(shards.table.entries)
        known = [shards.figures[k].drawn.total if k in shards.figures else 0.0 for k in numbers]
        asked = candidates(known, n, slack)
        # What the answers will be got by, by number.
        self.calls = shards.order(dict(zip(numbers, asked, strict=True)), layout, self._room)

    def make(self, sampler: Sampler, beta: float, wait: Wait, budget: Mapping[str, int] | None) -> None:
        """Does ahead of `finish` what changes nothing but the batch: for a thread. It does not raise.

        `wait` ends when nobody wants the batch any more.
        """
        if not self._claim():
            return
        try:
            answers, batch = self._shards.calls.collect(self.calls, wait), None
            with self._lock:
                if not self._given_up and not self._short(answers):
                    batch = self._batch_of(answers, sampler, beta, budget)
            self._made = answers, batch
        except BaseException as error:
            self._made = error
        self._bell.release()

    @property
    def is_made(self) -> bool:
        """Whether the thread has done its part."""
        return self._made is not None

    def give_up(self) -> None:
        """Has no thread write to the batch's place any more: it is another batch's."""
        if self._has_place:
            with self._lock:
                self._given_up = True

    def finish(
        self, sampler: Sampler, beta: float, wait: Wait, budget: Mapping[str, int] | None = None
    ) -> ReplayBatch | None:
        """Returns the batch, or the part of it within a budget; None if no shard has an item that can be drawn.

        Raises as `ShardClient.hear` does.
        """
        answers, batch = (self._shards.calls.collect(self.calls, wait), None) if self._claim() else self._result(wait)
        self._shards.take_in(answers)
        if batch is None:
            batch = self._batch_of(self._complete(answers, wait), sampler, beta, budget)
        self.calls, self._made = {}, None
        return batch

    def _claim(self) -> bool:
        """Returns whether the caller is the one that collects the answers."""
        with self._lock:
            claimed, self._claimed = self._claimed, True
        return not claimed

    def _result(self, wait: Wait) -> tuple[Answers, ReplayBatch | None]:
        """Returns what the thread has come to, or raises it."""
        began = time.monotonic()
        while (made := self._made) is None:
            self._bell.acquire(timeout=wait.slice_ns() * 1e-9)
            if self._made is None and wait.expired:
                silent = {n: call for n, call in self.calls.items() if not self._shards.calls.are_there([call])}
                raise ReplayTimeout(self._shards.calls.silence(silent, began))
        if isinstance(made, BaseException):
            raise made
        return made

    def _batch_of(
        self, answers: Answers, sampler: Sampler, beta: float, budget: Mapping[str, int] | None
    ) -> ReplayBatch | None:
        numbers = [number for number, (figures, _) in answers.items() if figures.drawn.total > 0]
        if not numbers:
            return None
        # The shard that drew into the batch comes first.
        numbers.sort(key=lambda number: (answers[number][1] is not None, number))
        union = GlobalDistribution(tuple(answers[number][0].drawn for number in numbers))
        counts = union.counts(self.n, self._chance.random(self.n))
        parts = [answers[number] for number in numbers]
        batch, counts = (
            self._with_values(parts, counts, budget) if self._layout.is_ragged else self._fixed(parts, counts)
        )
        union.weigh(batch, np.repeat(union.shares, counts), beta, sampler)
        self.drawn_from = TreeSummary(union.total, union.drawable, union.smallest, beta)
        return batch

    # They put the items together: so many of each answer's candidates, each set of so many being equally likely. They
    # return how many items of each there are.

    def _with_values(
        self, answers: list[Answer], counts: NDArray[np.int64], budget: Mapping[str, int] | None
    ) -> tuple[ReplayBatch, NDArray[np.int64]]:
        parts: list[Chosen] = []
        for (figures, block), count in zip(answers, counts.tolist(), strict=True):
            assert block is not None  # where the total is more than 0, candidates were drawn
            parts.append((block, figures.candidates, chosen(self._chance, figures.candidates, count)))
        if budget:  # items of one shard lie together: without another order its values would be left out each time
            parts = self._layout.within(parts, budget, self._chance.permutation(self.n))
        return self._layout.joined(parts), np.array([len(which) for _, _, which in parts], np.int64)

    def _fixed(self, answers: list[Answer], counts: NDArray[np.int64]) -> tuple[ReplayBatch, NDArray[np.int64]]:
        (figures, block), *others = answers
        lone = None if others or self._batch is not None else block
        if isinstance(lone, np.ndarray) and lone.flags.writeable and figures.candidates == self.n:
            return self._layout.batch_over(torch.from_numpy(lone), self.n), counts  # none of Ray's object store
        batch = self._layout.new_batch(self.n) if self._batch is None else self._batch
        if block is None and not others:  # if only that shard has items, they are the batch
            return batch, counts
        room, at = self._layout.item_bytes(batch), 0
        for (figures, block), count in zip(answers, counts.tolist(), strict=True):
            which = chosen(self._chance, figures.candidates, count)
            if block is None:
                keep(room, which)
            elif not isinstance(block, RaggedItems):
                self._layout.copy(block, figures.candidates, which, room, at)
            at += count
        return batch, counts

    def _short(self, answers: Answers) -> dict[int, int]:
        """Returns how many items may come from those shards whose candidates might not be enough."""
        numbers = sorted(answers)
        union = GlobalDistribution(tuple(answers[number][0].drawn for number in numbers))
        if not union.total:
            return {}
        most = zip(numbers, union.most(self.n), strict=True)
        return {number: items for number, items in most if items > answers[number][0].candidates}

    def _complete(self, answers: Answers, wait: Wait) -> Answers:
        """Asks those shards again whose candidates might not be enough, until all are."""
        tries = 0
        while short := self._short(answers):
            asked = {number: min(self.n, (items + 3) << tries) for number, items in short.items()}
            self.asked_again, tries = True, tries + 1
            answers = {number: answer for number, answer in answers.items() if number not in short}
            answers |= self._shards.hear(self._shards.order(asked, self._layout, self._room), wait)
        return answers
