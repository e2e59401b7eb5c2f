"""Three explorers and two learners at full speed in a ring of 256 slots: every process checks all rows it draws, and
the priorities of all rows. A TD error is a function of its key, so that one applied to another row shows."""

import time
from collections import deque
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr

CAPACITY = 256
BATCH = 64
EXPLORERS, LEARNERS = 3, 2
WIDE = 256  # of int64: 2 KiB, which lies in an array of its own
SPEC = {"stamp": tr.Field((), torch.int64), "wide": tr.Field((WIDE,), torch.int64)}
POOL = 64
INITIAL, EPS = 0.5, 1e-6

# What every process counts, in shared memory.
ROWS, TORN, FOREIGN, PRIORITIES, OWN, STALE = range(6)


def stamps_of(explorer, counts):
    return explorer * 2**32 + counts % POOL


def wide_of(stamps):
    return stamps[:, None] * 1_000_003 + np.arange(WIDE) ** 2


def td_of(keys):
    """Between 1 and 2; different for the keys of any slot's last 10,000 rows."""
    return 1 + (keys * 7919 % 10_007) / 10_007


class Checker:
    """What one process draws and looks at, and what it counts."""

    def __init__(self, buffer, counts):
        self.buffer, self.counts = buffer, counts

    def check_draw(self):
        batch = self.buffer.sample(BATCH, timeout=60)
        self._check(batch["stamp"].numpy(), batch["wide"].numpy())
        return batch

    def check_priorities(self):
        """Every row's priority, all of one moment, is the one it came with or the TD error of its own key."""
        stamp, wide, key, leaf, *_ = (column.numpy() for column in self.buffer._segment.export_rows(0, CAPACITY)[0])
        self._check(stamp, wide)
        own = np.isclose(leaf, td_of(key) + EPS, rtol=1e-6, atol=0)
        self.counts[PRIORITIES] += len(key)
        self.counts[OWN] += int(own.sum())
        self.counts[STALE] += int((~own & ~np.isclose(leaf, INITIAL + EPS, rtol=1e-6, atol=0)).sum())

    def _check(self, stamps, wide):
        self.counts[ROWS] += len(stamps)
        self.counts[TORN] += int((wide != wide_of(stamps)).any(1).sum())
        self.counts[FOREIGN] += int((~np.isin(stamps, ALL_STAMPS)).sum())


ALL_STAMPS = np.concatenate([stamps_of(explorer, np.arange(POOL)) for explorer in range(EXPLORERS)])


def explore(buffer, counts, explorer):
    """Writes, every third one many rows a call; now and then it checks what it draws as a learner does."""
    checker = Checker(buffer, counts)
    stamps = stamps_of(explorer, np.arange(POOL))
    rows = {"stamp": stamps, "wide": wide_of(stamps)}
    single = [{name: value[i] for name, value in rows.items()} for i in range(POOL)]
    with buffer.writer() as writer:
        while True:
            for _ in range(50):
                if explorer == 2:
                    writer.extend(**rows, priority=INITIAL)
                else:
                    for row in single:
                        writer.append(**row, priority=INITIAL)
            checker.check_draw()
            checker.check_priorities()


def learn(buffer, counts, learner):
    """Feeds back what it drew up to seven batches ago, when most of those rows are gone."""
    checker = Checker(buffer, counts)
    drawn = deque()
    for turn in range(2**62):
        drawn.append(checker.check_draw()["key"])
        if len(drawn) > turn % 8:
            keys = drawn.popleft()
            buffer.update_priorities(keys, torch.from_numpy(td_of(keys.numpy())))
        if turn % 4 == 0:
            checker.check_priorities()


def is_about_something(buffer, counts):
    """All have checked rows and priorities; TD errors were in time and too late; rows were replaced while copied."""
    stats = buffer.stats()
    return (
        all(own[ROWS] and own[PRIORITIES] for own in counts)
        and any(own[OWN] for own in counts)
        and stats.stale_updates > 0
        and stats.rows_written > 8 * CAPACITY
        and stats.redraws > 0
    )


def contend(seconds, tally):
    buffer = tr.ReplayBuffer(SPEC, CAPACITY, sampler=tr.Prioritized(alpha=1.0, eps=EPS), seed=0)
    bodies = [(explore, i) for i in range(EXPLORERS)] + [(learn, i) for i in range(LEARNERS)]
    counts = [shared_counters(6) for _ in bodies]
    with ExitStack() as stack:
        running = [
            stack.enter_context(Forked(body, buffer, own, i)) for (body, i), own in zip(bodies, counts, strict=True)
        ]
        end = time.monotonic() + seconds
        eventually(
            lambda: (
                not all(process.is_running() for process in running)
                or (time.monotonic() > end and is_about_something(buffer, counts))
            ),
            timeout=seconds + 60,
            interval=0.05,
        )
        buffer.stop()
        assert [process.wait() for process in running] == [0] * len(running)
    total = np.asarray(counts).sum(0)
    tally("rows checked", int(total[ROWS]))
    tally("priorities checked", int(total[PRIORITIES]))
    tally("rows written while they were checked", buffer.stats().rows_written)
    assert total[TORN] == 0, f"torn row: {total[TORN]}"
    assert total[FOREIGN] == 0, f"foreign row: {total[FOREIGN]}"
    assert total[STALE] == 0, f"stale TD error: applied {total[STALE]} times"


def test_no_row_is_torn_or_foreign_and_no_stale_td_error_is_applied_at_full_contention(tally):
    contend(2, tally)


@pytest.mark.soak
def test_no_row_is_torn_or_foreign_and_no_stale_td_error_is_applied_in_a_minute_of_full_contention(tally):
    contend(60, tally)
