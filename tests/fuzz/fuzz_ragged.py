"""Programs that write and draw values of any length, beside lists of arrays: each row has its own values."""

import sys
from pathlib import Path

import atheris
import numpy as np
import torch

import torchreplay as tr

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from ragged_model import RaggedModel, split

SPECS = (
    {"x": tr.Ragged(torch.uint8)},
    {"a": tr.Ragged(torch.int32), "b": tr.Ragged(torch.float64, (3,), like="a"), "n": tr.Field((), torch.int64)},
    {"b": tr.Ragged(torch.bool, like="a"), "a": tr.Ragged(torch.int16), "c": tr.Ragged(torch.float32, (2, 2))},
)


class Session:
    """A buffer, the model of it, and calls that the data chooses."""

    def __init__(self, data):
        self.fuzz = atheris.FuzzedDataProvider(data)
        self.spec = SPECS[self.number(0, len(SPECS) - 1)]
        capacity, ragged_bytes = self.number(1, 20), self.number(1024, 8192)
        self.model = RaggedModel(self.spec, capacity, ragged_bytes)
        self.buffer = tr.ReplayBuffer(self.spec, capacity, ragged_bytes=ragged_bytes, seed=0)
        self.writers = [self.buffer.writer() for _ in range(2)]

    def number(self, low, high):
        return self.fuzz.ConsumeIntInRange(low, high)

    def run(self):
        calls = (self.append, self.append, self.extend, self.extend_packed, self.refused, self.compare)
        while self.fuzz.remaining_bytes():
            calls[self.number(0, len(calls) - 1)]()
        self.compare()
        self.buffer.close()

    def row(self):
        """Values that a row may have, with their number in the first bytes of each."""
        lengths, values = {}, {}
        for name, field in self.spec.items():
            shape = field.shape
            if isinstance(field, tr.Ragged):
                leader = field.like or name
                lengths.setdefault(leader, self.number(0, 60))
                shape = (lengths[leader], *shape)
            dtype = np.dtype(str(field.dtype).removeprefix("torch."))
            values[name] = np.full(shape, self.number(0, 1 if dtype.kind == "b" else 120), dtype)
        return values if self.model.fits(values) else {n: v[:0] if v.ndim else v for n, v in values.items()}

    def append(self):
        values = self.row()
        self.writers[self.number(0, 1)].append(**values)
        self.model.append(values)

    def extend(self):
        rows = [self.row() for _ in range(self.number(1, 5))]
        self.buffer.extend(**{name: [values[name] for values in rows] for name in self.spec})
        for values in rows:
            self.model.append(values)

    def extend_packed(self):
        rows = [self.row() for _ in range(self.number(1, 5))]
        ragged = [name for name, field in self.spec.items() if isinstance(field, tr.Ragged)]
        given = {name: np.stack([values[name] for values in rows]) for name in self.spec if name not in ragged}
        given |= {name: np.concatenate([values[name] for values in rows]) for name in ragged}
        self.buffer.extend(**given, lengths={name: [len(values[name]) for values in rows] for name in ragged})
        for values in rows:
            self.model.append(values)

    def refused(self):
        """Gives one value too long, or one of another length than that which it is like: nothing is written."""
        values = self.row()
        name = sorted(values)[self.number(0, len(values) - 1)]
        if not isinstance(self.spec[name], tr.Ragged):
            return
        longer = 1 if len(self.spec) > 1 and self.number(0, 1) else 1 << 14
        values[name] = np.zeros((len(values[name]) + longer, *self.spec[name].shape), values[name].dtype)
        if self.model.fits(values) and all(f.like is None for f in self.spec.values() if isinstance(f, tr.Ragged)):
            return
        try:
            self.buffer.extend(**{n: [v] for n, v in values.items()})
        except ValueError:
            return
        self.model.append(values)  # of a length of its own

    def compare(self):
        keys = self.model.keys()
        assert self.buffer.keys().tolist() == keys
        batches = [self.buffer.gather(range(len(self.model.rows)))]
        assert batches[0]["key"].tolist() == keys
        if keys:
            batches.append(self.buffer.sample(self.number(1, 8), budget=self.budget()))
        for batch in batches:
            for name in self.spec:
                expected = [self.model.value(key, name) for key in batch["key"].tolist()]
                for got, value in zip(split(batch, name), expected, strict=True):
                    assert np.array_equal(got, value), (name, got, value)

    def budget(self):
        name = next(name for name, field in self.spec.items() if isinstance(field, tr.Ragged))
        return {name: self.number(1, 200)}


def seeds():
    """Bytes that make every kind of call: the first ones of a session are taken from the end."""
    for first in range(0, 256, 5):
        yield bytes((first * k + k * k) % 256 for k in range(96))


def run(data):
    Session(data).run()
