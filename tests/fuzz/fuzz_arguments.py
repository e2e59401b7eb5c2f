"""Calls with arguments of every kind: errors are fine, crashes and half-written rows are not."""

import math

import atheris
import numpy as np
import torch
from fuzz_attach import STEPS

import torchreplay as tr
from torchreplay.segment.handle import Handle, machine_id

ROWS = {"x": tr.Field((2,)), "deep": {"n": tr.Field((), torch.int16), "b": tr.Field((2, 2), torch.bool)}}
RAGGED = {
    "x": tr.Ragged(torch.int32),
    "deep": {"n": tr.Ragged(torch.uint8), "b": tr.Ragged(torch.bool, (2,), like="x"), "one": tr.Field()},
}
VIEWS = (
    tr.Transitions(2, stack={"obs": 2}),
    tr.Sequences(3, burn_in=1),
    tr.Hindsight(lambda achieved, desired: torch.zeros(len(achieved)), "obs", "goal", observation=("obs", "goal")),
)
NUMPY = ("?", "u1", "<u2", ">u2", "i8", "f2", "<f4", ">f4", "f8", "c8", "O", "S3", "M8[s]", "i4,f4", "g")
TORCH = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint64,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
)
FINE = (ValueError, TypeError, OverflowError, MemoryError, BufferError, RuntimeError, tr.ReplayTimeout)


class Treacherous:
    """Does something to the buffer when it is asked what it is."""

    def __init__(self, action):
        self.action = action

    def answer(self, *_):
        self.action()
        return 1

    __index__ = __float__ = __len__ = __bool__ = __int__ = answer

    def __array__(self, dtype=None, copy=None):
        return np.full((2,), self.answer(), dtype)


