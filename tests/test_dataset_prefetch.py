"""Batches that a native thread draws ahead: the same ones as without it, also where an iteration is resumed."""

import itertools

import numpy as np
import pytest
import torch
from delayed_draws import BATCH, ROWS, SPEC, Delayed, assert_same, extend, filled_buffer, td_of

import torchreplay as tr


def learn(buffer, batches, n):
    """Feeds back and writes beside drawing; returns what was drawn."""
    seen = []
    for k, batch in enumerate(itertools.islice(batches, n)):
        seen.append({name: values.clone() for name, values in batch.items()})
        buffer.update_priorities(batch, td_of(k))
        if k % 3 == 0:
            extend(buffer, ROWS + 16 * k, 16)
    return seen


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_batches_are_those_of_draws_made_earlier_by_as_many_batches(prefetch):
    expected = learn(buffer := filled_buffer(), Delayed(buffer, prefetch), 200)
    ahead = learn(buffer := filled_buffer(), tr.ReplayDataset(buffer, BATCH, prefetch=prefetch), 200)
    assert_same(ahead, expected)


def test_a_schedule_of_the_exponent_counts_every_batch_once():
    def with_schedule():
        sampler = tr.Prioritized(alpha=1.0, beta=tr.Linear(0.0, 1.0, 50))
        buffer = tr.ReplayBuffer(SPEC, 1024, sampler=sampler, seed=7)
        extend(buffer, 0, ROWS)
        buffer.update_priorities(np.arange(ROWS), np.random.default_rng(0).exponential(size=ROWS))
        return buffer

    expected = list(itertools.islice(Delayed(with_schedule(), 0), 60))
    assert_same(list(tr.ReplayDataset(with_schedule(), BATCH, steps=60, prefetch=3)), expected)


def test_an_iteration_goes_on_where_its_state_was_taken(tmp_path):
    buffer = filled_buffer()
    dataset = tr.ReplayDataset(buffer, BATCH, prefetch=3)
    iterator = iter(dataset)
    learn(buffer, iterator, 10)
    buffer.save(tmp_path / "buffer")
    torch.save(dataset.state_dict(), tmp_path / "state")
    expected = learn(buffer, iterator, 30)
    loaded = tr.ReplayBuffer.load(tmp_path / "buffer")
    resumed = tr.ReplayDataset(loaded, BATCH, prefetch=3)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert_same(learn(loaded, resumed, 30), expected)


def test_relabelled_goals_come_back_with_the_batches_drawn_ahead(tmp_path):
    goals = {"achieved_goal": tr.Field((1,)), "desired_goal": tr.Field((1,))}
    spec = {"obs": goals, "reward": tr.Field()} | {end: tr.Field((), torch.bool) for end in ("terminated", "truncated")}
    view = tr.Hindsight(lambda achieved, desired: -(achieved != desired).float().squeeze(1))
    buffer = tr.ReplayBuffer(spec, 512, view=view, sampler=tr.Prioritized(), seed=3)
    with buffer.writer() as writer:
        for episode in range(10):
            writer.reset(obs={"achieved_goal": np.array([100.0 * episode]), "desired_goal": np.array([-1.0])})
            for step in range(1, 21):
                obs = {"achieved_goal": np.array([100.0 * episode + step]), "desired_goal": np.array([-1.0])}
                writer.step(obs=obs, reward=-1.0, terminated=False, truncated=step == 20)
    dataset = tr.ReplayDataset(buffer, 64, prefetch=2)
    iterator = iter(dataset)
    next(iterator)
    buffer.save(tmp_path)
    state = dataset.state_dict()
    expected = list(itertools.islice(iterator, 4))
    loaded = tr.ReplayBuffer.load(tmp_path, view=view)
    resumed = tr.ReplayDataset(loaded, 64, prefetch=2)
    resumed.load_state_dict(state)
    given = list(itertools.islice(resumed, 4))
    assert any(batch["relabelled"].any() for batch in given)
    assert_same(given, expected)


