"""`SampleRequest`: how a batch comes about from the candidates of all shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

from torchreplay import _C
from torchreplay.errors import ReplayTimeout
from torchreplay.ray.sharded.batch_block import Layout, RaggedItems
from torchreplay.ray.sharded.shard_client import Answers, ShardClient
from torchreplay.ray.sharded.shard_sampler import Answer
from torchreplay.ray.sharded.shard_wire import ShardReply
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import Prioritized, Sampler
from torchreplay.segment.waits import Wait

if TYPE_CHECKING:
    from torchreplay._C import Candidates, DrawnFrom

LEAST_SLACK: Final = 1 / 64
"""Candidates asked for beyond a shard's share, so that it may have grown since the last answer."""


Chance: TypeAlias = tuple[int, int, int]
"""Seed, stream and step: what names the random numbers of a batch, each of which is a function of these."""


class SampleRequest:
    """One batch under way: every shard was asked once for its total and for candidates drawn from just that.

    Those totals alone decide how many items the batch takes of each shard. So P(i) is the item's leaf divided by the
    sum of all leaves, each shard being as it was when its candidates were drawn. Where a total has outgrown its
    candidates, shards are asked again, and what they said before is forgotten. Only the totals decide that, never the
    items or random numbers. `docs/sharding_in_depth.md` has the derivation.

    The native core asks all shards at once and makes the batch of their answers, where it reaches them.
    Else each shard is asked by itself, and `finish` makes it.

    Args:
        union: All shards, as the native core reaches them; None: it does not.
        round: What counts it, with the number of its items, until it is handed out or given up.
        chance: Of its random numbers.
        weights: By what these are divided, as `weights_of` says it.
        beta: The exponent of the weights.
        slack: By which share a shard's part of the total may have grown since it was heard last.
        here: Whether the shard that is attached draws its candidates here, right into the batch where that can be.
        place: The batch, whose tensors are overwritten; None: it is made.
        budget: The most elements of ragged fields, by name.
        draws: In whose turn the shard that is attached draws; None: it does so at once.
    """

    drawn_from: DrawnFrom  # what the batch's weights were computed from, once it is finished
    asked_again = False
    calls: Mapping[int, Any] = MappingProxyType({})  # of shards that were asked each by itself, by number
    _draw: _C.UnionDraw | None = None  # makes the batch
    _totals: Mapping[int, float] = MappingProxyType({})  # as the native core has heard them last

    def __init__(
        self,
        shards: ShardClient,
        union: _C.UnionShards | None,
        layout: Layout,
        round: _C.Round,
        chance: Chance,
        weights: str,
        beta: float,
        slack: float,
        here: bool = False,
        place: ReplayBatch | None = None,
        budget: Mapping[str, int] | None = None,
        draws: _C.DrawsHere | None = None,
    ) -> None:
        self.round, self.n = round, (n := round.n)
        self._shards, self._layout, self._chance, self._weights = shards, layout, chance, weights
        self._beta, self.budget, self._here, self._slack = beta, budget, here, slack
        self._batch, self._union = place, union
        if union is None:
            self._order()
            return
        tensors: list[torch.Tensor] | list[int] | None = None
        if not here:
            if place is None and len(shards.table.entries) > 1:
                self._batch = layout.new_batch(n)
            # Of one shard the items are the batch, without a copy.
            tensors = layout.item_sizes if self._batch is None else layout.tensors(self._batch)
        asked = None
        try:
            asked = union.draw(n, beta, weights, *chance, slack, self._batch, tensors, draws)
        except (RuntimeError, ValueError):
            if shards.union_now is union:  # else another thread has attached the shard here, or let go of it
                raise
        if asked is not None:
            self._draw, self._batch = asked
            shards.rounds += 1
        else:
            shards.forget_union(union)
            self._union = None
            self._order()

    def _order(self) -> None:
        """Asks each shard by itself."""
        shards, layout, n, place, here = self._shards, self._layout, self.n, self._batch, self._here
        numbers = sorted(shards.table.entries)
        # Of one shard of another node the items are the batch: it is made over their memory.
        if not layout.is_ragged and (here or place is not None or len(numbers) > 1):
            self._draw = self._begin(layout.new_batch(n) if place is None else place)
        self._room = self._batch if here and not layout.is_ragged else None
        heard = {number: figures.drawn.total for number, figures in shards.figures.items()} | dict(self._totals)
        known = [heard.get(number, 0.0) for number in numbers]
        asked = _C.UnionDraw.asked(known, n, self._slack)
        self.calls = shards.order(dict(zip(numbers, asked, strict=True)), layout, self._room)

    def _begin(self, batch: ReplayBatch) -> _C.UnionDraw:
        self._batch = batch
        return _C.UnionDraw(self.n, self._beta, self._weights, *self._chance, self._layout.tensors(batch))

    @property
    def is_answered(self) -> bool:
        """Whether all answers have come."""
        if self._union is not None and self._draw is not None:
            return self._draw.is_there
        return self._shards.calls.are_there(self.calls.values())

    def give_up(self) -> None:
        """Counts it as given up, and has nobody write to the batch's place any more: it is another batch's."""
        self.round.give_up()
        if self._draw is not None:
            self._draw.abandon()

    def made_within(self, ns: int) -> ReplayBatch | None:
        """Returns the batch where the native core makes it in so many nanoseconds; else None.

        Raises:
            Stopped: The buffer was stopped.
        """
        union, draw = self._union, self._draw
        if union is None or draw is None or not draw.wait(ns) or not self._shards.take_in_union(union, draw):
            return None
        self.drawn_from = draw.drawn_from
        if self._batch is None and (block := draw.block) is not None:
            self._batch = self._layout.batch_over(block, self.n)
        return self._batch

    def finish(self, wait: Wait) -> ReplayBatch | None:
        """Returns the batch, or the part of it within a budget; None if no shard has an item that can be drawn.

        Raises as `ShardClient.hear` does.
        """
        if self._union is not None and self._draw is not None:
            self.await_answers(wait)
            if (batch := self.made_within(0)) is not None:
                return batch
            self._totals = self._union.totals
            self._union, self.asked_again = None, True
            self._draw.abandon()
            self._draw = None
            self._order()
        parts = self._parts(self._complete(self._shards.hear(self.calls, wait), wait))
        return self._made_of(parts) if parts else None

    def await_answers(self, wait: Wait) -> None:
        """Waits until all shards have sent what the native core has asked them for. What is raised changes nothing.

        Raises:
            ReplayTimeout: The wait has taken too long.
        """
        union, draw = self._union, self._draw
        if union is None or draw is None:
            return
        if not draw.wait(0) and not draw.wait(wait.slice_ns()):
            replies = {number: ShardReply(reply, None) for number, reply in union.replies(draw)}
            self._shards.calls.collect(replies, wait)  # it names shards that do not answer
            while not draw.wait(wait.slice_ns()):
                if wait.expired:
                    raise ReplayTimeout(f"no batch of {self.n:,} in time: the buffer's lock does not come free")

    def _parts(self, answers: Answers) -> list[Answer]:
        """Returns the answers with items. That of the shard that drew into the batch comes first."""
        parts = [(answers[number][1] is not None, number) for number in answers if answers[number][0].drawn.total > 0]
        return [answers[number] for _, number in sorted(parts)]

    def _made_of(self, answers: list[Answer]) -> ReplayBatch | None:
        parts = candidates_of(answers, self._layout)
        if self._draw is None:
            (tree, given, block, _), *others = parts
            if block is not None and not others and given == self.n and not self._layout.is_ragged:
                self._draw, parts = self._begin(self._layout.batch_over(block, self.n)), [(tree, given, None, 0)]
            else:
                self._draw = self._begin(self._layout.new_batch(self.n))
        if not self._draw.make(parts):
            raise RuntimeError("the candidates of the shards do not suffice for a batch")
        self.drawn_from = self._draw.drawn_from
        return self._with_values(answers, self._draw.chosen) if self._layout.is_ragged else self._batch

    def _with_values(self, answers: list[Answer], chosen: list[bytes]) -> ReplayBatch:
        """Returns the batch with the values of any length of the chosen candidates, or what of it is in the budget."""
        batch, layout = self._batch, self._layout
        assert batch is not None
        parts = [
            (block, np.frombuffer(which, np.int64))
            for (_, block), which in zip(answers, chosen, strict=True)
            if isinstance(block, RaggedItems)
        ]
        if self.budget:  # items of one shard lie together: in that order its values would be left out each time
            stays = layout.within(parts, self.budget, np.random.default_rng(self._chance).permutation(self.n))
            batch = layout.fixed(batch, stays)
            if self._weights == "batch":
                batch["weight"] /= batch["weight"].max()
            split = np.split(stays, np.cumsum([len(which) for _, which in parts])[:-1])
            parts = [(items, which[mine]) for (items, which), mine in zip(parts, split, strict=True)]
        return layout.with_values(batch, parts)

    def _short(self, answers: Answers) -> dict[int, int]:
        """Returns how many items may come from those shards whose candidates might not be enough."""
        most = _C.UnionDraw.most([figures.drawn.total for figures, _ in answers.values()], self.n)
        parts = zip(answers.items(), most, strict=True)
        return {number: items for (number, (figures, _)), items in parts if items > figures.candidates}

    def _complete(self, answers: Answers, wait: Wait) -> Answers:
        """Asks those shards again whose candidates might not be enough, until all are."""
        tries = 0
        while short := self._short(answers):
            asked = {number: min(self.n, (items + 3) << tries) for number, items in short.items()}
            self.asked_again, tries = True, tries + 1
            answers = {number: answer for number, answer in answers.items() if number not in short}
            answers |= self._shards.hear(self._shards.order(asked, self._layout, self._room), wait)
        return answers


def weights_of(sampler: Sampler) -> str:
    """Returns by what the native core divides weights."""
    return sampler.weights if isinstance(sampler, Prioritized) else "equal"


def candidates_of(answers: Iterable[Answer], layout: Layout) -> list[Candidates]:
    """Returns answers as the native core takes them."""
    each = [(figures.drawn, figures.candidates, block) for figures, block in answers]
    return [(tree, n, None if block is None else layout.as_tensor(block), 0) for tree, n, block in each]
