"""`ShardedSampler`: one process's batches from all shards: when they may be drawn, and in which order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.buffer.base import MAX_BATCH, BatchSource, Pin, StreamSpec
from torchreplay.buffer.replay_buffer import local_sampler
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.cuda.copies import DeviceCopies
from torchreplay.cuda.staging import Staging
from torchreplay.errors import ReplayTimeout
from torchreplay.ray.sharded.batch_block import Layout, RaggedItems
from torchreplay.ray.sharded.local_shard import LocalShard
from torchreplay.ray.sharded.rate_limiter import Round
from torchreplay.ray.sharded.sample_request import LEAST_SLACK, SampleRequest, candidates_of, weights_of
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.ray.sharded.shard_feedback import ShardFeedback
from torchreplay.ray.sharded.shard_keys import as_keys, unpack
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config
from torchreplay.schema.samplers import Schedule, value_of
from torchreplay.segment.waits import Wait
from torchreplay.validation import checked_int

if TYPE_CHECKING:
    from torchreplay._C import DrawnFrom
    from torchreplay.buffer.local_sampler import Into

POLL: Final = 0.02
"""Seconds between two looks at the shards while too few items are in."""


class ShardedSampler(BatchSource):
    """What a process draws.

    `seed` is that of the random numbers that choose among candidates; `nonce` signs the batches.
    """

    seed = 0

    def __init__(self, shards: ShardClient, config: Config, seed: int, nonce: int, feedback: ShardFeedback) -> None:
        self.shards, self.seed, self.feedback = shards, seed, feedback
        self.config, self.nonce, self._sampler = config, nonce, config.sampler
        self._layout = Layout(config.outputs())
        self._complete_when = config.view.complete_when
        self._finish = config.finish
        self.is_linked = config.view.roles(config.fields) is not None
        self._weights = weights_of(config.sampler)
        # Nothing is called under it. So a signal handler, or the collection of a stream, in the same thread comes
        # before or after.
        self._lock = threading.RLock()
        self.made_here = 0  # batches drawn by this object; `made` counts those by whom it goes on from, too
        self._made = self._next = self._under_way = 0  # batches, the next round's number, and rounds that are neither
        self._slack = 1.0
        self._stream: int | None = None

    @property
    def stream(self) -> int:
        """The number of the stream of random numbers: at first that of the process."""
        return self.shards.limiter.stream if self._stream is None else self._stream

    @stream.setter
    def stream(self, number: int) -> None:
        self._stream = number

    @property
    def made(self) -> int:
        """Batches drawn."""
        return self._made

    @made.setter
    def made(self, step: int) -> None:
        self._made, self._next = step, step + self._under_way

    def unissued(self, keys: NDArray[np.int64]) -> int | None:
        """Returns the index of the first of `keys` that names no row that any shard has or had."""
        self.shards.require_open()
        return self.feedback.unissued(keys)

    def batches(self, spec: StreamSpec) -> SampleRequestStream:
        """Returns a stream of batches; the shards are asked for `prefetch` of them ahead."""
        self.shards.require_open()
        return SampleRequestStream(self, spec)

    def staging(
        self,
        batch_size: int,
        prefetch: int,
        device: torch.device,
        pin: Pin | None,
        budget: Mapping[str, int] | None = None,
    ) -> Staging | None:
        """Returns what takes batches to a CUDA device while the learner computes; None: each is copied by itself.

        Raises:
            ValueError: `pin` is `"ring"`: the shards' rings are other processes' to page-lock.
        """
        if pin == "ring":
            raise ValueError('pin="ring" page-locks the memory of a ReplayBuffer: expected another for a ShardedReplay')
        if pin is not None and pin != "off":
            self.config.fixed_fields(f"pin={pin!r}")
        if pin == "off" or self.config.ragged:  # each batch with values of any length is of another size
            return None
        return Staging(self.config, batch_size, prefetch, DeviceCopies(device))

    def draw(self, n: int, beta: Schedule | None, wait: Wait, budget: Mapping[str, int] | None = None) -> ReplayBatch:
        """Returns a batch of `n` items, or fewer within a budget, once there are any and the limiter admits it."""
        checked_int("batch_size", n, 1, MAX_BATCH)
        while True:
            self.admit(n, wait)
            if budget is None and (drawn := self.draw_here(n, beta)) is not None:
                return self.finished(drawn[0])
            exponent = self.exponent(beta)
            if (batch := self.take(self.begin(n, wait, exponent, budget=budget), wait)) is not None:
                self.shards.report()  # there may be no next one for long
                return batch
            self.pause(n, wait)

    def exponent(self, beta: Schedule | None = None, ahead: int = 0) -> float:
        """Returns the exponent of the weights of a batch that comes after `ahead` others: `beta`, or the sampler's."""
        given = self._sampler.beta if beta is None else beta
        if given.__class__ is float and beta is None:
            return given
        return value_of(given, self.shards.limiter.steps + ahead)

    def draw_here(self, n: int, beta: Schedule | None, out: Into = None) -> tuple[ReplayBatch, DrawnFrom] | None:
        """Draws from the only shard as a local buffer does, and returns what from; None: shards are to be asked."""
        if n.__class__ is not int or not 0 < n <= MAX_BATCH or not self.shards.limiter.covers(n):
            return None
        here = self.shards.alone()
        if here is None:
            return None
        batch, told = here.sample(n, self.exponent(beta), out)
        if batch is None or told is None:
            return None
        self.count(batch)
        return batch, told

    def count(self, batch: ReplayBatch) -> None:
        """Counts a batch of the only shard as drawn, and signs it."""
        with self._lock:
            self.made_here += 1
            self._made += 1
            self._next += 1
        if self.shards.limiter.count_batch(batch["key"].shape[0]):
            self.shards.alone()
        self.shards.report_later()  # there may be no next one for long
        batch.source = self.nonce

    def gather(self, keys: Any) -> ReplayBatch:
        """Does what `ShardedReplay.gather` does."""
        asked = as_keys(keys)
        numbers, own = unpack(np.unique(asked))
        self.shards.refresh()
        if not set(numbers.tolist()) <= self.shards.table.entries.keys():
            self.shards.look()  # others may have written to a shard that was made since
        self.shards.local.try_attach()
        wanted = {number: own[numbers == number] for number in np.unique(numbers).tolist()}
        answers = list(self.shards.gather(wanted, self._layout).values())
        found = self._layout.new_batch(sum(figures.candidates for figures, _ in answers))
        if n := len(found["key"]):
            beta = value_of(self._sampler.beta, self.shards.limiter.steps)
            draw = _C.UnionDraw(n, beta, self._weights, 0, 0, 0, self._layout.tensors(found))
            draw.take_all(candidates_of(answers, self._layout))
        if self._layout.is_ragged:
            each = [(items, np.arange(len(items.lengths[0]))) for _, items in answers if isinstance(items, RaggedItems)]
            found = self._layout.with_values(found, each)
        batch = self._layout.picked(found, rows_of(asked, found["key"].numpy()))
        batch.source = self.nonce
        return self.finished(batch)

    def pause(self, n: int, wait: Wait) -> None:
        """Called when a round brought no item: its shards could not be reached, or were emptied meanwhile.

        Raises:
            ReplayTimeout: The wait has taken too long.
        """
        if wait.expired:
            raise ReplayTimeout(f"no shard has answered with items for a batch of {n:,} in time")
        self.shards.report()
        time.sleep(min(POLL, wait.slice_ns() * 1e-9))

    def admits(self, n: int, union: _C.UnionShards | None = None) -> bool:
        """Returns whether, as far as is known now, the limiter admits a draw of `n` items and there are any.

        `union` is all shards, where it is known that the native core reaches them.
        """
        union, limiter = union or self.shards.union_now, self.shards.limiter
        drawable = union.drawable if union is not None else 0
        if drawable and limiter.covers(n):
            return True
        self.shards.refresh()
        if not drawable and not any(figures.drawn.drawable for figures in self.shards.figures.values()):
            return False
        return limiter.admits(n)

    def admit(self, n: int, wait: Wait) -> None:
        """Returns once the limiter admits a draw of `n` items, and there are any."""
        if not self.admits(n):
            self._wait_for_rows(n, wait)

    def begin(
        self,
        n: int,
        wait: Wait | None,
        beta: float,
        place: ReplayBatch | None = None,
        budget: Mapping[str, int] | None = None,
        draws: _C.DrawsHere | None = None,
        union: _C.UnionShards | None = None,
    ) -> SampleRequest:
        """Asks all shards for candidates, where the limiter admits `n` items; `take` returns the batch.

        `beta` is the exponent of the weights, and `place` the batch, whose tensors are overwritten; None: it is made.
        With a budget the draw is of the items within it. The shard that is attached draws behind what `draws` has been
        given before; None: at once. `union` is all shards, where it is known that the native core reaches them.
        """
        shards, here = self.shards, self.shards.local.shard is not None
        if union is None:
            here = shards.local.try_attach(wait)
            union = shards.union(self._layout)
        limiter, ahead = shards.limiter, Round(n, self.end)
        try:
            with self._lock:
                ahead.step, self._next = self._next, self._next + 1
                self._under_way += 1
            limiter.begin(ahead)
            chance, weights = (self.seed, self.stream, ahead.step), self._weights
            return SampleRequest(
                shards, union, self._layout, ahead, chance, weights, beta, self._slack, here, place, budget, draws
            )
        except BaseException:
            self.end(ahead)
            raise

    def take(self, ordered: SampleRequest, wait: Wait, finish: bool = True) -> ReplayBatch | None:
        """Returns the batch that was ordered; None if there was no item to draw.

        Unless `finish` is True the owner of the batch's memory computes the rest of it.
        """
        try:
            batch = ordered.finish(wait)
            if batch is not None and ordered.has_budget:
                self.shards.limiter.shorten(ordered.round, batch.batch_size)
        except BaseException:
            self._drop(ordered)
            raise
        if batch is None:
            self._drop(ordered)
            return None
        return self.taken(ordered, batch, finish)

    def _drop(self, ordered: SampleRequest) -> None:
        self.end(ordered.round)
        ordered.give_up()

    def taken(self, ordered: SampleRequest, batch: ReplayBatch, finish: bool = True) -> ReplayBatch:
        """Counts a batch that was ordered as drawn, and returns it."""
        ordered.round.drawn = True
        self.end(ordered.round)
        self._slack = min(1.0, self._slack * 4) if ordered.asked_again else max(LEAST_SLACK, self._slack * 0.75)
        batch.source = self.nonce
        return self.finished(batch, finish)

    def finished(self, batch: ReplayBatch, finish: bool = True) -> ReplayBatch:
        """Returns a batch that is handed out, with what the view computes, where `finish` says so."""
        if finish and self._finish is not None:
            self._finish(batch)
        if self.is_linked:
            self.note_items(batch)
        return batch

    def end(self, ahead: Round) -> None:
        """Counts a round that is no longer under way, drawn or given up. Idempotent."""
        self.shards.limiter.end(ahead)
        with self._lock:
            if ahead.step < 0:
                return
            self._under_way -= 1
            if ahead.drawn:
                self.made_here += 1
                self._made += 1
            elif ahead.step == self._next - 1:  # another one's would be used twice
                self._next = ahead.step
            ahead.step = -1

    def _wait_for_rows(self, n: int, wait: Wait) -> None:
        self._look(n, wait)
        since = time.monotonic()
        try:
            while not self.admits(n):
                self._check(n, wait)
                time.sleep(min(POLL, wait.slice_ns() * 1e-9))
                since = self.shards.limiter.count_wait(since)
                with suppress(ReplayTimeout):  # the next check says what is missing
                    self._look(n, wait)
        finally:
            self.shards.limiter.count_wait(since)

    def _look(self, n: int, wait: Wait) -> None:
        """Asks all shards what they have, and for a lease."""
        self.shards.refresh()
        here, numbers = self.shards.alone(), self.shards.table.entries
        self.shards.hear({here.number: here.look()} if here else self.shards.order(dict.fromkeys(numbers, 0)), wait)
        self.shards.report(n)

    def _check(self, n: int, wait: Wait) -> None:
        """Gives up a wait for rows that will not come, or takes too long."""
        drawable = sum(figures.drawn.drawable for figures in self.shards.figures.values())
        barren = self.shards.barren
        if drawable or barren is None:
            inserted, needed = self.shards.limiter.inserted, self.shards.limiter.needed(n)
            size = sum(figures.stats.size for figures in self.shards.figures.values())
            if inserted < needed or not drawable or wait.expired:  # else the lease is on its way
                wait.check_rows(inserted, needed, drawable, size, self._complete_when, lambda: self.shards.silence)
        else:
            wait.check_turns(barren)


