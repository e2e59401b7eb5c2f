"""Three explorers that lap a small ring with rows that show whether they are whole, and what must hold after deaths."""

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
    assert after.priority_min == pytest.approx(0.5, rel=1e-6)
    batch = buffer.sample(1024)
    probability = dict(zip(keys.tolist(), (expected / expected.sum()).tolist(), strict=True))
    for key, given in zip(batch["key"].tolist(), batch["probability"].tolist(), strict=True):
        assert given == pytest.approx(probability[key], rel=1e-5)
