"""A device whose copies end when the test lets them, and not before: what slots and queues must withstand."""

import torch

import torchreplay as tr
from torchreplay.buffer import local_sampler
from torchreplay.cuda.staging import Staging

POISON = 0xAB


class LateCopy:
    """Reads its source when it runs, as a device does: what was drawn over it by then is what arrives."""

    def __init__(self, copies, block):
        self.copies, self.source = copies, block
        self.there = torch.full((len(block),), POISON, dtype=torch.uint8, device="cpu")
        self.has_run = False

    def run(self):
        assert not self.has_run
        self.there.copy_(self.source)
        self.has_run = True

    def done(self):
        return self.has_run

    def wait(self):
        if not self.has_run:
            self.copies.waits += 1
            self.copies.run(1 + self.copies.pending().index(self))

    def take(self):
        there, self.there = self.there, self.there.view(-1)
        self.copies.taken += 1
        return there


class LateCopies:
    """Copies that run one after the other: when `run` says so, or when someone waits for one."""

    device = torch.device("cpu")

    def __init__(self):
        self.started, self.blocks = [], []
        self.waits = self.taken = 0

    def memory(self, nbytes):
        self.blocks.append(torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu"))
        return self.blocks[-1]

    def start(self, block):
        self.started.append(LateCopy(self, block))
        return self.started[-1]

    def pending(self):
        return [copy for copy in self.started if not copy.has_run]

    def run(self, n=None):
        """Runs the oldest `n` copies that have not run; None: all."""
        for copy in self.pending()[:n]:
            copy.run()


class StagedDataset(tr.ReplayDataset):
    """A dataset whose batches go to such a device."""

    def __init__(self, *args, **arguments):
        super().__init__(*args, **arguments)
        self.copies = LateCopies()

    def _make_staging(self):
        limits = None if self.budget is None else self.buffer._sampler.limits(self.budget)
        return Staging(self.buffer._config, self.batch_size, self.prefetch, self.copies, limits)


class LateArrival:
    """TD errors that arrive when the test lets them, or are waited for."""

    def __init__(self, values):
        self.values = torch.full_like(values, float("nan"))
        self._sent = values.clone()
        self.waited = False

    def arrive(self):
        self.values.copy_(self._sent)
        self._sent = None

    def done(self):
        return self._sent is None

    def wait(self):
        if not self.done():
            self.waited = True
            self.arrive()

    def release(self):
        self.values.fill_(float("nan"))


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    is_cuda = True

    __torch_function__ = torch._C._disabled_torch_function_impl

    def detach(self):
        return super().detach().as_subclass(OnDevice)


def send_late(monkeypatch, module=local_sampler):
    """Has TD errors on a device arrive late; returns the list of them, in the order in which they were sent.

    Args:
        monkeypatch: The fixture.
        module: Whose `to_host` it is.
    """
    arrivals = []

    def to_host(td):
        arrivals.append(LateArrival(td.as_subclass(torch.Tensor)))
        return arrivals[-1]

    monkeypatch.setattr(module, "to_host", to_host)
    return arrivals
