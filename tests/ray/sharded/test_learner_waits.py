"""How the coordinator counts the waits that learners report."""

import math

import numpy as np
import pytest

from torchreplay.ray.sharded import rate_limiter
from torchreplay.ray.sharded.rate_limiter import WaitStats

TICK = 0.1


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1003.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(rate_limiter, "time", clock)
    return clock


def test_the_share_is_that_of_the_last_10_to_20_seconds_though_messages_are_lost(clock):
    chance = np.random.default_rng(1)
    busy = [0.1, 0.5, 0.95]  # of the learners: how much of their time they wait, each in pieces of a second
    ticks = 900
    waiting = np.stack([np.repeat(chance.random(ticks // 10) < share, 10) for share in busy])
    waiting[:, 450:700] = False  # a time in which nobody waits
    began, waits = clock.now, WaitStats()
    for tick in range(ticks):
        clock.now = began + (tick + 1) * TICK
        for stream, told in enumerate(waiting[:, : tick + 1].sum(1) * TICK):
            if chance.random() < 0.9:
                waits.hear(stream, told)
        since = max(began, (math.floor(clock.now / 10) - 1) * 10)
        span = clock.now - since
        if span >= 5:
            first = round((since - began) / TICK)
            truth = waiting[:, first : tick + 1].sum() * TICK / span / len(busy)
            assert waits.share == pytest.approx(truth, abs=6 * TICK / span)
    for stream, told in enumerate(waiting.sum(1) * TICK):
        waits.hear(stream, told)
    assert waits.total == pytest.approx(waiting.sum() * TICK)


def test_a_message_that_was_overtaken_counts_nothing_twice(clock):
    waits = WaitStats()
    for told in (1.0, 3.0, 2.0, 3.0):
        clock.now += 4.0
        waits.hear(0, told)
    assert waits.total == 3.0
    assert waits.share == pytest.approx(3.0 / 16.0)


def test_learners_that_are_gone_wait_no_more(clock):
    waits = WaitStats()
    clock.now += 4.0
    waits.hear(0, 4.0)
    waits.hear(1, 0.0)
    assert waits.share == pytest.approx(0.5)
    clock.now += 40.0
    assert waits.share == 0.0
    waits.hear(1, 0.0)
    assert (waits.share, waits.total) == (0.0, 4.0)
