"""What drawing ahead means, without a thread: plain draws made earlier."""

from collections import deque

import numpy as np
import torch

import torchreplay as tr

ROWS, BATCH = 256, 8


SPEC = {"number": tr.Field((), torch.int64), "obs": tr.Field((4,))}


def filled_buffer(rows=ROWS, capacity=1024, **arguments):
    """Rows whose key, number and observation say the same."""
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=tr.Prioritized(alpha=1.0), seed=7, **arguments)
    if rows:
        extend(buffer, 0, rows)
    return buffer


def extend(buffer, first, n):
    numbers = np.arange(first, first + n)
    buffer.extend(number=numbers, obs=np.repeat(numbers[:, None], 4, axis=1).astype(np.float32))


def td_of(k):
    """TD errors for batch k, that differ much: a draw without them draws other items."""
    return np.random.default_rng(k).exponential(size=BATCH) ** 4


class Delayed:
    """What prefetching means, without a thread: batch k is drawn when batch k - prefetch is asked for."""

    def __init__(self, buffer, prefetch):
        self.buffer, self.prefetch, self.drawn = buffer, prefetch, deque()

    def __iter__(self):
        return self

    def __next__(self):
        while len(self.drawn) <= self.prefetch:
            self.drawn.append(self.buffer.sample(BATCH))
        return self.drawn.popleft()


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)
