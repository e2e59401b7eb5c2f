"""Explorers and learners of trajectories killed at any instruction: complete items can be drawn, and no others; no slot
stays with a dead process, and the survivors go on."""

import contextlib
import itertools
import os
import random
import signal

import pytest
import torch
from aftermath import ALPHA, BATCH, assert_priorities_are_sound, assert_the_survivor_can_use_all_of_it, learn
from forked import Forked, eventually, shared_counters
from numbered_episodes import (
    LANES,
    NARROW,
    WIDE,
    Explorers,
    assert_streams_are_unbroken,
    episode_of,
    number_of,
    spec,
    write_calls,
    writing,
)
from numbered_items import VIEWS, assert_exactly_the_complete_items_can_be_drawn, held_codes

import torchreplay as tr

CAPACITY = 192


def buffer_of(items, capacity=CAPACITY, width=WIDE):
    return tr.ReplayBuffer(spec(width), capacity, view=items.view, sampler=tr.Prioritized(ALPHA), seed=0)


# Explorers


def kill_explorers(name, kills, seed, tally):
    """Kills some while they write, and looks at what is left when the others pause in the middle of their episodes."""
    items, chance = VIEWS[name], random.Random(seed)
    buffer = buffer_of(items)
    with Explorers(buffer, free=False) as explorers:
        killed = 0
        while killed < kills:
            for place in explorers.places:
                explorers.admit(place, chance.randrange(1, 60))
            victims = chance.sample(explorers.places, chance.randint(1, 4))
            for place in victims:
                explorers.await_rows_of(place, rows=chance.randrange(explorers.admitted[place]))
            with contextlib.suppress(tr.ReplayTimeout):  # sometimes there is no complete item
                learn(buffer, items, explorers.streams, timeout=0)
            explorers.kill_and_replace(*victims)
            killed += len(victims)
            tally("explorers killed", len(victims))
            explorers.await_pause()
            assert buffer.stats().writers == 4 - len(victims), "a dead writer counts as alive"
            assert_exactly_the_complete_items_can_be_drawn(buffer, items, explorers.streams)
    assert_the_survivor_can_use_all_of_it(buffer, items, explorers.streams)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_sigkill_of_explorers_at_random_instants_leaves_exactly_the_complete_items_of_their_trajectories(name, tally):
    kill_explorers(name, 24, seed=1, tally=tally)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", VIEWS)
def test_sigkill_of_600_explorers_leaves_exactly_the_complete_items_of_their_trajectories(name, tally):
    kill_explorers(name, 600, seed=2, tally=tally)


def write_and_end(buffer, index, calls, rows, end):
    """Makes so many calls as explorer `index`, reports the rows written, and ends without closing the writer."""
    written = writing(buffer, index)
    rows[0] = sum(itertools.islice(written, calls))
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_a_trajectory_left_in_the_middle_keeps_its_complete_items_and_nothing_else(name):
    items = VIEWS[name]
    buffer = buffer_of(items, capacity=2000)
    rows, written = shared_counters(1), 0
    ends = [(1, "closed"), (4, "killed"), (11, "left"), (23, "killed")]
    for kind, (calls, end) in itertools.product((0, 1, 2, 3, 7), ends):
        index = kind + 8 * calls  # every explorer has streams of its own
        if end == "closed":
            written += write_calls(buffer, index, calls)
        else:
            with Forked(write_and_end, buffer, index, calls, rows, end) as explorer:
                assert explorer.wait() == (-signal.SIGKILL if end == "killed" else 0)
            written += rows[0]
        assert buffer.stats().writers == 0
    assert written == len(buffer) == buffer.stats().rows_written
    assert_streams_are_unbroken(held_codes(buffer))
    keys = assert_exactly_the_complete_items_can_be_drawn(buffer, items, streams=200 * LANES)
    assert buffer.stats().inserted == len(keys)


