"""Batches that a native thread draws ahead: the same ones as without it, also where an iteration is resumed."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from delayed_draws import BATCH, ROWS, SPEC, Delayed, assert_same, extend, filled_buffer, td_of
from forked import Forked

import torchreplay as tr

LONG_STEP = 1e-3
"""Seconds: long enough that the drawing thread takes feedback over."""


def learn(buffer, batches, n, seconds=0.0):
    """Feeds back and writes beside drawing, in steps that take so long; returns what was drawn."""
    seen = []
    for k, batch in enumerate(itertools.islice(batches, n)):
        seen.append({name: values.clone() for name, values in batch.items()})
        time.sleep(seconds)
        buffer.update_priorities(batch, td_of(k))
        if k % 3 == 0:
            extend(buffer, ROWS + 16 * k, 16)
    return seen


@pytest.mark.parametrize("seconds", [0.0, LONG_STEP])
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_batches_are_those_of_draws_made_earlier_by_as_many_batches(prefetch, seconds):
    expected = learn(buffer := filled_buffer(), Delayed(buffer, prefetch), 200)
    ahead = learn(buffer := filled_buffer(), tr.ReplayDataset(buffer, BATCH, prefetch=prefetch), 200, seconds)
    assert_same(ahead, expected)


def after_long_steps(buffer):
    """Returns an iteration whose thread takes feedback over, and its last batch."""
    batches = iter(tr.ReplayDataset(buffer, BATCH))
    for _ in range(5):
        time.sleep(LONG_STEP)
        batch = next(batches)
    return batches, batch


def gathered(buffer, keys):
    return torch.allclose(buffer.gather(keys)["probability"], torch.tensor(9 / buffer.stats().priority_total))


def counted(buffer, keys):
    return buffer.stats().updated == len(keys)


def counted_by_another_thread(buffer, keys):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(counted, buffer, keys).result()


def counted_elsewhere_after_a_flush(buffer, keys):
    buffer.flush()
    return counted(tr.ReplayBuffer.attach(buffer.handle()), keys)


def in_the_histogram(buffer, keys):
    return buffer.histograms()["priority_edges"].max() > 8


LOOKS = [gathered, counted, counted_by_another_thread, counted_elsewhere_after_a_flush, in_the_histogram]


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_finds_applied_what_was_fed_back(look):
    buffer = filled_buffer()
    _batches, batch = after_long_steps(buffer)
    keys = batch["key"].unique()
    buffer.update_priorities(keys, torch.full((len(keys),), 9.0))
    assert look(buffer, keys)


def test_an_iteration_that_ends_applies_what_was_fed_back():
    buffer = filled_buffer()
    other = tr.ReplayBuffer.attach(buffer.handle())
    for batch in tr.ReplayDataset(buffer, BATCH, steps=20):
        time.sleep(LONG_STEP)
        buffer.update_priorities(batch, torch.full((BATCH,), 9.0))
    assert other.stats().updated == 20 * BATCH


def test_what_is_wrong_with_feedback_is_said_at_once_in_long_steps_too():
    buffer = filled_buffer()
    _batches, batch = after_long_steps(buffer)
    for keys, td, message in [
        (batch, torch.full((BATCH,), torch.nan), "NaN"),
        (batch, torch.ones(BATCH + 1), "one number for each key"),
        ([ROWS], [1.0], "never issued"),
        (filled_buffer().sample(BATCH), torch.ones(BATCH), "another buffer"),
    ]:
        with pytest.raises(ValueError, match=message):
            buffer.update_priorities(keys, td)
    assert buffer.stats().updated == 0


def test_what_was_fed_back_before_a_fork_is_applied_once():
    buffer = filled_buffer()
    batches, batch = after_long_steps(buffer)
    buffer.update_priorities(batch, torch.ones(BATCH))

    def feed_back_too():
        buffer.update_priorities(next(batches), torch.ones(BATCH))
        buffer.flush()

    with Forked(feed_back_too) as child:
        assert child.wait() == 0
    assert buffer.stats().updated == 2 * BATCH


def test_a_schedule_of_the_exponent_counts_every_batch_once():
    def with_schedule():
        sampler = tr.Prioritized(alpha=1.0, beta=tr.LinearSchedule(0.0, 1.0, 50))
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


@pytest.mark.parametrize("seconds", [0.0, LONG_STEP])
def test_the_staleness_is_what_was_fed_back_between_draw_and_turn(seconds):
    buffer, prefetch, n = filled_buffer(), 3, 50
    for k, batch in enumerate(tr.ReplayDataset(buffer, BATCH, steps=n, prefetch=prefetch)):
        time.sleep(seconds)
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


def test_what_a_thread_samples_within_an_iteration_does_not_come_again_after_it():
    buffer = filled_buffer()
    iterator = iter(tr.ReplayDataset(buffer, BATCH, prefetch=2))
    drawn = [next(iterator), buffer.sample(BATCH), next(iterator)]
    iterator.close()
    drawn += [buffer.sample(BATCH) for _ in range(4)]
    assert len({tuple(batch["key"].tolist()) for batch in drawn}) == len(drawn)


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


NAMED = {"step": 0, "key": torch.arange(2), "weight": torch.zeros(2), "probability": torch.zeros(2)}


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
        (NAMED | {"drawn_from": [2.0, 2, 1.0]}, r"drawn_from is \[2.0, 2, 1.0\]: expected \[total, drawable, smallest"),
        (NAMED | {"drawn_from": [2.0, 0, 1.0, 0.4]}, "drawable is 0"),
        (NAMED | {"drawn_from": [2.0, 2, 0.0, 0.4]}, "a total of 2.0 and a smallest leaf of 0.0"),
        (NAMED | {"drawn_from": [2.0, 2, 1.0, float("nan")]}, "beta is nan"),
    ],
)
def test_a_state_with_something_else_than_batches_drawn_ahead_is_refused(drawn, message):
    with pytest.raises(ValueError, match=message):
        tr.ReplayDataset(filled_buffer()).load_state_dict({"draws": 1, "position": 1, "drawn": [drawn]})