class SampleRequestStream:
    """Batches of a `ShardedReplay` one after the other, `prefetch` rounds being under way ahead of the one asked for.

    Calls reach a shard in the order in which they were made: what is fed back while a round is under way does not
    change its batch.
    """

    def __init__(self, sampler: ShardedSampler, spec: StreamSpec) -> None:
        self._sampler, self._spec, self._batch_size, self._left = sampler, spec, spec.batch_size, spec.count
        self._prefetch, self._timeout, self._waiting = spec.prefetch, spec.timeout, spec.waiting
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
        if self._sampler.shards.closed:
            self._sampler.shards.require_open()
        self._sampler.feedback.apply_arrived()
        if self._left is None and (batch := self._take_at_once()) is not None:
            return batch
        if self._left is not None and self._left <= 0:
            self.close()
            self._sampler.shards.report(last=True)
            raise StopIteration
        waiting, self._waiting = self._waiting, Wait
        wait = waiting(self._sampler.shards, self._timeout)
        try:
            while (batch := self._take(wait)) is None:
                self._sampler.pause(self._batch_size, wait)
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
        there. A round whose answers have all come does not count: its batch is chosen from the candidates only when it
        is put together.
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
            ahead = self._ahead.pop()
            self._sampler.end(ahead.round)
            ahead.give_up()

    def _leave(self) -> None:
        """Draws ahead from the only shard no more; batches that were drawn have not been."""
        here, self._here, self._ordered = self._here, None, 0
        if here is not None:
            here[1].close()

    def _take_here(self, wait: Wait) -> ReplayBatch | None:
        """Returns the next batch of the only shard, as a local buffer gives it; None: shards are to be asked."""
        here = self._sampler.shards.alone()
        if self._here is not None and self._here[0] is not here:
            self._leave()
        if here is None:
            return None
        if self._prefetch == 0:
            drawn = self._sampler.draw_here(self._batch_size, None, self._place(here))
            if drawn is None:
                return None
            batch, told = drawn
        else:
            self._here = self._here or (here, _C.Prefetcher(local_sampler(here.buffer).segment, self._batch_size))
            ahead = self._here[1]
            while self._ordered < self._most:
                ahead.order(self._sampler.exponent(None, self._ordered), self._place(here))
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
            self._sampler.count(batch)
        self._drawn_from = told
        return self._sampler.finished(batch, self._finishes)

    def _place(self, here: LocalShard) -> Into:
        budget = self._spec.budget
        return local_sampler(here.buffer).limits(budget) if budget else self._spec.place()

    @property
    def _most(self) -> int:
        return self._prefetch + 1 if self._left is None else min(self._left, self._prefetch + 1)

    def _take_at_once(self) -> ReplayBatch | None:
        """Returns the next batch where it is made, and another round can be ordered without a look at anything.

        Else it returns None, and `_take` does the same at length.
        """
        sampler, ahead, spec, n = self._sampler, self._ahead, self._spec, self._batch_size
        shards = sampler.shards
        if not ahead or len(ahead) != self._prefetch or len(shards.table.entries) == 1:
            return None
        union = shards.union_now
        if union is None or not union.drawable or not shards.limiter.covers(n):
            return None
        beta, draws, first = sampler.exponent(None, len(ahead)), self._draws_here(), ahead[0]
        ahead.append(sampler.begin(n, None, beta, spec.place(), spec.budget, draws, union))
        shards.report()
        batch = first.at_once()
        if batch is None or not ahead or ahead[0] is not first:
            return None
        ahead.popleft()
        self._drawn_from = first.drawn_from
        return sampler.taken(first, batch, self._finishes)

    def _take(self, wait: Wait) -> ReplayBatch | None:
        if not self._ahead:
            if not self._sampler.shards.limiter.covers(self._batch_size):
                self._sampler.admit(self._batch_size, wait)
            if (batch := self._take_here(wait)) is not None:
                return batch
            self._sampler.admit(self._batch_size, wait)
        self._order(wait)
        if self._ahead[-1].calls:  # they travel while this batch is made, and while its user works
            self._sampler.shards.calls.fetch(
                call for later in islice(self._ahead, 1, None) for call in later.calls.values()
            )
        first = self._ahead[0]
        try:
            batch = self._sampler.take(first, wait, self._finishes)
        finally:
            if self._ahead and self._ahead[0] is first:  # a signal handler may have closed the stream
                self._ahead.popleft()
        if batch is not None:
            self._drawn_from = first.drawn_from
        return batch

    def _draws_here(self) -> _C.DrawsHere | None:
        """Returns what draws ahead from the shard here, in the order of the batches."""
        here = self._sampler.shards.local.shard
        if here is None or not self._prefetch:
            return None
        if self._draws is None or self._draws[0] is not here or self._draws[1].is_closed:
            self._draws = here, _C.DrawsHere(here.segment)
        return self._draws[1]

    def _order(self, wait: Wait) -> None:
        sampler, spec, ahead, n = self._sampler, self._spec, self._ahead, self._batch_size
        while not ahead or len(ahead) < self._most:
            union = sampler.shards.union_now
            if ahead and (sampler.shards.alone() is not None or not sampler.admits(n, union)):
                break
            beta, draws = sampler.exponent(None, len(ahead)), self._draws_here()
            ahead.append(sampler.begin(n, wait, beta, spec.place(), spec.budget, draws, union))
        sampler.shards.report()


def rows_of(asked: NDArray[np.int64], found: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the position in `found`, which has each key once, of each key asked for, without those not found."""
    if not len(found):
        return found
    order = np.argsort(found)
    rows: NDArray[np.int64] = order[np.searchsorted(found, asked, sorter=order).clip(max=len(found) - 1)]
    return rows.compress(found[rows] == asked)