@pytest.mark.parametrize("name", ["3 steps of 4 frames", "hindsight"])
def test_an_explorer_stopped_in_the_middle_of_a_trajectory_blocks_nobody_and_goes_on_with_whole_items(name):
    items, chance = VIEWS[name], random.Random(3)
    buffer = buffer_of(items)
    with Explorers(buffer) as explorers:
        for round_ in range(16):
            place = round_ % 4
            victim = explorers.running[place]
            explorers.await_rows_of(place, rows=explorers.written[place] + chance.randrange(30))
            victim.signal(signal.SIGSTOP)
            try:
                # Several turns of the ring pass the slot that it may hold.
                turned = buffer.stats().rows_written + 3 * CAPACITY
                eventually(lambda enough=turned: buffer.stats().rows_written >= enough)
                learn(buffer, items, explorers.streams)
            finally:
                victim.signal(signal.SIGCONT)
            learn(buffer, items, explorers.streams)
        explorers.stop()
        assert_exactly_the_complete_items_can_be_drawn(buffer, items, explorers.streams)


# Learners


def explore_and_learn_for_ever(buffer, index, turns):
    """Writes episodes and learns from them in turns, in native code for the most part: any death interrupts something.

    The same rows come again, in a stream of their own, only after several turns of the ring.
    """
    episodes = [episode_of(number_of(index * LANES, i), NARROW) for i in range(40)]
    while True:
        with buffer.writer() as writer:
            for i, episode in enumerate(episodes):
                writer.extend(**episode)
                if i % 8 == 0:
                    len(buffer)  # the part of a learner's work whose interruption leaves most to repair
                if i == 20:
                    buffer.update_priorities(buffer.sample(BATCH), torch.ones(BATCH))
                    turns[0] += 1


def kill_learners(name, rounds, seed, tally):
    """In every round two die, one after the other, and the second has mended what the first has left."""
    items, chance = VIEWS[name], random.Random(seed)
    buffer = buffer_of(items, width=NARROW)
    for round_ in range(rounds):
        with contextlib.ExitStack() as running:
            turns = [shared_counters(1) for _ in range(2)]
            bodies = [(buffer, 2 * round_ + i, turns[i]) for i in range(2)]
            victims = [running.enter_context(Forked(explore_and_learn_for_ever, *body)) for body in bodies]
            for victim, done in zip(victims, turns, strict=True):
                enough = done[0] + chance.randrange(1, 10)
                eventually(lambda done=done, enough=enough: done[0] >= enough, interval=0)
                victim.kill()
                tally("explorers killed that were learners, too")
        assert buffer.stats().writers == 0
        assert_exactly_the_complete_items_can_be_drawn(buffer, items, 2 * rounds * LANES)
    with buffer.writer() as survivor:
        for i in range(2 * CAPACITY):
            survivor.extend(**episode_of(number_of(2 * rounds * LANES, i), NARROW))
    assert buffer.stats().size == CAPACITY
    keys = assert_exactly_the_complete_items_can_be_drawn(buffer, items, (2 * rounds + 1) * LANES)
    assert_priorities_are_sound(buffer, keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_sigkill_of_learners_of_trajectories_leaves_exactly_the_complete_items(name, tally):
    kill_learners(name, 8, seed=4, tally=tally)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", VIEWS)
def test_sigkill_of_600_learners_of_trajectories_leaves_exactly_the_complete_items(name, tally):
    kill_learners(name, 300, seed=5, tally=tally)


def learn_for_ever(buffer, items, streams, batches):
    while True:
        learn(buffer, items, streams)
        batches[0] += 1


def kill_both(name, rounds, seed, tally):
    items, chance = VIEWS[name], random.Random(seed)
    buffer = buffer_of(items)
    batches = shared_counters(1)
    with Explorers(buffer) as explorers:
        explorers.await_rows_of(*explorers.places)
        for _ in range(rounds):
            batches[0] = 0
            with Forked(learn_for_ever, buffer, items, explorers.streams, batches) as learner:
                eventually(lambda: batches[0] > 0, interval=0)
                place = chance.randrange(4)
                explorers.await_rows_of(place)
                for victim in chance.sample([learner, explorers.running[place]], 2):
                    victim.signal(signal.SIGKILL)
            explorers.kill_and_replace(place)
            tally("explorers killed")
            tally("learners killed")
            learn(buffer, items, explorers.streams)
    assert_the_survivor_can_use_all_of_it(buffer, items, explorers.streams)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_sigkill_of_explorers_and_learners_of_trajectories_together_leaves_the_buffer_to_the_survivors(name, tally):
    kill_both(name, 5, seed=6, tally=tally)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", VIEWS)
def test_sigkill_of_100_explorers_and_learners_of_trajectories_leaves_the_buffer_to_the_survivors(name, tally):
    kill_both(name, 100, seed=7, tally=tally)
