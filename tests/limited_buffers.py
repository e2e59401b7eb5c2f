"""Buffers whose limiter makes somebody wait, and explorers that run into it."""

import numpy as np

import torchreplay as tr

SPEC = {"x": tr.Field((), np.int64)}


def buffer_with(limiter, capacity=1000):
    return tr.ReplayBuffer(SPEC, capacity, limiter=limiter, seed=0)


def extend(buffer, n):
    return buffer.extend(x=np.arange(n))


def is_waiting(buffer):
    stats = buffer.stats()
    return stats.sample_wait + stats.insert_wait > 0


def append_until_stopped(buffer, chunk):
    with buffer.writer() as writer:
        while True:
            if chunk == 1:
                writer.append(x=1)
            else:
                writer.extend(x=np.arange(chunk))
