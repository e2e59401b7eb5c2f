"""Buffers in files for tests, whose rows all follow from their number, and files as processes leave them."""

import signal

import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr

SPEC = {"number": tr.Field((), torch.int64), "wide": {"image": tr.Field((600,), torch.int32)}}
ALPHA = 0.7
BOOT = 4096 - 64 + 8  # where the file names the boot of the machine
MUTEX, HOLDER = 512, 848  # where the lock is, and who holds it


def rows(first, n):
    """Rows whose values all follow from their number."""
    numbers = torch.arange(first, first + n)
    return {"number": numbers, "wide": {"image": image_of(numbers)}}


def image_of(numbers):
    return (numbers[:, None] * 1000 + torch.arange(600)).int()


def make(path, capacity=100, **options):
    return tr.ReplayBuffer(
        SPEC, capacity, **{"sampler": tr.Prioritized(alpha=ALPHA), "seed": 3, "path": path, **options}
    )


def assert_priorities_add_up(buffer):
    """The sums that draws descend along are those of the leaves, to the last grid step."""
    leaves = buffer._segment.column(-1).double()
    assert buffer.stats().priority_total == pytest.approx(float(leaves.sum()), rel=1e-6, abs=1e-6)
    assert buffer.stats().drawable == int((leaves > 0).sum())


def poke(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def fill_and_wait(path, ready):
    buffer = make(path)
    buffer.extend(**rows(0, 50), priority=torch.arange(50.0))
    ready[0] = 1
    while buffer:
        signal.pause()


def image_of_a_killed_process(path):
    ready = shared_counters(1)
    with Forked(fill_and_wait, path, ready) as process:
        eventually(lambda: ready[0])
        process.kill()
    return path.read_bytes()


def image_of_a_closed_buffer(path):
    buffer = make(path)
    buffer.extend(**rows(0, 50), priority=torch.arange(50.0))
    buffer.close()
    return path.read_bytes()
