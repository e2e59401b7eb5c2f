"""Long values that a device reads in the ring itself: the batches that a host's copy makes, or none."""

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from delayed_draws import assert_same
from forked import eventually
from late_copies import LateReads
from linked_rows import flat
from long_values import VIEWS, ReadDataset, TimedCopies, here, numbered_buffer, writing_rows
from numbered_episodes import Explorers, episode_of, length_of, number_of, spec
from simulated_cuda import SimulatedCuda

import torchreplay as tr
from torchreplay.cuda import copies as cuda
from torchreplay.cuda.long_rows import LongRows
from torchreplay.cuda.pinned_memory import PageLock
from torchreplay.cuda.routes import PathSelector, Route
from torchreplay.cuda.staging import Staging, copied_by_host

DEVICE = torch.device("cuda:1")
IMAGE = {"image": tr.Field((40, 40), torch.uint8), "x": tr.Field()}
"""Rows of a long field, and of a short one."""


@pytest.mark.parametrize("name", VIEWS)
def test_items_of_every_view_are_those_that_the_host_copies(name):
    expected = list(tr.ReplayDataset(numbered_buffer(name), 16, steps=20))
    dataset = ReadDataset(buffer := numbered_buffer(name), 16, steps=20)
    given = list(dataset)
    assert_same(given, expected)
    assert [list(batch) for batch in given] == [list(batch) for batch in expected]
    assert len(dataset.copies.started) == 20
    sent = {len(copy.source) for copy in dataset.copies.started}
    assert max(sent) < 16 * buffer.storage["obs"]["wide"][0].numel() * 8  # not one long value of each item
    assert buffer.stats().redraws == 0


class Alternating(PathSelector):
    """Sends batches both ways for ever."""

    def __init__(self, routes):
        super().__init__(routes)
        self.open = False

    def next(self):
        return next(self._turn)


class AlternatingDataset(tr.ReplayDataset):
    """A dataset every second batch of which has its long values read late."""

    def _make_staging(self):
        rows = LongRows(self.buffer._segment, self.buffer._config.outputs(), self.batch_size, here)
        self.ways = [TimedCopies(0.0), LateReads(rows)]
        usual = copied_by_host(self.buffer, self.batch_size, self.ways[0])
        read = Route("", self.ways[1], rows.drawn.end, rows.places, rows.tensors)
        return Staging(self.buffer, self.batch_size, self.prefetch, Alternating([usual, read]))


@pytest.mark.parametrize("name", VIEWS)
def test_nothing_is_torn_by_explorers_that_overwrite_what_is_read(name):
    buffer = numbered_buffer(name, rows=128, calls=0)
    write = {"write": writing_rows} if name == "rows" else {}
    n = 200
    with Explorers(buffer, number=2, **write) as explorers:
        explorers.await_rows_of(*explorers.places, rows=128)
        for batch in AlternatingDataset(buffer, 8, steps=n):
            VIEWS[name].assert_exact(batch, explorers.streams)
        stats = buffer.stats()
        assert (stats.draws, stats.sampled) == (n, 8 * n)
        assert stats.redraws > 0, "nothing was overwritten while it was read"
        explorers.stop()


def test_batches_that_are_lost_have_not_been_drawn():
    """The row of the batch's first item is overwritten, and written again, between its draw and its reading."""
    spec = {"image": tr.Field((2000,), torch.uint8), "number": tr.Field((), torch.int64)}
    sampler = tr.Prioritized(beta=tr.Linear(0.0, 1.0, 100), weights="batch")
    buffer = tr.ReplayBuffer(spec, 64, sampler=sampler, seed=3)
    buffer.extend(image=np.zeros((64, 2000), np.uint8), number=np.arange(64), priority=np.arange(64) + 1.0)
    words = buffer._segment.column(-3)
    n = 7
    dataset = AlternatingDataset(buffer, 8, steps=n)
    given, lost = [], 0
    for k, batch in enumerate(dataset):
        eventually(lambda left=n - 1 - k: dataset.ready == min(2, left))  # or none would be read ahead
        given.append(batch["key"])
        p = batch["probability"].double()
        beta = -batch["weight"].double().min().log() / (p.max() / p.min()).log()
        assert k - 0.1 <= 100 * beta <= k + 3.1  # those ordered before a loss are two draws ahead, and the lost one
        for read in dataset.ways[1].pending():
            (slot, _), *_ = read.source[: 8 * 16].view(torch.int64).view(-1, 2).tolist()
            words[slot] += 1
            read.run()
            words[slot] -= 1
            lost += 1
    assert lost
    assert len(given) == n
    stats = buffer.stats()
    assert (stats.redraws, stats.draws, stats.sampled) == (8 * lost, n, 8 * n)


