"""CUDA's rules without CUDA: streams are queues, and which of them goes on next is a matter of chance.

It takes the place of the name `torch` in `torchreplay.cuda.copies`. Tensors lie in ordinary memory, and hold rubbish
until the device has come to the work that fills them; the host waits for nothing unless it says so.
"""

import random
from types import SimpleNamespace

import torch

RUBBISH = 0xAB


class Event:
    """What `torch.Event` is to a stream."""

    def __init__(self, device):
        self._device, self.passed, self.recorded = device, False, False

    def record(self, stream):
        assert self.passed or not self.recorded
        self.passed, self.recorded = False, True
        stream.work.append((None, lambda: setattr(self, "passed", True)))

    def query(self):
        return self.passed

    def synchronize(self):
        self._device.waits += 1
        self._device.run(until=lambda: self.passed)


class Stream:
    """Work that is done in order; an entry is (the event that it needs, what is done)."""

    def __init__(self, simulated):
        self.simulated, self.work, self.device = simulated, [], torch.device("cpu")
        simulated.streams.append(self)

    def __enter__(self):
        self.before, self.simulated.current = self.simulated.current, self

    def __exit__(self, *_):
        self.simulated.current = self.before

    def wait_event(self, event):
        assert event.recorded
        self.work.append((event, lambda: None))


class SimulatedTensor(torch.Tensor):
    """A tensor whose contents are the device's: they change when its stream comes to it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def new(cls, simulated, shape, dtype):
        plain = torch.empty(shape, dtype=dtype)
        plain.view(-1).view(torch.uint8).fill_(RUBBISH)
        self = plain.as_subclass(cls)
        self.simulated, self.plain, self.used_on = simulated, plain, set()
        self.stream = simulated.current
        return self

    def copy_(self, source, non_blocking=False):
        assert non_blocking, "the host would wait"
        self.simulated.current.work.append((None, lambda: self.plain.copy_(source)))
        return self

    def detach(self):
        return self

    def record_stream(self, stream):
        assert stream is not self.stream
        self.used_on.add(stream)


class SimulatedCuda:
    """A device, and what `torchreplay.cuda.copies` needs of the module `torch`."""

    uint8, inference_mode = torch.uint8, torch.inference_mode

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.streams, self.allocated, self.waits, self.pinned = [], [], 0, 0
        self.current = self.main = Stream(self)
        self.Stream, self.Event = lambda device: Stream(self), lambda device: Event(self)
        self.accelerator = self.cuda = SimpleNamespace(current_stream=lambda device: self.current)

    def empty(self, shape, dtype, device=None, pin_memory=False):
        if pin_memory:
            self.pinned += 1
            return SimulatedTensor.new(self, shape, dtype)
        if device == "cpu":
            return torch.empty(shape, dtype=dtype)
        self.allocated.append(SimulatedTensor.new(self, shape, dtype))
        return self.allocated[-1]

    def run(self, until=None, most=None):
        """Lets the device work: until a condition holds, for some steps, or until nothing is left."""
        while not (until is not None and until()) and most != 0:
            able = [s for s in self.streams if s.work and (s.work[0][0] is None or s.work[0][0].passed)]
            if not able:
                assert until is None, "waits for ever"
                assert most is not None or not any(stream.work for stream in self.streams), "a deadlock"
                return
            _, act = self.chance.choice(able).work.pop(0)
            act()
            most = None if most is None else most - 1

    def read(self, tensors):
        """Has the current stream read tensors; returns where what it has read will be found."""
        read = {}
        self.current.work.append((None, lambda: read.update({name: t.clone() for name, t in tensors.items()})))
        return read
