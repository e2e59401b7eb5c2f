"""Buffers to mix: rows say which buffer they are in, and keys of different buffers coincide."""

import itertools

import torch

import torchreplay as tr

SPEC = {
    "home": tr.Field((), torch.int64),
    "deep": {"number": tr.Field((), torch.int64), "pixels": tr.Field((2, 3), "u1")},
}


def filled(home, rows=50, sampler=None, seed=3):
    """A buffer whose rows say that they are at `home`, and their key; alpha = 1 unless a sampler is given."""
    buffer = tr.ReplayBuffer(SPEC, 100, sampler=sampler or tr.Prioritized(alpha=1.0), seed=seed)
    if rows:
        buffer.extend(**rows_of(home, rows))
    return buffer


def rows_of(home, rows):
    pixels = torch.full((rows, 2, 3), home, dtype=torch.uint8)
    return {"home": torch.full((rows,), home), "deep": {"number": torch.arange(rows), "pixels": pixels}}


def take(dataset, count):
    return list(itertools.islice(dataset, count))


def drawn_keys(batches):
    return [tuple(batch["key"].tolist()) for batch in batches]


def priorities(buffer, rows=50):
    """The leaves of the first rows: |td| where alpha = 1."""
    return buffer.gather(torch.arange(rows))["probability"].double() * buffer.stats().priority_total
