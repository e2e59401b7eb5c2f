"""`ShardSampler`: what is drawn from one shard for a batch of the union, and what the shard has to say of itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchreplay.buffer.replay_buffer import ReplayBuffer, local_sampler
from torchreplay.buffer.stats import Stats
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.ray.sharded.batch_block import Block, Layout
from torchreplay.ray.sharded.shard_keys import pack
from torchreplay.schema.batch import ReplayBatch
from torchreplay.segment.waits import NEVER


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a shard says in every answer."""

    stats: Stats  # of the shard's buffer; keys below `rows_written` exist
    drawn: TreeSummary  # the tree when the candidates were drawn; without candidates as it is now
    candidates: int = 0  # how many come with this report
    writers: int = 0  # alive; without candidates also those of other nodes while nobody is there to write their rows
    since_departure: float = -1.0  # seconds since a writer last left; -1 if none did
    trouble: str | None = None  # why nothing can be drawn however long one waits; None for no such reason
    barren: str | None = None  # why its ring, as long as it stays like this, completes no item; None if it may
    moment: float = 0.0  # when it was said, by the clock of the shard's node

    def is_older_than(self, other: ShardReport) -> bool:
        """Whether the same shard has said `other` later. Answers may be heard in another order than they were given."""
        return (self.stats.rows_written, self.moment) < (other.stats.rows_written, other.moment)


Answer: TypeAlias = tuple[ShardReport, Block | None]
"""What a shard said, and a block with its candidates; None: there are none, or they were drawn into their place."""


class ShardSampler:
    """Draws from a shard's buffer, for the shard's actor or for a learner on its node. For one thread.

    The buffer's handle was made before, where other nodes may write.
    """

    def __init__(self, buffer: ReplayBuffer, number: int) -> None:
        self._sampler, self._base = local_sampler(buffer), pack(number)
        self._segment = self._sampler.segment

    def draw(self, n: int, largest: float, layout: Layout, out: ReplayBatch | None = None) -> Answer:
        """Draws `n` items, stratified and with replacement, and says what the tree was at just that draw.

        They go into `out`, where it is given, or into a block that is used again. The keys are the union's; weights
        mean nothing yet. The figures' `candidates` are `n`, or 0 when nothing could be drawn. With `n` 0 only the
        figures are wanted. `largest` is the largest raw priority that was seen in any shard: new rows without one count
        as at least that from now on.
        """
        self._segment.raise_largest(largest)
        if not n:
            return self.look(), None
        block = None
        if out is None and not layout.is_ragged:
            block = layout.new_block(n)
            out = layout.batch_over(block, n)
        batch, told = self._segment.sample_told(n, 0.0, NEVER, out)
        if batch is None:
            return self._reasons(self.figures(), told[0], n), None
        batch["key"] += self._base
        figures = self.figures(TreeSummary(*told), n)
        if layout.is_ragged:
            return figures, layout.packed(batch)
        return figures, None if block is None else block.numpy()

    def gather(self, keys: NDArray[np.int64], layout: Layout) -> Answer:
        """Finds items by the shard's own keys `[n]`, and says what the tree is just after that.

        Returns:
            The figures, whose `candidates` say how many items were found, and a block of these; None if there are none.
            That of values of any length says how items have them, also without any. The keys are the union's,
            `probability` is the shard's, weights mean nothing yet.
        """
        if not len(keys) and not layout.is_ragged:
            return self.figures(), None
        batch, _ = self._segment.gather(keys, 0.0, None)
        n = len(batch["key"])
        if not n and not layout.is_ragged:
            return self.figures(), None
        batch["key"] += self._base
        return self.figures(candidates=n), layout.packed(batch)

    def look(self) -> ShardReport:
        """Returns the figures, and what they say of why there is no item, if there is none."""
        figures = self.figures()
        if figures.drawn.drawable or not figures.stats.rows_written:
            return figures
        batch, told = self._segment.sample_told(1, 0.0, NEVER, None)
        return figures if batch is not None else self._reasons(figures, told[0], 1)

    def figures(self, drawn: TreeSummary | None = None, candidates: int = 0) -> ShardReport:
        """Returns what the shard has to say, with the tree as a draw of so many candidates found it, or as it is."""
        moment, values = time.monotonic(), self._segment.stats()
        smallest = values.pop("smallest_leaf")
        stats = Stats.of(values)
        drawn = drawn or TreeSummary(stats.priority_total, stats.drawable, smallest)
        # A learner that waits for rows looks for writers, without candidates. Others need not wait for that look.
        census = (self._segment if candidates else self._sampler.watched).census(False)
        return ShardReport(stats, drawn, candidates, census["writers"], census["since_departure"], moment=moment)

    def _reasons(self, figures: ShardReport, why: str, n: int) -> ShardReport:
        """Adds why the native core gave no batch of `n`."""
        trouble = self._sampler.trouble(why, n)
        return replace(figures, barren=trouble) if why == "barren" else replace(figures, trouble=trouble)
