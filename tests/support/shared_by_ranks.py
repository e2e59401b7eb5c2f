"""A buffer for several ranks, and explorers that note what is done with them."""

import torch
import torch._dynamo  # which DDP imports late: here once instead of in every forked rank

import torchreplay as tr

ROWS = 64


SPEC = {"number": tr.Field((), torch.int64), "obs": tr.Field((4,))}


def make_buffer(sampler=None, limiter=None, capacity=ROWS):
    """Holds 64 rows; the row with key k holds the number k, and its TD error is 1 + k."""
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=sampler or tr.Prioritized(alpha=1.0), limiter=limiter, seed=3)
    write(buffer)
    return buffer


def write(buffer, rows=ROWS):
    priority = 1.0 + torch.arange(rows)
    buffer.extend(number=torch.arange(rows), obs=torch.ones(rows, 4), priority=priority)


class RecordingExplorers:
    """Explorers that write down what is done to them, and whether the buffer had been stopped then."""

    def __init__(self, buffer, calls):
        self.buffer, self.calls = buffer, calls

    def start(self):
        self.calls.append(["start", self.buffer.stopped])

    def stop(self):
        self.calls.append(["stop", self.buffer.stopped])