def images(n, first=0):
    numbers = np.arange(first, first + n)
    return {"image": np.repeat(numbers % 251, 1600).reshape(n, 40, 40).astype(np.uint8), "x": numbers}


def drawn_block(buffer, n):
    """What reads a batch of n, the batch as it was drawn, and its keys."""
    rows = LongRows(buffer._segment, buffer._config.outputs(), n, here)
    dataset = ReadDataset(buffer, n, steps=1)
    (batch,) = dataset
    return rows, dataset.copies.started[0].there.clone(), batch["key"]


@pytest.mark.parametrize("offset", [0, 1])
def test_one_row_overwritten_before_it_is_read_is_noticed(offset):
    buffer = tr.ReplayBuffer(spec(), 64, view=tr.Transitions(), seed=1)
    buffer.extend(**episode_of(number_of(0, next(n for n in itertools.count() if length_of(n) == 24))))
    rows, block, keys = drawn_block(buffer, 4)
    words, used = buffer._segment.column(-3), {int(key) + k for key in keys for k in (0, 1)}
    assert rows.read(block)
    for slot in (int(keys[2]) + offset, next(k for k in range(24) if k not in used)):
        before = words[slot].item()
        words[slot] = before + 1  # what a writer does first: the row is busy
        assert bool(rows.read(block)) == (slot not in used)
        words[slot] = before


def test_every_element_width_is_read():
    fields = {f"{size}": tr.Field((size,), torch.uint8) for size in (1024, 1028, 1030, 1031)}
    buffer = tr.ReplayBuffer(
        fields | {"mask": tr.Field((1032,), torch.bool), "half": tr.Field((515,), torch.bfloat16)}, 64
    )
    random = np.random.default_rng(0)
    values = {name: random.integers(0, 251, (64, int(name)), dtype=np.uint8) for name in fields}
    buffer.extend(**values, mask=random.random((64, 1032)) < 0.5, half=torch.randn(64, 515).bfloat16())
    (batch,) = ReadDataset(buffer, 32, steps=1)
    for name, field in buffer.storage.items():
        assert torch.equal(batch[name], field[batch["key"]].clone()), name


def test_places_are_for_the_drawing_thread_alone():
    buffer = tr.ReplayBuffer(IMAGE, 64)
    buffer.extend(**images(64))
    out = buffer.sample(8)
    out["image"] = torch.zeros(8, 1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="'image' is not uint8 of shape"):
        buffer.sample(8, out=out)


# The device's side.


def test_memory_is_described_to_cuda_as_it_lies():
    column = torch.arange(60, dtype=torch.int32).view(6, 10)[:, :3]
    described = cuda._Seen(column).__cuda_array_interface__
    assert described["data"] == (column.data_ptr(), False)
    assert (described["shape"], described["strides"], described["typestr"]) == ((6, 3), (40, 4), "<i4")


class Registered:
    def __init__(self):
        self.held = False

    def register(self, address, nbytes):
        self.held = True

    def unregister(self, address, readers):
        self.held, self.readers = False, set(readers)


def locked(owner):
    registry = Registered()
    return PageLock(owner, 0, 4096, registry), registry


