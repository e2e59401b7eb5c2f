"""Writers killed at any instruction: the others go on, and no batch ever holds anything but whole rows."""

import math
import random
import signal

import pytest
import torch
from forked import Forked, eventually, shared_counters
from lapping_explorers import (
    BATCH,
    CAPACITY,
    POOL,
    SPEC,
    WRITERS,
    Explorers,
    assert_every_slot_takes_a_new_row,
    assert_priorities_are_sound,
    assert_whole,
    row,
    stamp_of,
)

import torchreplay as tr


def kill_writers(kills, seed, tally):
    chance = random.Random(seed)
    buffer = tr.ReplayBuffer(SPEC, CAPACITY, sampler=tr.Prioritized(alpha=0.6), seed=seed)
    with Explorers(buffer) as explorers:
        killed = 0
        while killed < kills:
            victims = chance.sample(range(WRITERS), chance.randint(1, WRITERS))
            explorers.await_rows_of(*victims)
            for _ in range(chance.randrange(4)):
                batch = buffer.sample(BATCH, timeout=30)
                assert_whole(batch, explorers.highest_index)
                tally("rows checked", BATCH)
                buffer.update_priorities(batch, torch.rand(BATCH))
            explorers.kill_and_replace(*victims)
            killed += len(victims)
            tally("explorers killed", len(victims))
        started = explorers.highest_index
    assert_every_slot_takes_a_new_row(buffer, started + 1)
    assert_priorities_are_sound(buffer)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_sigkill_of_200_writers_at_random_instants_tears_no_row_and_blocks_nobody(tally):
    kill_writers(200, seed=1, tally=tally)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_sigkill_of_10_000_writers_at_random_instants_tears_no_row_and_blocks_nobody(tally):
    kill_writers(10_000, seed=2, tally=tally)


def append_counting(buffer, acknowledged, most=math.inf):
    rows = [row(stamp_of(0, count)) for count in range(POOL)]
    writer = buffer.writer()
    while acknowledged[0] < most:
        writer.append(**rows[acknowledged[0] % POOL])
        acknowledged[0] += 1
    signal.pause()


def test_sigkill_loses_at_most_the_row_being_written():
    buffer = tr.ReplayBuffer(SPEC, 4_096, seed=0)
    chance = random.Random(5)
    acknowledged = shared_counters(1)
    before = buffer.stats()
    for _ in range(60):
        acknowledged[0] = 0
        # A row that is overwritten before anyone looks is not counted as inserted.
        with Forked(append_counting, buffer, acknowledged, buffer.capacity - 1):
            target = chance.randrange(1, 200)
            eventually(lambda enough=target: acknowledged[0] >= enough, interval=0)
        after = buffer.stats()
        inserted = after.inserted - before.inserted
        assert inserted in (acknowledged[0], acknowledged[0] + 1)
        assert after.rows_written - before.rows_written - inserted <= 1
        before = after


@pytest.mark.timeout(120)
def test_a_writer_stopped_in_the_middle_of_a_row_blocks_nobody_and_tears_nothing_when_it_goes_on():
    buffer = tr.ReplayBuffer(SPEC, CAPACITY, sampler=tr.Prioritized(alpha=0.6), seed=6)
    with Explorers(buffer) as explorers:
        for round_ in range(60):
            place = round_ % WRITERS
            explorers.await_rows_of(place)
            victim = explorers.running[place]
            victim.signal(signal.SIGSTOP)
            try:
                before = buffer.stats().rows_written
                # Several turns of the ring pass the slot that it may hold.
                eventually(lambda start=before: buffer.stats().rows_written > start + 4 * CAPACITY)
                assert_whole(buffer.sample(BATCH, timeout=30), explorers.highest_index)
            finally:
                victim.signal(signal.SIGCONT)
            assert_whole(buffer.sample(BATCH, timeout=30), explorers.highest_index)
        started = explorers.highest_index
    assert_every_slot_takes_a_new_row(buffer, started + 1)
    assert_priorities_are_sound(buffer)


def test_a_sigkilled_writers_place_is_free_again_and_its_slot_is_not_held_against_the_ring():
    buffer = tr.ReplayBuffer(SPEC, 1, seed=7)  # one slot: a death in it stops everyone, unless it is found out
    acknowledged = shared_counters(1)
    for _ in range(40):
        acknowledged[0] = 0
        with Forked(append_counting, buffer, acknowledged):
            eventually(lambda: acknowledged[0] > 0, interval=0)
        with buffer.writer() as writer:
            key = writer.append(**row(stamp_of(1, 0)))
        batch = buffer.sample(1, timeout=30)
        assert (int(batch["key"][0]), int(batch["stamp"][0])) == (key, stamp_of(1, 0))
        assert_whole(batch, 1)
    assert buffer.stats().writers == 0
