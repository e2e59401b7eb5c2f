"""Deaths at any instruction: whoever is killed, the others go on, and no batch ever holds anything but whole rows."""

import contextlib
import random
import signal

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr

CAPACITY = 64
BATCH = 32
WRITERS = 3
WIDE = 2048  # of int64: 16 KiB, which lies in an array of its own and takes long enough to be killed in
SPEC = {
    "stamp": tr.Field((), torch.int64),
    "floats": tr.Field((7,), torch.float64),
    "bytes": tr.Field((24,), torch.uint8),
    "nested": {"half": tr.Field((3, 2), torch.float16)},
    "wide": tr.Field((WIDE,), torch.int64),
}
POOL = 16  # different rows of a writer; enough that two halves of different rows never agree


def stamp_of(writer, count):
    return writer * 1_000_000 + count % POOL + 1


def row(stamp):
    """A row every value of which follows from its stamp, which is never 0."""
    return {
        "stamp": stamp,
        "floats": np.arange(7) + float(stamp),
        "bytes": np.full(24, stamp % 251, np.uint8),
        "nested": {"half": np.full((3, 2), stamp % 1021, np.float16)},
        "wide": np.arange(WIDE) + stamp * 10_000,
    }


def assert_whole(batch, writers_so_far):
    """Every row is one that some writer has written, and nothing but that."""
    stamp = batch["stamp"]
    column = stamp[:, None]
    assert torch.equal(batch["floats"], torch.arange(7) + column.double()), "torn row"
    assert torch.equal(batch["bytes"], (column % 251).to(torch.uint8).expand(-1, 24)), "torn row"
    assert torch.equal(batch["nested"]["half"], (column % 1021).half()[:, :, None].expand(-1, 3, 2)), "torn row"
    assert torch.equal(batch["wide"], torch.arange(WIDE) + column * 10_000), "torn row"
    assert bool(((stamp - 1) % 1_000_000 < POOL).all()), "foreign row"
    assert bool((stamp >= 1).all() & (stamp < (writers_so_far + 1) * 1_000_000).all()), "foreign row"


def pool_of(writer):
    return [row(stamp_of(writer, count)) for count in range(POOL)]


def stacked(rows):
    first = rows[0]
    if isinstance(first, dict):
        return {name: stacked([r[name] for r in rows]) for name in first}
    return np.stack(rows)


def append_for_ever(buffer, index, written):
    rows = pool_of(index)
    with buffer.writer() as writer:
        count = 0
        while True:
            writer.append(**rows[count % POOL])
            count += 1
            written[index % WRITERS] = count


def extend_for_ever(buffer, index, written):
    rows = stacked(pool_of(index))
    with buffer.writer() as writer:
        count = 0
        while True:
            writer.extend(**rows, priority=np.linspace(0.1, 2.0, POOL))
            count += POOL
            written[index % WRITERS] = count


