"""Rows that show by themselves whether they are intact, for tests with writers in other processes."""

from pathlib import Path

import numpy as np
import torch

import torchreplay as tr

PAYLOAD = 16
SPEC = {
    "explorer": tr.Field((), torch.int64),
    "seed": tr.Field((), torch.int64),
    "count": tr.Field((), torch.int64),
    "payload": tr.Field((PAYLOAD,), torch.int64),
}


def make_buffer(capacity=4096, limiter=None):
    return tr.ReplayBuffer(SPEC, capacity, sampler=tr.Prioritized(), limiter=limiter or tr.MinSize(1), seed=0)


def row(explorer, seed, count):
    """A row whose payload can be recomputed from its other fields."""
    return {
        "explorer": explorer,
        "seed": seed,
        "count": count,
        "payload": np.arange(PAYLOAD) + explorer * 2**40 + count * PAYLOAD,
    }


def assert_intact(batch):
    start = batch["explorer"] * 2**40 + batch["count"] * PAYLOAD
    assert torch.equal(batch["payload"], start[:, None] + torch.arange(PAYLOAD))


def is_running(pid):
    return Path(f"/proc/{pid}").exists()
