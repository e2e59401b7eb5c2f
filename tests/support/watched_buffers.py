"""Live buffers for tests that look at them. They are named after the test's process, because others run beside it."""

import os
import resource
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import numpy as np

import torchreplay as tr
from torchreplay.monitoring.advice import Findings
from torchreplay.monitoring.slots import sample_slots
from torchreplay.monitoring.snapshot import LiveBuffer
from torchreplay.monitoring.survey import choose
from torchreplay.monitoring.timeline import Timeline

SPEC = {"x": tr.Field(2)}
NUMBERS = count()


def make(capacity=1000, **options):
    """Returns a buffer with a name that no other one has."""
    options = {"sampler": tr.Prioritized(), "seed": 0, "name": f"test {os.getpid()}.{next(NUMBERS)}", **options}
    return tr.ReplayBuffer(SPEC, capacity, **options)


def write(buffer, rows, **options):
    return buffer.extend(x=np.zeros((rows, 2), np.float32), **options)


def look_at(buffer) -> LiveBuffer:
    """Opens it as another process would: by its name."""
    return choose(buffer.name)


def content_of(buffer):
    """Every byte of its memory."""
    return os.pread(buffer._segment.fd, buffer.nbytes, 0)


def after(live, act, seconds=10.0):
    """What is found after `act()`, as if it had taken so long."""
    timeline = Timeline()
    before = live.snapshot()
    timeline.add(before)
    act()
    now = live.snapshot()
    timeline.add(replace(now, time=before.time + seconds))
    return Findings(live, timeline, sample_slots(live, now.head))


def write_for_ever(buffer, rows=None, n=16):
    """Writes until the buffer is stopped; counts in `rows`."""
    with buffer.writer() as writer:
        values = np.zeros((n, 2), np.float32)
        while True:
            writer.extend(x=values)
            if rows is not None:
                rows[0] += n


def learn_for_ever(buffer, batches=None, pause=0.0):
    random = np.random.default_rng(2)
    while True:
        batch = buffer.sample(32)
        buffer.update_priorities(batch, random.random(32))
        if batches is not None:
            batches[0] += 1
        if pause:
            time.sleep(pause)


@contextmanager
def full_disk(size=2048):
    """No file of this process, or of those that it forks, can grow over so many bytes: a full disk to who writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
