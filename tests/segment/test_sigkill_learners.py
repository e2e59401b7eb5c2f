"""Learners killed or stopped at any instruction: the buffer stays usable by the others, and by processes that wake
up."""

import random
import signal

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from lapping_explorers import (
    BATCH,
    CAPACITY,
    SPEC,
    WRITERS,
    Explorers,
    assert_every_slot_takes_a_new_row,
    assert_priorities_are_sound,
    assert_whole,
)

import torchreplay as tr


def learn_for_ever(buffer, seed, batches):
    chance = torch.Generator().manual_seed(seed)
    while True:
        batch = buffer.sample(BATCH, timeout=30)
        buffer.update_priorities(batch, torch.rand(BATCH, generator=chance))
        batches[0] += 1


SMALL = {"stamp": tr.Field((), torch.int64), "double": tr.Field((), torch.int64)}


def small_rows(start, n):
    stamps = np.arange(start, start + n)
    return {"stamp": stamps, "double": 2 * stamps}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sigkill_of_learners_while_they_draw_and_update_leaves_the_lock_and_the_tree_sound():
    buffer = tr.ReplayBuffer(SMALL, CAPACITY, sampler=tr.Prioritized(alpha=0.6), seed=3)
    chance = random.Random(3)
    batches = shared_counters(1)
    with buffer.writer() as writer:
        writer.extend(**small_rows(0, CAPACITY))
        for kill in range(150):
            batches[0] = 0
            with Forked(learn_for_ever, buffer, kill, batches):
                target = chance.randrange(1, 100)
                # Rows keep coming, so that the victim absorbs as often as it draws.
                while batches[0] < target:
                    writer.extend(**small_rows(kill, 7))
            batch = buffer.sample(BATCH, timeout=30)
            assert torch.equal(batch["double"], 2 * batch["stamp"])
            stats = buffer.stats()
            assert (stats.size, stats.drawable) == (CAPACITY, CAPACITY)
    assert buffer.stats().learners == 1
    assert_priorities_are_sound(buffer)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sigkill_of_writers_and_learners_together_leaves_the_buffer_to_the_survivors():
    buffer = tr.ReplayBuffer(SPEC, CAPACITY, sampler=tr.Prioritized(alpha=0.6), seed=4)
    chance = random.Random(4)
    batches = shared_counters(1)
    with Explorers(buffer) as explorers:
        for kill in range(80):
            batches[0] = 0
            with Forked(learn_for_ever, buffer, kill, batches) as learner:
                eventually(lambda: batches[0] > 0, interval=0)
                place = chance.randrange(WRITERS)
                explorers.await_rows_of(place)
                for _ in range(chance.randrange(3)):
                    assert_whole(buffer.sample(BATCH, timeout=30), explorers.highest_index)
                for victim in chance.sample([learner, explorers.running[place]], 2):
                    victim.signal(signal.SIGKILL)
            explorers.kill_and_replace(place)
        started = explorers.highest_index
    assert_every_slot_takes_a_new_row(buffer, started + 1)
    assert_priorities_are_sound(buffer)


def draw_until_stopped(buffer, writers, batches):
    while not buffer.stopped:
        assert_whole(buffer.sample(BATCH, timeout=30), writers)
        batches[0] += 1


@pytest.mark.timeout(120)
def test_a_learner_that_sleeps_while_the_ring_is_lapped_goes_on_where_it_woke_up():
    # Asleep between draw and copy, it finds every row replaced: it draws again, however often the ring turned.
    buffer = tr.ReplayBuffer(SPEC, CAPACITY, sampler=tr.Prioritized(alpha=0.6), seed=8)
    batches = shared_counters(1)
    chance = random.Random(8)
    with Explorers(buffer) as explorers, Forked(draw_until_stopped, buffer, WRITERS, batches) as learner:
        for _ in range(100):
            awake = batches[0] + chance.randrange(1, 20)
            eventually(lambda seen=awake: batches[0] >= seen, interval=0)
            learner.signal(signal.SIGSTOP)
            # The stopped one may hold the lock: only the writers' own counters show how far they are.
            turned = sum(explorers.written) + 3 * CAPACITY
            eventually(lambda enough=turned: sum(explorers.written) >= enough)
            learner.signal(signal.SIGCONT)
        buffer.stop()
        assert learner.wait() == 0
    assert buffer.stats().redraws > 0, "the test is about draws that were overtaken"