def test_memory_is_let_go_when_nobody_gives_a_device_work_with_it():
    lock, registry = locked(SimpleNamespace)  # which stays
    with lock.in_use(DEVICE):
        ending = threading.Thread(target=lock.release)
        ending.start()
        ending.join(0.1)
        assert ending.is_alive()
        assert registry.held
    ending.join(60)
    assert not registry.held
    with pytest.raises(RuntimeError, match="the replay buffer is closed"), lock.in_use(DEVICE):
        pass


def simulated_reads(simulated, buffer, batch_size, answer=None):
    """What reads the buffer's long values on the simulated device, the copies, and what page-locks the memory."""
    rows = LongRows(buffer._segment, buffer._config.outputs(), batch_size, here)
    read = rows.read
    rows.read = lambda there: simulated.compute(lambda: read(there.plain) if answer is None else answer, (), torch.bool)
    lock, _ = locked(buffer)
    return rows, cuda.GatherCopies(torch.device("cpu"), rows, lock), lock


def test_a_signal_handler_may_close_the_buffer_in_the_midst_of_that():
    lock, registry = locked(SimpleNamespace)
    with lock.in_use(DEVICE):
        lock.release()  # as a handler does, in the same thread
        assert registry.held
    assert not registry.held
    assert registry.readers == {DEVICE}


class SimulatedReads(tr.ReplayDataset):
    """A dataset whose long values are read by the simulated device."""

    def _make_staging(self):
        rows, copies, _ = simulated_reads(cuda.torch, self.buffer, self.batch_size)
        return Staging(
            self.buffer,
            self.batch_size,
            self.prefetch,
            PathSelector([Route("", copies, rows.drawn.end, rows.places, rows.tensors)]),
        )


def tensors_of(batch):
    return {name: torch.from_numpy(values) for name, values in flat(batch).items()}


@pytest.mark.parametrize("seed", range(20))
def test_a_learner_on_the_device_reads_what_the_host_would_have_copied(monkeypatch, seed):
    simulated = SimulatedCuda(seed)
    monkeypatch.setattr(cuda, "torch", simulated)
    n, read = 30, []
    for batch in SimulatedReads(numbered_buffer("transitions"), 8, steps=n):
        read.append(simulated.read(tensors_of(batch)))
        del batch
        simulated.run(most=simulated.chance.randrange(8))
    simulated.run()
    assert_same(read, [tensors_of(batch) for batch in tr.ReplayDataset(numbered_buffer("transitions"), 8, steps=n)])
    blocks = [block for block in simulated.allocated if block.ndim]
    assert len(blocks) == n
    assert all(block.used_on == {simulated.main} for block in blocks)
    (side,) = {block.stream for block in blocks}
    assert side.priority < simulated.main.priority  # it goes before others


@pytest.mark.parametrize("answer", [False, True])
def test_whether_a_batch_is_intact_is_known_when_the_device_has_said_so(monkeypatch, answer):
    simulated = SimulatedCuda(0)
    monkeypatch.setattr(cuda, "torch", simulated)
    buffer = numbered_buffer("transitions")
    rows, copies, _ = simulated_reads(simulated, buffer, 8, torch.tensor(answer))
    copy = copies.start(torch.zeros(rows.drawn.end, dtype=torch.uint8))
    assert copy.intact() == answer
    assert simulated.waits == 1
    assert copy.intact() == answer
    assert simulated.waits == 1


def test_a_device_is_given_nothing_to_read_in_a_buffer_that_is_closed(monkeypatch):
    simulated = SimulatedCuda(0)
    monkeypatch.setattr(cuda, "torch", simulated)
    buffer = numbered_buffer("transitions")
    rows, copies, lock = simulated_reads(simulated, buffer, 8)
    copies.start(torch.zeros(rows.drawn.end, dtype=torch.uint8))
    lock.release()
    with pytest.raises(RuntimeError, match="the replay buffer is closed"):
        copies.start(torch.zeros(rows.drawn.end, dtype=torch.uint8))
