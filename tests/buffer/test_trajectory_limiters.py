"""Limiters where items are made of several rows: they count items, and rows that are no items yet block nobody."""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from forked import Forked, eventually, shared_counters
from limited_buffers import has_waited, writers_that_wait
from linked_rows import STEPS, nested
from linked_rows import buffer_of as linked_buffer_of
from linked_rows import play as linked_play

import torchreplay as tr


def no_reward(achieved, desired):
    return achieved[:, 0] * 0


HINDSIGHT = tr.Hindsight(no_reward, achieved="obs/at", desired="obs/goal")
GOALS = {"obs/at": ((2,), np.float32), "obs/goal": ((2,), np.float32), **STEPS}


def buffer_of(view, **arguments):
    return linked_buffer_of(view, GOALS, **arguments)


def observation(number):
    return {"obs": {"at": np.full(2, number, np.float32), "goal": np.zeros(2, np.float32)}}


def play(writer, length, end="terminated"):
    return linked_play(writer, length, end, observation=observation)


@pytest.fixture
def alone(monkeypatch):
    """As in a program of one thread, also if other tests have left threads."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def go_on(writer, steps, end=None):
    """Further steps of an episode; the last one ends it as `end` says."""
    for t in range(steps):
        flags = {name: t == steps - 1 and end == name for name in ("terminated", "truncated")}
        writer.step(**observation(t), action=t, reward=1.0, **flags)


# Steps after a reset that complete nothing; then further ones, how they end, and how many items they complete.
INCOMPLETE = {
    "transitions": (tr.Transitions(n_step=3), 2, 1, None, 1),
    "transitions at an end": (tr.Transitions(n_step=3), 2, 1, "terminated", 3),
    "sequences": (tr.Sequences(4, stride=2), 3, 1, None, 1),
    "sequences at an end": (tr.Sequences(4, stride=2), 2, 1, "truncated", 2),
    "sequences across episodes": (tr.Sequences(4, across_episodes=True), 3, 3, None, 3),
    "hindsight": (HINDSIGHT, 4, 1, "terminated", 5),
}
views = pytest.mark.parametrize(("view", "steps", "more", "end", "items"), INCOMPLETE.values(), ids=INCOMPLETE)


@views
def test_min_size_counts_the_complete_items_of_trajectories_and_not_their_rows(view, steps, more, end, items):
    buffer = buffer_of(view, limiter=tr.MinSize(items))
    buffer.handle()  # somebody else could write
    with buffer.writer() as writer:
        play(writer, steps, end=None)
        with pytest.raises(tr.ReplayTimeout, match=f"0 items were inserted, {items} are needed and 0 can be drawn"):
            buffer.sample(1, timeout=0)
        go_on(writer, more, end)
        stats = buffer.stats()
        assert (stats.size, stats.inserted, stats.drawable) == (steps + more + 1, items, items)
        assert len(buffer.sample(100, timeout=0)["key"]) == 100


@views
def test_a_draw_waits_while_there_are_rows_of_trajectories_and_no_complete_item(view, steps, more, end, items):
    buffer = buffer_of(view)

    def explore():
        with buffer.writer() as writer:
            play(writer, steps, end=None)
            eventually(lambda: has_waited(buffer))
            assert buffer.stats().drawable == 0
            go_on(writer, more, end)

    with Forked(explore) as explorer:
        eventually(lambda: len(buffer) > steps)
        assert len(buffer.sample(8, timeout=60)["key"]) == 8
        assert explorer.wait() == 0


@views
def test_a_draw_from_incomplete_items_of_trajectories_that_nobody_can_complete_says_so(
    alone, view, steps, more, end, items
):
    buffer = buffer_of(view)
    writer = buffer.writer()
    play(writer, steps, end=None)
    with pytest.raises(tr.WouldBlockForever, match="0 items were inserted, 1 are needed and 0 can be drawn") as error:
        buffer.sample(1)
    assert f"size: {len(buffer)} rows" in str(error.value)
    go_on(writer, more, end)
    assert len(buffer.sample(1)["key"]) == 1


# Why episodes have no items

SHORT = r"a window takes 6 steps, fewer where a flag ends the episode, but more than the 2 of burn_in"
WITHOUT_ITEMS = {
    "unended": (HINDSIGHT, 4, None, "only the steps of an episode that a flag has ended are items"),
    "no longer than the burn-in": (tr.Sequences(4, burn_in=2), 2, "terminated", SHORT),
    "unended sequences": (tr.Sequences(4), 3, None, "a window takes 4 steps, fewer where a flag ends the episode$"),
    "unended transitions": (tr.Transitions(n_step=5), 4, None, "an item takes 5 steps, fewer where a flag ends"),
}
without_items = pytest.mark.parametrize(("view", "steps", "end", "why"), WITHOUT_ITEMS.values(), ids=WITHOUT_ITEMS)


@without_items
def test_a_wait_for_items_that_episodes_do_not_have_says_when_they_would(alone, view, steps, end, why):
    buffer = buffer_of(view)
    with buffer.writer() as writer:
        for _ in range(5):
            play(writer, steps, end)
        with pytest.raises(tr.WouldBlockForever, match=rf"0 can be drawn \({why.rstrip('$')}.*\); writers alive"):
            buffer.sample(1)


@pytest.mark.slow
@without_items
def test_a_ring_that_turns_with_episodes_that_have_no_items_says_when_they_would(view, steps, end, why):
    buffer = buffer_of(view, capacity=16)
    with buffer.writer() as writer:
        for _ in range(20):
            play(writer, steps, end)
        why = why.replace("$", r"\.")
        with pytest.raises(RuntimeError, match=rf"completing an item: .* 16 rows; {why}.*see that episodes complete"):
            buffer.sample(1, timeout=60)


def test_with_items_to_draw_a_wait_does_not_say_when_there_are_some(alone):
    buffer = buffer_of(tr.Transitions(), limiter=tr.MinSize(9))
    with buffer.writer() as writer:
        play(writer, 3)
        with pytest.raises(tr.WouldBlockForever, match="3 can be drawn; writers alive"):
            buffer.sample(1)


# Rings too small for an item of every environment


def vector_steps(num_envs, terminated=False):
    """A step of every environment."""
    fields = {"action": 0, "reward": 1.0, "terminated": terminated, "truncated": False}
    return {**vector_observations(num_envs), **{name: np.full(num_envs, value) for name, value in fields.items()}}


def vector_observations(num_envs):
    return nested({name: np.zeros((num_envs, 2)) for name in ("obs/at", "obs/goal")})


def vector_steps_of(buffer, num_envs, length=None):
    """Steps of vector environments whose episodes have `length` steps, or no end; yields the rows of every call."""
    with buffer.writer(num_envs) as writer:
        writer.reset(**vector_observations(num_envs))
        yield num_envs
        for t in itertools.count(1):
            writer.step(**vector_steps(num_envs, length is not None and t % (length + 1) == length))
            yield num_envs


def write_for_ever(buffer, num_envs, length=None):
    for _ in vector_steps_of(buffer, num_envs, length):
        pass


ENDLESS = {
    r"Transitions\(n_step=8.* needs 9 rows .* 64 rows; an item takes 8 steps": tr.Transitions(n_step=8),
    r"Transitions\(.*stack=.* needs 11 rows .* 64 rows": tr.Transitions(n_step=8, stack={"obs/at": 3}),
    r"Sequences\(length=6.* needs 9 rows .* 64 rows; a window takes 8 steps": tr.Sequences(6, burn_in=2),
    r"Sequences\(.* needs 9 rows .* 64 rows; a window takes 9 rows of one": tr.Sequences(8, across_episodes=True),
    r"Hindsight\(.* 64 rows; only the steps of an episode": HINDSIGHT,
}
endless = pytest.mark.parametrize(("message", "view"), ENDLESS.items())


@pytest.mark.slow
@endless
def test_a_ring_that_turns_twice_without_completing_an_item_of_a_trajectory_says_so(message, view):
    buffer = buffer_of(view, capacity=64)
    buffer.handle()
    calls = vector_steps_of(buffer, num_envs=8)  # 9 rows of each of 8 environments do not fit
    for _ in range(16):
        next(calls)
    with pytest.raises(tr.ReplayTimeout, match="0 items were inserted"):
        buffer.sample(1, timeout=0)
    next(calls)
    with pytest.raises(RuntimeError, match=rf"without completing an item: {message}"):
        buffer.sample(1, timeout=60)
    assert buffer.stats().sampled == 0


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_ring_that_was_without_a_complete_item_for_an_instant_is_waited_for(prefetch):
    buffer = buffer_of(tr.Transitions(n_step=8), capacity=64)
    for _ in itertools.islice(vector_steps_of(buffer, num_envs=8), 32):  # turns that complete nothing
        pass

    def complete_some():
        time.sleep(0.3)
        for _ in itertools.islice(vector_steps_of(buffer, num_envs=1), 32):
            pass

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(complete_some)
        batch = buffer.sample(4) if prefetch is None else next(iter(tr.ReplayDataset(buffer, 4, prefetch=prefetch)))
        done.result()
    assert len(batch["key"]) == 4


@pytest.mark.slow
@endless
@pytest.mark.parametrize("limiter", [tr.MinSize(10), tr.SamplesPerInsert(4.0, min_size=10)], ids=["MinSize", "ratio"])
def test_a_learner_is_not_left_waiting_for_items_of_trajectories_that_never_fit(message, view, limiter):
    buffer = buffer_of(view, capacity=64, limiter=limiter)
    with Forked(write_for_ever, buffer, 8) as explorer:
        with pytest.raises(RuntimeError, match=message):
            buffer.sample(1, timeout=60)
        buffer.stop()
        assert explorer.wait() == 0


def test_turns_of_the_ring_are_counted_from_the_last_complete_item_of_a_trajectory():
    buffer = buffer_of(tr.Transitions(), capacity=8)
    buffer.handle()
    with buffer.writer() as writer:
        for _ in range(10):
            play(writer, 3)  # 5 turns of the ring, with items, before anybody looks
        assert len(buffer) == 8
        for _ in range(8):
            writer.reset(**observation(0))  # and one without
        with pytest.raises(tr.ReplayTimeout, match="needed and 0 can be drawn"):
            buffer.sample(1, timeout=0)


# Samples per insert

# Views, environments, the steps of their episodes (None: no end), and the rows that an item waits for at most.
IN_STEP = {
    "short episodes": (tr.Transitions(n_step=5), 4, 3, 5),
    "endless episodes": (tr.Transitions(n_step=5, stack={"obs/at": 2}), 2, None, 5),
    "one environment": (tr.Transitions(n_step=20), 1, 21, 20),
    "sequences": (tr.Sequences(4, stride=2, burn_in=2), 3, 11, 6),
    "sequences across episodes": (tr.Sequences(6, across_episodes=True), 3, 4, 6),
    "hindsight": (HINDSIGHT, 2, 20, 20),
}
in_step = pytest.mark.parametrize(("view", "num_envs", "length", "span"), IN_STEP.values(), ids=IN_STEP)


def write_counting_waits(buffer, num_envs, length, waits):
    look = tr.Writer._look

    def _look(writer, stalled, waited):
        waits[0] += 1
        look(writer, stalled, waited)

    tr.Writer._look = _look
    write_for_ever(buffer, num_envs, length)


@in_step
def test_explorers_of_trajectories_and_a_learner_stay_within_the_bounds(view, num_envs, length, span):
    ratio = 2.0
    limiter = tr.SamplesPerInsert(ratio, min_size=200, tolerance=0.5)
    _, _, min_diff, max_diff = limiter.bounds()
    buffer = buffer_of(view, capacity=500, limiter=limiter)
    # Admitted is one row for each item that is wanted. Beyond that come the rows of a call or two that are under way,
    # and items whose first rows were there before.
    slack = ratio * num_envs * (2 + span)
    waits = shared_counters(1)
    with Forked(write_counting_waits, buffer, num_envs, length, waits) as explorer:
        for _ in range(150):
            buffer.sample(64, timeout=60)
            stats = buffer.stats()
            assert min_diff <= stats.inserted * ratio - stats.sampled <= max_diff + slack
        buffer.stop()
        assert explorer.wait() == 0
    # Not a wait for every row, although many of them are no items.
    assert waits[0] < buffer.stats().rows_written / 4


class Sleeps(Exception):
    pass


@in_step
def test_rows_of_trajectories_that_are_no_items_yet_are_written_without_a_sleep(
    monkeypatch, view, num_envs, length, span
):
    buffer = buffer_of(view, capacity=500, limiter=tr.SamplesPerInsert(1.0, min_size=1000, tolerance=0.1))
    looks, look = [], tr.Writer._look

    def _look(writer, stalled, waited):
        if waited:
            raise Sleeps  # for a slice, so far
        looks.append(stalled)
        look(writer, stalled, waited)

    monkeypatch.setattr(tr.Writer, "_look", _look)
    with pytest.raises(Sleeps):
        write_for_ever(buffer, num_envs, length)
    stats = buffer.stats()
    assert stats.inserted >= 1100, "the learner could not draw what the limiter promises"
    assert stats.inserted <= 1100 + num_envs * (2 + span)
    assert len(looks) < stats.rows_written / 50


@pytest.mark.parametrize("min_size", [1, 300])
def test_a_batch_larger_than_the_window_and_the_ring_blocks_neither_side_of_trajectories(min_size):
    buffer = buffer_of(HINDSIGHT, capacity=128, limiter=tr.SamplesPerInsert(1.0, min_size=min_size, tolerance=0.1))
    with Forked(write_for_ever, buffer, 2, 40) as first, Forked(write_for_ever, buffer, 1, 3) as second:
        for _ in range(20):
            buffer.sample(400, timeout=60)
        assert buffer.stats().samples_per_insert == pytest.approx(1.0, abs=0.1)
        buffer.stop()
        assert (first.wait(), second.wait()) == (0, 0)


def test_half_trajectories_of_the_dead_are_not_counted_as_inserts_and_block_nobody():
    view, limiter = tr.Transitions(n_step=5), tr.SamplesPerInsert(1.0, min_size=100, tolerance=0.5)
    buffer = buffer_of(view, capacity=64, limiter=limiter)
    chance, calls = random.Random(0), shared_counters(1)

    def explore():
        for _ in vector_steps_of(buffer, 3):
            calls[0] += 1

    for _ in range(20):
        calls[0] = 0
        enough = chance.randrange(1, 10)
        with Forked(explore):
            eventually(lambda enough=enough: calls[0] >= enough or writers_that_wait(buffer), interval=0)
        stats = buffer.stats()
        if stats.inserted - stats.sampled > 100:
            buffer.sample(20, timeout=60)
    with Forked(write_for_ever, buffer, 3, 7) as explorer:
        for _ in range(30):
            buffer.sample(50, timeout=60)
        buffer.stop()
        assert explorer.wait() == 0
