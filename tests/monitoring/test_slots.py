"""Priorities and ages as a look sees them, beside what the buffer itself says of every item."""

import numpy as np
import pytest
import torch
from watched_buffers import look_at, make, write

import torchreplay as tr
from torchreplay.monitoring.slots import SLOTS, SlotSample, sample_slots


def sampled(buffer):
    with look_at(buffer) as live:
        return sample_slots(live, live.snapshot().head)


def with_priorities(capacity, rows, seed=0, **options):
    buffer = make(capacity, **options)
    keys = write(buffer, rows)
    held = keys[-capacity:]
    buffer.update_priorities(held, np.random.default_rng(seed).lognormal(0, 1, len(held)).astype(np.float32))
    return buffer


def test_a_small_ring_is_seen_as_a_whole():
    buffer = with_priorities(1000, 700)
    exact = np.sort(buffer.priorities(buffer.keys()).numpy())
    slots = sampled(buffer)
    assert slots.priorities == pytest.approx(exact, rel=1e-5)
    assert np.sort(slots.ages).tolist() == list(range(700))
    assert slots.quantiles(0.1, 0.5, 0.9) == pytest.approx(np.quantile(exact, [0.1, 0.5, 0.9]), rel=1e-5)


def test_of_a_large_ring_a_sample_has_the_same_quantiles():
    buffer = with_priorities(4 * SLOTS, 4 * SLOTS)
    exact = buffer.priorities(buffer.keys()).numpy()
    slots = sampled(buffer)
    assert len(slots.priorities) == SLOTS
    # The rank of a quantile has a standard error of sqrt(q (1 - q) / SLOTS) < 0.56 %: five of them.
    for share in (0.1, 0.5, 0.9):
        rank = (exact <= slots.quantiles(share)[0]).mean()
        assert rank == pytest.approx(share, abs=0.028)


def test_the_share_of_items_that_gets_half_of_the_draws_is_that_of_the_probabilities():
    buffer = with_priorities(1000, 1000)
    probability = np.sort(buffer.gather(buffer.keys())["probability"].numpy())[::-1]
    few = int(np.searchsorted(np.cumsum(probability), probability.sum() / 2)) + 1
    assert sampled(buffer).half_of_draws == pytest.approx(few / 1000, abs=0.0011)


def test_equal_priorities_share_the_draws_equally():
    buffer = make(1000, sampler=tr.Uniform())
    write(buffer, 1000)
    buffer.sample(1)
    slots = sampled(buffer)
    assert slots.half_of_draws == pytest.approx(0.5, abs=0.002)
    assert set(slots.priorities.tolist()) == {1.0}


def test_the_histogram_of_priorities_is_numpys():
    buffer = with_priorities(1000, 1000)
    exact = np.log10(buffer.priorities(buffer.keys()).numpy().astype(float))
    counts, edges = np.histogram(exact, 20)
    shares, low, high = sampled(buffer).priority_histogram(20)
    assert (low, high) == pytest.approx((10 ** edges[0], 10 ** edges[-1]), rel=1e-4)
    assert shares == pytest.approx(counts / 1000, abs=0.003)  # single items may fall on the other side of an edge


def test_draws_by_age_are_where_the_probabilities_are():
    buffer = make(1000)
    keys = write(buffer, 1000)
    priority = torch.where(keys >= 900, 10.0, 0.1)  # the newest tenth
    buffer.update_priorities(keys, priority)
    probability = buffer.gather(keys)["probability"].double().numpy()
    expected = probability[::-1].reshape(10, 100).sum(1)
    assert sampled(buffer).draws_by_age(10, 1000) == pytest.approx(expected, rel=1e-4)


def test_draws_by_age_of_a_sample_do_not_depend_on_which_slots_it_has():
    buffer = make(4 * SLOTS)
    write(buffer, 4 * SLOTS)
    buffer.sample(1)
    assert sampled(buffer).draws_by_age(37, 4 * SLOTS) == pytest.approx(np.full(37, 1 / 37), rel=1e-3)


def test_of_a_ring_that_is_not_full_the_old_end_has_no_draws():
    buffer = make(1000)
    write(buffer, 250)
    buffer.sample(1)
    shares = sampled(buffer).draws_by_age(4, 1000)
    assert shares == pytest.approx([1, 0, 0, 0], abs=0.005)


def test_an_empty_buffer_has_nothing_to_show():
    slots = sampled(make())
    assert (len(slots.priorities), len(slots.ages), slots.half_of_draws) == (0, 0, 0.5)
    assert np.isnan(slots.quantiles(0.5)).all()
    assert slots.priority_histogram(5)[0].tolist() == slots.draws_by_age(5, 10).tolist() == [0] * 5


def test_one_priority_alone_has_a_histogram_of_some_width():
    slots = SlotSample(np.array([2.0, 2.0]), np.ones(2), np.zeros(2), np.ones(2))
    shares, low, high = slots.priority_histogram(3)
    assert shares.tolist() == [0, 1, 0]
    assert low < 2 < high
