"""Four processes write episodes into one small ring, in every way there is, while a learner draws. No item ever mixes
two episodes or skips a step: each is what the view makes of the rows written."""

import random
import time

import pytest
import torch
from linked_rows import flat
from numbered_episodes import EPISODES, LANES, STEPS, Explorers, spec
from numbered_items import VIEWS, NumberedHindsight, assert_exactly_the_complete_items_can_be_drawn

import torchreplay as tr

CAPACITY = 256
BATCH = 32


class Learner:
    """Draws and feeds back, checks every value, and remembers which row every key names."""

    def __init__(self, buffer, items, streams, seed):
        self.buffer, self.items, self.streams = buffer, items, streams
        self.chance = random.Random(seed)
        self.drawn = {}  # key -> code of the anchor
        self.fed = 0

    def draw(self):
        large = self.chance.randrange(40) == 0
        batch = self.buffer.sample(self.items.large_batch if large else BATCH, timeout=60)
        self._check(batch)
        self.buffer.update_priorities(batch, torch.rand(len(batch["key"])))
        self.fed += len(batch["key"])
        if self.chance.randrange(4) == 0:
            self._check(self.buffer.gather(batch["key"]))

    def _check(self, batch):
        self.items.assert_exact(batch, self.streams)
        for key, anchor in zip(batch["key"].tolist(), self.items.anchors(flat(batch)).tolist(), strict=True):
            assert self.drawn.setdefault(key, anchor) == anchor, "a key names another row than before"

    def explorers_seen(self):
        return {code // STEPS // EPISODES // LANES for code in self.drawn.values()}


def learn_from_explorers(items, limiter, first, seconds):
    """Returns the buffer as the explorers left it, the learner and the rows that were written."""
    buffer = tr.ReplayBuffer(spec(), CAPACITY, view=items.view, sampler=tr.Prioritized(), limiter=limiter, seed=first)
    with Explorers(buffer, first) as explorers:
        learner = Learner(buffer, items, explorers.streams, seed=first)
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(learner.explorers_seen()) < 4 or sum(explorers.written) < 4 * CAPACITY:
            learner.draw()
        explorers.stop()
        return buffer, learner, sum(explorers.written)


def assert_the_counts_add_up(buffer, learner, written):
    stats = buffer.stats()
    assert stats.size == CAPACITY
    assert stats.rows_written >= written
    assert stats.rows_written >= stats.inserted >= max(stats.drawable, len(learner.drawn))
    assert stats.sampled == learner.fed
    assert stats.updated + stats.stale_updates + stats.unready_updates == learner.fed
    assert stats.writers == 0


def explore_and_learn(items, limiter, first, seconds, tally):
    buffer, learner, written = learn_from_explorers(items, limiter, first, seconds)
    assert_exactly_the_complete_items_can_be_drawn(buffer, items, learner.streams)
    assert_the_counts_add_up(buffer, learner, written)
    tally("items checked", learner.fed)


# Free explorers lap the ring between two draws; others replace a part of it, so that items are evicted row by row.
LIMITERS = {"free": (tr.MinSize(1), 0), "in step": (tr.SamplesPerInsert(1.0, min_size=100, tolerance=0.5), 4)}
ITEMS = {**VIEWS, "hindsight of whole episodes": NumberedHindsight("episode")}
views = pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS)
limiters = pytest.mark.parametrize(("limiter", "first"), LIMITERS.values(), ids=LIMITERS)


@pytest.mark.slow
@views
@limiters
def test_no_item_mixes_episodes_or_skips_a_step_while_four_explorers_lap_the_ring(items, limiter, first, tally):
    explore_and_learn(items, limiter, first, seconds=1, tally=tally)


@pytest.mark.soak
@views
@limiters
def test_no_item_mixes_episodes_or_skips_a_step_in_a_minute_of_four_explorers(items, limiter, first, tally):
    explore_and_learn(items, limiter, first, seconds=60, tally=tally)
