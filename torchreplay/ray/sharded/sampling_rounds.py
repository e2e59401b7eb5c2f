"""`SamplingRounds`: when one process's batches from all shards may be drawn, and what counts them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from torchreplay import _C
from torchreplay.buffer.base import MAX_BATCH, BatchSource
from torchreplay.errors import ReplayTimeout
from torchreplay.ray.sharded.batch_block import Layout
from torchreplay.ray.sharded.sample_request import LEAST_SLACK, SampleRequest, weights_of
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config
from torchreplay.schema.samplers import Schedule, value_of
from torchreplay.segment.waits import Wait

if TYPE_CHECKING:
    from torchreplay._C import DrawnFrom
    from torchreplay.buffer.local_sampler import Into
    from torchreplay.ray.sharded.rate_limiter import LearnerLimiter

POLL: Final = 0.02
"""Seconds between two looks at the shards while too few items are in."""


class SamplingRounds(BatchSource):
    """The rounds of a process. Each asks the shards for one batch.

    `seed` is that of the random numbers that choose among candidates; `nonce` signs the batches.
    """

    seed = 0

    def __init__(self, shards: ShardClient, config: Config, seed: int, nonce: int) -> None:
        self.shards, self.seed = shards, seed
        self.config, self.nonce, self._sampler = config, nonce, config.sampler
        self._layout = Layout(config.outputs())
        self._complete_when = config.view.complete_when
        self._finish = config.finish
        self.is_linked = config.view.roles(config.fields) is not None
        self._weights = weights_of(config.sampler)
        self._steps = _C.DrawSteps()
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
        """Batches drawn, those by whom it goes on from, too."""
        return self._steps.made

    @made.setter
    def made(self, step: int) -> None:
        self._steps.go_on_from(step)

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
        tally = self.shards.limiter.tally
        tally.count(batch["key"].shape[0], self._steps)
        if tally.is_short:
            self.shards.alone()
        self.shards.report_later()  # there may be no next one for long
        batch.source = self.nonce

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
        return self.ask(n, shards.limiter, union, beta, here, place, budget, draws)

    def ask(
        self,
        n: int,
        limiter: LearnerLimiter,
        union: _C.UnionShards | None,
        beta: float,
        here: bool,
        place: ReplayBatch | None,
        budget: Mapping[str, int] | None,
        draws: _C.DrawsHere | None,
    ) -> SampleRequest:
        """Does what `begin` does, once it is known what reaches the shards, and whether one is `here`."""
        ahead, weights = limiter.tally.begin(n, self._steps), self._weights
        try:
            chance = self.seed, limiter.stream if self._stream is None else self._stream, ahead.step
            return SampleRequest(
                self.shards, union, self._layout, ahead, chance, weights, beta, self._slack, here, place, budget, draws
            )
        except BaseException:
            ahead.give_up()
            raise

    def take(self, ordered: SampleRequest, wait: Wait, finish: bool = True) -> ReplayBatch | None:
        """Returns the batch that was ordered; None if there was no item to draw.

        Unless `finish` is True the owner of the batch's memory computes the rest of it.
        """
        try:
            batch = ordered.finish(wait)
            if batch is not None and ordered.budget:
                ordered.round.shorten(batch.batch_size)
        except BaseException:
            ordered.give_up()
            raise
        if batch is None:
            ordered.give_up()
            return None
        return self.taken(ordered, batch, finish)

    def taken(self, ordered: SampleRequest, batch: ReplayBatch, finish: bool = True) -> ReplayBatch:
        """Counts a batch that was ordered as drawn, and returns it."""
        ordered.round.hand_out()
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
