"""Rings of shards that complete no item: an error when that lasts and no other shard has one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torchreplay as tr
from torchreplay.ray.sharded.rate_limiter import LearnerLimiter, Rule
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.ray.sharded.sharded_sampler import ShardedSampler
from torchreplay.schema.config import Config
from torchreplay.segment.waits import Wait

ENDS = {name: tr.Field((), torch.bool) for name in ("terminated", "truncated")}
SPEC = {"obs": tr.Field((4,)), "reward": tr.Field(), **ENDS}
CONFIG = Config.of(SPEC, 256, tr.Prioritized(), tr.Transitions(n_step=8), None)
WATCHED = SimpleNamespace(
    stopped=False,
    called="the replay buffer",
    census=lambda _: {"others_writing": 1, "writers": 1, "since_write": 0.0},
)


@pytest.fixture
def shards():
    opened = [Shard(number, CONFIG, 100 + number, None) for number in range(2)]
    for shard in opened:
        shard.open()
    yield opened
    for shard in opened:
        shard._buffer.close()


def turn(shard):
    """Writes first observations only, of which none has a successor, until the ring has turned."""
    with shard._buffer.writer(num_envs=64) as writer:
        for _ in range(10):
            writer.reset(obs=np.zeros((64, 4)))


def play(shard):
    with shard._buffer.writer() as writer:
        writer.reset(obs=np.zeros(4))
        for _ in range(20):
            writer.step(obs=np.zeros(4), reward=1.0, terminated=False, truncated=False)


def asked(shard, candidates):
    figures, _ = shard.draw(candidates, 1.0)
    return figures


@pytest.mark.parametrize("candidates", [0, 8])
def test_a_shard_says_that_its_ring_completed_no_item_and_draws_when_it_has(shards, candidates):
    shard = shards[0]
    assert asked(shard, candidates).barren is None
    turn(shard)
    figures = asked(shard, candidates)
    assert "turned without completing an item" in figures.barren
    assert figures.trouble is None, "one look is no reason to end anybody's draws"
    play(shard)
    figures = asked(shard, candidates)
    assert figures.barren is None
    assert figures.candidates == candidates


class Union:
    """What draws need of the members: these shards, called directly."""

    silence, union_now = "", None
    alone = staticmethod(lambda: None)

    def __init__(self, shards):
        self.limiter = LearnerLimiter(Rule(tr.MinSize()), 0)
        self.table = SimpleNamespace(entries=dict(enumerate(shards)))
        self.figures = {}
        self.looks = 0

    def refresh(self):
        pass

    def report(self, n=0):
        pass

    def order(self, candidates):
        self.looks += 1
        return {number: asked(self.table.entries[number], count) for number, count in candidates.items()}

    def hear(self, calls, wait):
        self.figures = calls
        self.limiter.count(calls)

    @property
    def barren(self):
        return next((figures.barren for figures in self.figures.values() if figures.barren), None)


def wait_for_rows(union, timeout=60):
    ShardedSampler(union, CONFIG, 0, 0, None)._wait_for_rows(8, Wait(WATCHED, timeout))


def test_a_union_without_an_item_is_told_so_after_more_than_one_look(shards):
    turn(shards[0])
    turn(shards[1])
    union = Union(shards)
    with pytest.raises(RuntimeError, match="turned without completing an item"):
        wait_for_rows(union)
    assert union.looks > 1


def test_another_shards_items_are_drawn(shards):
    turn(shards[0])
    play(shards[1])
    union = Union(shards)
    wait_for_rows(union)
    assert union.looks == 1


def test_a_wait_for_the_first_items_of_a_union_says_what_they_take(shards):
    with pytest.raises(tr.ReplayTimeout, match=r"0 can be drawn \(an item takes 8 steps"):
        wait_for_rows(Union(shards), timeout=0)
