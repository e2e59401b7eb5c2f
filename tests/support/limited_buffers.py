"""Buffers whose limiter makes somebody wait, and explorers that run into it."""

import numpy as np

import torchreplay as tr

SPEC = {"x": tr.Field((), np.int64)}


def buffer_with(limiter, capacity=1000):
    return tr.ReplayBuffer(SPEC, capacity, limiter=limiter, seed=0)


def extend(buffer, n):
    return buffer.extend(x=np.arange(n))


def has_waited(buffer):
    """Whether a learner or a writer has begun to wait, at any time so far."""
    stats = buffer.stats()
    return stats.sample_wait + stats.insert_wait > 0


def writers_that_wait(buffer):
    """How many writers wait for the limiter now."""
    return buffer._segment.census(False)["waiting"]


def append_until_stopped(buffer, chunk):
    with buffer.writer() as writer:
        while True:
            if chunk == 1:
                writer.append(x=1)
            else:
                writer.extend(x=np.arange(chunk))
