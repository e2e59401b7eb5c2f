"""A buffer with ragged fields as lists of arrays: which rows are there, by the rules of the two rings."""

from __future__ import annotations

import itertools
import math

import numpy as np

SMALLEST, LARGEST = 64, 4096


class RaggedModel:
    """Rows in a list, and where their values would lie.

    A row has its values in consecutive pages. They do not go over the end of the ring: what is left there is skipped.
    A row is there until its slot is taken again, or the first of its pages.
    """

    def __init__(self, spec, capacity, ragged_bytes):
        self.spec, self.capacity = spec, capacity
        mean = ragged_bytes // capacity // 16
        self.page = min(max(1 << (mean.bit_length() - 1) if mean else 0, SMALLEST), LARGEST)
        self.pages = ragged_bytes // self.page
        self.most = ragged_bytes // 4
        self.next_page = 0
        self.rows = []  # (values by name, first page or None), by key

    def append(self, values):
        """Takes a row's values: arrays by name."""
        ragged = [values[name] for name, field in self.spec.items() if hasattr(field, "like")]
        need = math.ceil(sum(math.ceil(value.nbytes / 8) * 8 for value in ragged) / self.page)
        first = None
        if need:
            within = self.next_page % self.pages
            skipped = self.pages - within if within + need > self.pages else 0
            first = self.next_page + skipped
            self.next_page = first + need
        self.rows.append((values, first))

    def fits(self, values):
        """Whether a row may have these values."""
        ragged = [values[name] for name, field in self.spec.items() if hasattr(field, "like")]
        return sum(math.ceil(value.nbytes / 8) * 8 for value in ragged) <= math.ceil(self.most / 8) * 8

    def keys(self):
        """Returns the keys of the rows that are there."""
        oldest = max(0, len(self.rows) - self.capacity)
        return [
            key
            for key, (_, first) in enumerate(self.rows)
            if key >= oldest and (first is None or first + self.pages >= self.next_page)
        ]

    def value(self, key, name):
        return self.rows[key][0][name]

    @property
    def fill(self):
        """The share of the pages from the oldest row's first on."""
        firsts = [self.rows[key][1] for key in self.keys() if self.rows[key][1] is not None]
        return (self.next_page - min(firsts)) / self.pages if firsts else 0.0


def random_values(random, spec, longest):
    """Returns random values of a row, by name."""
    lengths = {}
    values = {}
    for name, field in spec.items():
        dtype = np.dtype(str(field.dtype).removeprefix("torch."))
        shape = field.shape
        if hasattr(field, "like"):
            leader = field.like or name
            if leader not in lengths:
                lengths[leader] = int(random.integers(0, longest + 1)) if random.random() < 0.9 else 0
            shape = (lengths[leader], *shape)
        values[name] = random.integers(0, 100, shape).astype(dtype)
    return values


def split(batch, name):
    """Returns the values of a field of a batch, one by one; nested names are joined by '/'."""
    values = batch
    for part in name.split("/"):
        values = values[part]
    if name in batch["offsets"] or "/" in name:
        return [values[a:b].numpy() for a, b in itertools.pairwise(batch.offsets(name).tolist())]
    return list(values.numpy())