class Session:
    """A buffer, a writer, and calls that the data chooses."""

    def __init__(self, data):
        self.fuzz = atheris.FuzzedDataProvider(data)
        view = self.pick((None, *VIEWS))
        self.linked = view is not None
        self.spec = STEPS if self.linked else self.pick((ROWS, RAGGED))
        self.buffer = tr.ReplayBuffer(
            self.spec,
            20,
            view=view,
            sampler=self.pick((None, tr.Prioritized())),
            ragged_bytes=4096 if self.spec is RAGGED else None,
        )
        lanes = self.pick((None, 2)) if self.linked else None
        self.writer = self.buffer.writer(lanes, autoreset=self.pick(("next_step", "same_step", "disabled")))
        self.lanes = () if lanes is None else (lanes,)

    def pick(self, choices):
        return choices[self.fuzz.ConsumeIntInRange(0, len(choices) - 1)]

    def run(self):
        while self.fuzz.remaining_bytes():
            try:
                self.pick((self.write, self.write, self.write, self.draw, self.feed_back, self.attach, self.make))()
            except FINE:
                continue
        if not self.buffer._segment.closed:  # and as it should be: every row is there, and whole
            stats = self.buffer.stats()
            most = min(stats.rows_written, self.buffer.capacity)
            assert stats.size == most or (self.spec is RAGGED and stats.size < most)  # whose bytes may be used up
        self.writer.close()
        self.buffer.close()

    def write(self):
        names = {name: self.fields(field) for name, field in self.spec.items()}
        call = self.pick(
            (self.writer.append, self.writer.step, self.writer.reset, self.writer.extend, self.buffer.extend)
        )
        if call == self.writer.reset:
            names = {name: names[name] for name in ("obs", "goal") if name in names}
        if self.chance():
            names[self.pick(("priority", "final_obs", "mask", "lengths", "x", "obs", self.text()))] = self.value()
        if names and self.chance():
            names.pop(self.pick(sorted(names)))
        call(**names)

    def draw(self):
        count = self.pick((1, 4, None))
        if self.chance():
            self.buffer.gather(self.value())
        else:
            beta = self.value() if self.chance() else None
            self.buffer.sample(self.value() if count is None else count, beta=beta, timeout=0)

    def feed_back(self):
        keys = self.pick((torch.arange(2), torch.tensor([0, 0]), None))
        td = self.pick((torch.ones(2), np.ones(2), None))
        self.buffer.update_priorities(self.value() if keys is None else keys, self.value() if td is None else td)

    def attach(self):
        handle = self.buffer.handle()
        names = {name: getattr(handle, name) for name in Handle.__slots__}
        names[self.pick(tuple(names))] = self.value()
        names["machine"] = machine_id() if self.chance() else names["machine"]
        tr.ReplayBuffer.attach(Handle(**names)).close()

    def make(self):
        what = self.pick(
            (tr.Field, tr.Ragged, tr.Prioritized, tr.SamplesPerInsert, tr.MinSize, tr.Transitions, tr.Sequences)
        )
        made = what(*(self.value() for _ in range(self.fuzz.ConsumeIntInRange(0, 3))))
        is_field = isinstance(made, tr.Field | tr.Ragged)
        spec = {"x": made} if is_field else self.spec
        role = {tr.Prioritized: "sampler", tr.SamplesPerInsert: "limiter", tr.MinSize: "limiter"}.get(what, "view")
        options = {} if is_field else {role: made}
        if isinstance(made, tr.Ragged) or (self.spec is RAGGED and not is_field):
            options["ragged_bytes"] = self.value() if self.chance() else 4096
        if not is_field or made.nbytes < 1 << 16:
            tr.ReplayBuffer(spec, self.value() if self.chance() else 3, **options).close()

    def chance(self):
        return self.fuzz.ConsumeIntInRange(0, 7) == 7

    def text(self):
        return self.fuzz.ConsumeUnicode(4)

    def fields(self, field):
        """A value that fits, most of the time."""
        if isinstance(field, dict):
            return {name: self.fields(inner) for name, inner in field.items()} if not self.chance() else self.value()
        if self.chance():
            return self.value()
        lead = (self.pick((0, 1, 2, 3)),) if self.chance() or isinstance(field, tr.Ragged) else self.lanes
        return torch.zeros((*lead, *field.shape), dtype=field.dtype)

    def value(self, depth=0):
        makers = (
            self.plain,
            self.plain,
            self.array,
            self.array,
            self.tensor,
            self.tensor,
            self.several,
            self.treacherous,
        )
        return self.plain() if depth > 2 else self.pick(makers)(depth)

    def plain(self, _=0):
        fuzz = self.fuzz
        return self.pick((
            lambda: None,
            fuzz.ConsumeBool,
            lambda: fuzz.ConsumeInt(8),
            lambda: fuzz.ConsumeInt(1),
            lambda: (-1) ** fuzz.ConsumeIntInRange(0, 1) << fuzz.ConsumeIntInRange(0, 200),
            fuzz.ConsumeFloat,
            lambda: self.pick((math.nan, math.inf, -math.inf, -0.0)),
            self.text,
            lambda: fuzz.ConsumeBytes(9),
            lambda: np.float16(fuzz.ConsumeFloat()),
            lambda: np.int64(fuzz.ConsumeInt(8)),
            object,
        ))()  # fmt: skip

    def shape(self):
        dims = self.pick((0, 1, 1, 2, 3, 17))
        most = 3 if dims < 17 else 1  # NumPy takes minutes to print 3^16 numbers, for our messages too
        return tuple(self.fuzz.ConsumeIntInRange(0, most) for _ in range(dims))

    def array(self, _):
        value = np.zeros(self.shape()[:16], self.pick(NUMPY))
        return self.pick((
            lambda: value,
            lambda: value[::-1] if value.ndim else value,
            lambda: value[..., ::2] if value.ndim else value,
            lambda: value.T,
            lambda: np.broadcast_to(value, (2, *value.shape)),
            lambda: memoryview(value) if value.dtype.kind not in "M" else value,
            lambda: np.ma.masked_array(value),
        ))()  # fmt: skip

    def tensor(self, _):
        value = torch.zeros(self.shape()[:17], dtype=self.pick(TORCH))
        return self.pick((
            lambda: value,
            lambda: value.transpose(0, -1) if value.dim() else value,
            lambda: value[..., ::2] if value.ndim else value,
            lambda: value.expand(2, *value.shape),
            lambda: value.to("meta"),
            lambda: value.to_sparse(),
            lambda: value.requires_grad_(value.is_floating_point()),
            lambda: value.conj().imag if value.is_complex() else value,
            lambda: value.to(torch.float64).as_subclass(torch.nn.Parameter),
            lambda: torch.nested.nested_tensor([value, value]),
            lambda: value.untyped_storage().resize_(0) and value,
        ))()  # fmt: skip

    def several(self, depth):
        values = [self.value(depth + 1) for _ in range(self.fuzz.ConsumeIntInRange(0, 3))]
        kinds = (
            list,
            tuple,
            lambda v: dict(enumerate(v)),
            lambda v: {self.text(): x for x in v},
            lambda v: {"n": v, "b": v},
        )
        return self.pick(kinds)(values)

    def treacherous(self, _):
        return Treacherous(self.pick((self.buffer.close, self.buffer.stop, self.writer.close, self.buffer.stats)))


def seeds():
    """Bytes that make every kind of call: the first ones of a session are taken from the end."""
    for first in range(0, 256, 5):
        yield bytes((first * k + k * k) % 256 for k in range(64))


def run(data):
    try:
        session = Session(data)
    except FINE:
        return
    session.run()
