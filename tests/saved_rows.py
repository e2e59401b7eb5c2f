"""Buffers to be saved, whose rows all follow from their number."""

import torch

import torchreplay as tr

SPEC = {"x": {"a": tr.Field((3,), torch.int64), "b": tr.Field((), torch.bfloat16)}, "reward": tr.Field()}


def rows(first, n):
    """Rows whose values all follow from their number."""
    numbers = torch.arange(first, first + n)
    return {"x": {"a": numbers[:, None] * torch.tensor([1, 2, 3]), "b": numbers % 100}, "reward": numbers.float()}


def filled(n, capacity, **arguments):
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=tr.Prioritized(alpha=0.7, beta=0.5), seed=11, **arguments)
    buffer.extend(**rows(0, n), priority=torch.arange(n) % 7 + 1.0)
    return buffer


def assert_rows_are_those_of_their_keys(batch):
    assert torch.equal(batch["x"]["a"], batch["key"][:, None] * torch.tensor([1, 2, 3]))
    assert torch.equal(batch["reward"], batch["key"].float())
    assert torch.equal(batch["x"]["b"], (batch["key"] % 100).bfloat16())
