"""A day's traffic in minutes: two explorers and a learner, and a ring that turns until memory and sums would have
drifted. The rows are TORCHREPLAY_SOAK_ROWS, 1e9 unless it says otherwise."""

import math
import os
import statistics
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr

CAPACITY = 1_000_000
BLOCK = 4096
BATCH = 512
SPEC = {"obs": tr.Field((4,)), "stamp": tr.Field((), torch.int64), "double": tr.Field((), torch.int64)}
PARTS = 10


def explore(buffer, rows, place):
    with buffer.writer() as writer:
        block = {"obs": np.ones((BLOCK, 4), np.float32)}
        for start in range(0, 2**62, BLOCK):
            stamps = np.arange(start, start + BLOCK) * 2 + place
            writer.extend(**block, stamp=stamps, double=2 * stamps)
            rows[place] += BLOCK


def learn(buffer, checked):
    chance = torch.Generator().manual_seed(0)
    while True:
        batch = buffer.sample(BATCH, timeout=60)
        assert torch.equal(batch["double"], 2 * batch["stamp"]), "torn row"
        buffer.update_priorities(batch, torch.empty(BATCH).exponential_(generator=chance))
        checked[0] += BATCH


def private_bytes(pid):
    """Memory of a process that is not the buffer's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def processor_seconds(pid):
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / 100


class Reading:
    """Time, processor time, memory and open files of all processes, and the rows written so far."""

    def __init__(self, rows, pids):
        self.rows = sum(rows)
        self.time = time.monotonic()
        self.work = sum(processor_seconds(pid) for pid in pids[:2])  # of the explorers
        self.memory = [private_bytes(pid) for pid in pids]
        self.files = [open_files(pid) for pid in pids]


def traffic(total, tally):
    """Writes at least so many rows, and returns the processor seconds a row of every tenth but the first."""
    buffer = tr.ReplayBuffer(SPEC, CAPACITY, sampler=tr.Prioritized(alpha=0.6), seed=0)
    rows, checked = shared_counters(2), shared_counters(1)
    with ExitStack() as stack:
        processes = [stack.enter_context(Forked(explore, buffer, rows, place)) for place in range(2)]
        processes.append(stack.enter_context(Forked(learn, buffer, checked)))
        pids = [process.pid for process in processes]
        eventually(lambda: all(rows) and all(checked))  # each of them has opened what it needs
        readings = []
        for _ in range(PARTS):
            enough = (readings[-1].rows if readings else sum(rows)) + total // PARTS
            eventually(lambda enough=enough: sum(rows) >= enough, timeout=1800, interval=0.01)
            assert all(process.is_running() for process in processes)
            readings.append(Reading(rows, pids))
        buffer.stop()
        assert [process.wait() for process in processes] == [0] * 3
    assert_memory_is_flat(readings)
    assert_leaves_add_up(buffer)
    assert checked[0] > 0
    spans = list(pairwise(readings))
    rates = [(b.rows - a.rows) / (b.time - a.time) / 1e6 for a, b in spans]
    growth = max(now - then for now, then in zip(readings[-1].memory, readings[0].memory, strict=True))
    tally("rows written in a day's traffic", sum(rows))
    tally("rows checked", checked[0])
    tally.note(
        f"a day's traffic: {statistics.median(rates):.1f} million rows/s, by tenths {min(rates):.1f} to "
        f"{max(rates):.1f}; private memory of a process grew by at most {growth >> 10} KiB"
    )
    return [(b.work - a.work) / (b.rows - a.rows) for a, b in spans]


def assert_memory_is_flat(readings):
    first, last = readings[0], readings[-1]
    assert last.files == first.files
    for then, now in zip(first.memory, last.memory, strict=True):
        assert now - then < 4 << 20, f"a process grew from {then >> 10} to {now >> 10} KiB"


def assert_leaves_add_up(buffer):
    """The root is the exact sum of the leaves: the grid is fine enough for the last bit of the smallest."""
    assert len(buffer) == CAPACITY
    leaves = buffer._segment.column(-1).double().numpy()
    stats = buffer.stats()
    assert (leaves > 0).sum() == stats.drawable == CAPACITY
    assert leaves.min() >= 2.0**-12
    assert stats.priority_total == math.fsum(leaves.tolist())
    assert buffer._segment.stats()["smallest_leaf"] == leaves.min()


def test_memory_stays_flat_and_leaves_add_up_in_a_turn_of_a_million_rows(tally):
    traffic(CAPACITY * 3 // 2, tally)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_memory_stays_flat_leaves_add_up_and_the_rate_is_steady_in_a_days_traffic(tally):
    work = traffic(int(float(os.environ.get("TORCHREPLAY_SOAK_ROWS", "1e9"))), tally)
    # Processor time, of which a busy machine takes little away; a leak or a growing search would show many times over.
    assert max(work) < 3 * statistics.median(work), f"processor seconds a row by tenths: {work}"