def test_a_batch_drawn_ahead_that_the_buffer_does_not_hold_any_more_is_left_out():
    buffer = filled_buffer(capacity=ROWS)
    dataset = tr.ReplayDataset(buffer, BATCH, prefetch=2)
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    iterator.close()
    extend(buffer, ROWS, ROWS)
    dataset.load_state_dict(state)
    assert all((batch["key"] >= ROWS).all() for batch in itertools.islice(dataset, 5))


def test_the_staleness_is_what_was_fed_back_between_draw_and_turn():
    buffer, prefetch, n = filled_buffer(), 3, 50
    for k, batch in enumerate(tr.ReplayDataset(buffer, BATCH, steps=n, prefetch=prefetch)):
        buffer.update_priorities(batch, td_of(k))
    assert buffer.stats().staleness == sum(BATCH * min(k, prefetch) for k in range(n)) / n


def test_without_prefetching_nothing_is_stale():
    buffer = filled_buffer()
    for k, batch in enumerate(tr.ReplayDataset(buffer, BATCH, steps=5, prefetch=0)):
        buffer.update_priorities(batch, td_of(k))
    assert buffer.stats().staleness == 0


def test_a_batch_keeps_its_memory_whatever_is_drawn_after_it():
    kept = []
    for batch in tr.ReplayDataset(filled_buffer(), BATCH, steps=300, prefetch=4):
        kept.append((batch["obs"], batch["number"].clone()))
    for obs, number in kept:
        assert torch.equal(obs, number[:, None].expand(-1, 4).float())


def test_a_position_set_under_an_iteration_is_where_the_next_one_goes_on():
    buffer = filled_buffer()
    dataset = tr.ReplayDataset(buffer, BATCH, prefetch=2)
    iterator = iter(dataset)
    next(iterator)
    buffer.draws = 1000
    next(iterator)
    iterator.close()
    assert buffer.draws == 1001


def test_a_state_loaded_under_an_iteration_is_where_the_next_one_starts():
    buffer, twin = filled_buffer(), filled_buffer()
    dataset = tr.ReplayDataset(buffer, BATCH, steps=10, prefetch=2)
    iterator = iter(dataset)
    next(iterator)
    dataset.load_state_dict({"draws": 100, "position": 4, "drawn": []})
    assert dataset.state_dict() == {"draws": 100, "position": 4, "drawn": []}
    twin.draws = 100
    assert_same(list(dataset), [twin.sample(BATCH) for _ in range(6)])
    assert buffer.draws == 106


def test_a_batch_too_large_is_refused_as_a_draw_of_one_is():
    with pytest.raises(ValueError, match="batch_size"):
        next(iter(tr.ReplayDataset(filled_buffer(), 1 << 30)))


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        ({"step": 0}, "is no batch drawn ahead"),
        ("keys", "is no batch drawn ahead"),
        (
            {"step": 0, "key": torch.zeros(2), "weight": torch.zeros(2), "probability": torch.zeros(2)},
            r"'key' of a batch drawn ahead is torch.float32 of shape \(2,\), expected torch.int64 of shape \(2,\)",
        ),
        (
            {"step": 0, "key": torch.arange(2), "weight": torch.zeros(3), "probability": torch.zeros(2)},
            r"'weight' of a batch drawn ahead is torch.float32 of shape \(3,\)",
        ),
        (
            {"step": -1, "key": torch.arange(2), "weight": torch.zeros(2), "probability": torch.zeros(2)},
            "step is -1",
        ),
    ],
)
def test_a_state_with_something_else_than_batches_drawn_ahead_is_refused(drawn, message):
    with pytest.raises(ValueError, match=message):
        tr.ReplayDataset(filled_buffer()).load_state_dict({"draws": 1, "position": 1, "drawn": [drawn]})