class Explorers:
    """Three writers that lap the ring; the dead are replaced. Every third one writes many rows a call."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.started = 0
        self.written = shared_counters(WRITERS)
        self.running = [self._start(place) for place in range(WRITERS)]

    def _start(self, place):
        index = self.started // WRITERS * WRITERS + place
        self.started += 1
        self.written[place] = 0
        body = extend_for_ever if place == 2 else append_for_ever
        return Forked(body, self.buffer, index, self.written)

    def kill_and_replace(self, *places):
        for place in places:
            self.running[place].signal(signal.SIGKILL)
        for place in places:
            self.running[place].kill()
            self.running[place] = self._start(place)

    @property
    def highest_index(self):
        return self.started + WRITERS

    def await_rows_of(self, *places):
        eventually(lambda: all(self.written[place] > 0 for place in places))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for explorer in self.running:
            explorer.kill()


def assert_every_slot_takes_a_new_row(buffer, index):
    """One more turn of the ring, by a survivor: no slot may be left in the hands of the dead."""
    assert buffer.stats().writers == 0, "a dead writer counts as alive"
    survivor = buffer.writer()
    for count in range(CAPACITY):
        survivor.append(**row(stamp_of(index, count)))
    stats = buffer.stats()
    assert (stats.size, stats.drawable) == (CAPACITY, CAPACITY)
    assert bool((buffer.storage["stamp"] > index * 1_000_000).all())
    survivor.close()


def all_keys(buffer):
    keys = torch.empty(0, dtype=torch.int64)
    for _ in range(100):
        keys = torch.cat([keys, buffer.sample(1024, timeout=30)["key"]]).unique()
        if len(keys) == CAPACITY:
            return keys
        buffer.update_priorities(keys, torch.zeros(len(keys)))  # now the others are drawn
    raise AssertionError(f"only {len(keys)} of {CAPACITY} rows are ever drawn")


def assert_priorities_are_sound(buffer):
    """New TD errors for all rows lead to the probabilities of equation 1, to the last item."""
    keys = all_keys(buffer)
    td = torch.linspace(0.5, 4.0, CAPACITY)
    before = buffer.stats()
    buffer.update_priorities(keys, td)
    after = buffer.stats()
    assert after.updated - before.updated == CAPACITY
    expected = (td.double() + 1e-6) ** 0.6
    assert after.priority_total == pytest.approx(float(expected.sum()), rel=1e-6)
    assert after.priority_min == pytest.approx(float(expected.min()), rel=1e-6)
    batch = buffer.sample(1024)
    probability = dict(zip(keys.tolist(), (expected / expected.sum()).tolist(), strict=True))
    for key, given in zip(batch["key"].tolist(), batch["probability"].tolist(), strict=True):
        assert given == pytest.approx(probability[key], rel=1e-5)


def kill_writers(kills, seed):
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
                buffer.update_priorities(batch, torch.rand(BATCH))
            explorers.kill_and_replace(*victims)
            killed += len(victims)
        started = explorers.highest_index
    assert_every_slot_takes_a_new_row(buffer, started + 1)
    assert_priorities_are_sound(buffer)


@pytest.mark.timeout(150)
def test_sigkill_of_500_writers_at_random_instants_tears_no_row_and_blocks_nobody():
    kill_writers(500, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_sigkill_of_10_000_writers_at_random_instants_tears_no_row_and_blocks_nobody():
    kill_writers(10_000, seed=2)


def append_counting(buffer, acknowledged):
    rows = [row(stamp_of(0, count)) for count in range(POOL)]
    writer = buffer.writer()
    while True:
        writer.append(**rows[acknowledged[0] % POOL])
        acknowledged[0] += 1


def test_sigkill_loses_at_most_the_row_being_written():
    buffer = tr.ReplayBuffer({**SPEC, "wide": tr.Field((WIDE,), torch.int64)}, 20_000, seed=0)
    chance = random.Random(5)
    acknowledged = shared_counters(1)
    before = buffer.stats()
    for _ in range(60):
        acknowledged[0] = 0
        with Forked(append_counting, buffer, acknowledged):
            target = chance.randrange(1, 200)
            eventually(lambda enough=target: acknowledged[0] >= enough, interval=0)
        after = buffer.stats()
        inserted = after.inserted - before.inserted
        assert inserted in (acknowledged[0], acknowledged[0] + 1)
        assert after.rows_written - before.rows_written - inserted <= 1
        before = after
    assert before.rows_written <= buffer.capacity, "the test is about a ring that never turned"


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
    buffer = tr.ReplayBuffer(SMALL, 1, seed=7)  # one slot: a death in it stops everyone, unless it is found out
    acknowledged = shared_counters(1)

    def write():
        writer = buffer.writer()
        while True:
            writer.append(stamp=1, double=2)
            acknowledged[0] += 1

    for _ in range(40):
        acknowledged[0] = 0
        with Forked(write):
            eventually(lambda: acknowledged[0] > 0, interval=0)
        with buffer.writer() as writer:
            key = writer.append(stamp=3, double=6)
        batch = buffer.sample(1, timeout=30)
        assert (int(batch["key"][0]), int(batch["stamp"][0])) == (key, 3)
    with contextlib.closing(buffer):
        assert buffer.stats().writers == 0
