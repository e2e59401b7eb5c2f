"""Copies to and from a CUDA device: against a simulated one whose streams run in any order that CUDA allows, and where
there is a real one, on that."""

import itertools
import os
import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch
from delayed_draws import BATCH, ROWS, SPEC, assert_same, filled_buffer, td_of
from forked import Forked
from simulated_cuda import SimulatedCuda, SimulatedTensor, Stream

import torchreplay as tr
from torchreplay.cuda import copies as cuda
from torchreplay.cuda.pinned_memory import CudaRegistry, PageLock
from torchreplay.cuda.staging import Staging

SEEDS = range(20)


@pytest.fixture(autouse=True)
def no_memory_of_other_devices(monkeypatch):
    monkeypatch.setattr(cuda, "_released", defaultdict(list))


class SimulatedDataset(tr.ReplayDataset):
    """A dataset whose batches go to the simulated device."""

    def _make_staging(self):
        copies = cuda.DeviceCopies(torch.device("cpu"))
        limits = None if self.budget is None else self.buffer._sampler.limits(self.budget)
        return Staging(self.buffer._config, self.batch_size, self.prefetch, copies, limits)


def simulate(monkeypatch, seed):
    simulated = SimulatedCuda(seed)
    monkeypatch.setattr(cuda, "torch", simulated)
    return simulated


def read_batches(simulated, n=40, prefetch=2):
    """Has a learner on the device read `n` batches while the device works as it likes; returns what it read."""
    dataset = SimulatedDataset(filled_buffer(), BATCH, steps=n, prefetch=prefetch)
    read = []
    for batch in dataset:
        read.append(simulated.read(dict(batch.items())))
        del batch
        simulated.run(most=simulated.chance.randrange(8))
    simulated.run()
    return read


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_learner_on_the_device_reads_the_batches_drawn(monkeypatch, seed, prefetch):
    simulated = simulate(monkeypatch, seed)
    read = read_batches(simulated, prefetch=prefetch)
    assert_same(read, [dict(batch) for batch in tr.ReplayDataset(filled_buffer(), BATCH, steps=40, prefetch=prefetch)])
    assert len(simulated.allocated) == 40  # one block, and so one copy, for each batch
    side = {block.stream for block in simulated.allocated}
    assert simulated.main not in side
    assert len(side) == 1
    assert all(block.used_on == {simulated.main} for block in simulated.allocated)
    assert simulated.pinned <= prefetch + 4


@pytest.mark.parametrize("budget", [None, {"tokens": 60}], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_a_learner_on_the_device_reads_values_of_any_length(monkeypatch, seed, budget):
    simulated = simulate(monkeypatch, seed)
    read = []
    for batch in SimulatedDataset(text_buffer(), BATCH, steps=40, budget=budget):
        tensors = {name: batch[name] for name in ("tokens", "number", "weight")} | {"offsets": batch.offsets("tokens")}
        read.append((batch["key"], batch.lengths("tokens"), simulated.read(tensors)))
        del batch, tensors
        simulated.run(most=simulated.chance.randrange(12))
    simulated.run()
    for (key, lengths, on_device), batch in zip(
        read, tr.ReplayDataset(text_buffer(), BATCH, steps=40, budget=budget), strict=True
    ):
        assert_same((key, lengths), (batch["key"], batch.lengths("tokens")))
        assert_same(
            on_device,
            {name: batch[name] for name in ("tokens", "number", "weight")} | {"offsets": batch.offsets("tokens")},
        )
    assert len(simulated.allocated) == 2 * 40
    assert all(block.used_on == {simulated.main} for block in simulated.allocated)


def test_the_simulation_finds_a_learner_that_does_not_wait_for_the_copy(monkeypatch):
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    wrong = 0
    for seed in SEEDS:
        read = read_batches(simulate(monkeypatch, seed))
        wrong += any(not torch.equal(batch["number"], batch["key"]) for batch in read)
    assert wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_td_errors_come_back_as_they_were_when_they_were_fed_back(monkeypatch, seed):
    simulated = simulate(monkeypatch, seed)
    td = SimulatedTensor.new(simulated, (BATCH,), torch.float32)
    sent = []
    for k in range(20):
        expected = torch.from_numpy(td_of(k)).float()
        td.copy_(expected, non_blocking=True)  # the step, which always computes them in the same place
        sent.append((cuda.to_host(td), expected))
        simulated.run(most=simulated.chance.randrange(8))
        assert all(torch.equal(copy.values.plain, values) for copy, values in sent if copy.done())
    assert simulated.waits == 0
    for copy, values in sent:
        copy.wait()
        assert copy.done()
        assert torch.equal(copy.values.plain, values)


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_that_td_errors_came_in_is_used_again_once_they_are_read(monkeypatch, seed):
    simulated = simulate(monkeypatch, seed)
    td = SimulatedTensor.new(simulated, (BATCH,), torch.float32)
    for k in range(40):
        expected = torch.from_numpy(td_of(k)).float()
        td.copy_(expected, non_blocking=True)
        copy = cuda.to_host(td)
        assert not copy.done()
        copy.wait()
        assert torch.equal(copy.values.plain, expected)
        copy.release()
    assert simulated.pinned == 1
    fewer = SimulatedTensor.new(simulated, (BATCH - 1,), torch.float32)
    assert cuda.to_host(fewer).values.shape == fewer.shape


def test_memory_made_in_inference_mode_can_be_written_to_outside_of_it():
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # where nothing can be page-locked
        memory = cuda.page_locked((3,), torch.float32)
    memory.copy_(torch.ones(3))
    assert memory.tolist() == [1, 1, 1]


# Page-locking of a buffer's memory.


def text_buffer(rows=100):
    """Rows with as many tokens as their number says, all of which are the number."""
    spec = {"tokens": tr.Ragged(torch.int32), "number": tr.Field((), torch.int64)}
    buffer = tr.ReplayBuffer(spec, 256, ragged_bytes=1 << 18, seed=1)
    numbers = np.arange(rows)
    buffer.extend(tokens=[np.full(n % 23, n, np.int32) for n in numbers], number=numbers)
    return buffer


class Registered:
    """A registry that can be set to refuse."""

    def __init__(self, refusal=None):
        self.refusal, self.held = refusal, []

    def register(self, address, nbytes):
        if self.refusal is None:
            self.held.append((address, nbytes))
        return self.refusal

    def unregister(self, address):
        assert f"{address:x}-" in open("/proc/self/maps").read(), "it is unmapped already"  # noqa: SIM115
        self.held = [(start, nbytes) for start, nbytes in self.held if start != address]


def test_all_of_a_buffers_memory_is_locked_once_and_until_it_is_closed():
    buffer, registry = filled_buffer(), Registered()
    buffer._sampler.lock_pages(registry)
    buffer._sampler.lock_pages(registry)
    ((address, nbytes),) = registry.held
    assert nbytes == buffer.nbytes
    assert buffer._sampler._page_lock.held
    for tensor in buffer.storage.values():
        assert address <= tensor.data_ptr() < address + nbytes
    lock = buffer._sampler._page_lock
    buffer.close()
    assert registry.held == []
    assert not lock.held
    buffer.close()


def test_the_pages_of_values_of_any_length_are_locked_with_the_rest():
    buffer, registry = text_buffer(), Registered()
    buffer._sampler.lock_pages(registry)
    ((address, nbytes),) = registry.held
    maps = [line.split() for line in open("/proc/self/maps") if line.startswith(f"{address:x}-")]  # noqa: SIM115
    start, end = (int(place, 16) for place in maps[0][0].split("-"))
    assert (start, end - start) == (address, nbytes)  # there is no other mapping
    assert nbytes == buffer.nbytes > 1 << 18
    buffer.close()
    assert registry.held == []


def test_memory_that_nobody_closed_is_released_before_it_is_unmapped():
    buffer, registry = filled_buffer(), Registered()
    buffer._sampler.lock_pages(registry)
    assert registry.held
    del buffer
    assert registry.held == []


def test_a_refusal_is_one_warning_that_says_what_and_why():
    buffer, registry = filled_buffer(), Registered("out of memory, CUDA error 2")
    with pytest.warns(RuntimeWarning, match=r'pin="ring" cannot page-lock the 352.0 KiB .*out of memory, CUDA error 2'):
        buffer._sampler.lock_pages(registry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer._sampler.lock_pages(registry)
    assert not buffer._sampler._page_lock.held
    buffer.close()


def test_a_forked_child_leaves_the_registration_to_its_parent():
    buffer, registry = filled_buffer(), Registered()
    buffer._sampler.lock_pages(registry)

    def in_child():
        buffer.close()
        os._exit(len(registry.held))

    with Forked(in_child) as child:
        assert child.wait() == 1
    assert registry.held


def test_memory_for_batches_that_cannot_be_page_locked_is_ordinary_memory_and_a_warning(monkeypatch):
    class NoMore(SimulatedCuda):
        def empty(self, shape, dtype, device=None, pin_memory=False):
            if pin_memory:
                raise RuntimeError("CUDA error: out of memory\nand a long explanation")
            return super().empty(shape, dtype, device)

    simulated = NoMore(0)
    monkeypatch.setattr(cuda, "torch", simulated)
    with pytest.warns(RuntimeWarning, match=r"cannot be page-locked \(CUDA error: out of memory\)"):
        read = read_batches(simulated)
    assert_same(read, [dict(batch) for batch in tr.ReplayDataset(filled_buffer(), BATCH, steps=40)])
    with pytest.warns(RuntimeWarning, match="cannot be page-locked"):
        copy = cuda.to_host(SimulatedTensor.new(simulated, (BATCH,), torch.float32))
    assert copy.values.shape == (BATCH,)


# On a real device.


def image_buffer(rows, capacity, sampler=None):
    """Rows with an image of one value each, which is long enough to lie in an array of its own."""
    spec = SPEC | {"image": tr.Field((64, 64), torch.uint8)}
    buffer = tr.ReplayBuffer(spec, capacity, sampler=sampler or tr.Uniform(), seed=1)
    if rows:
        extend_images(buffer, 0, rows)
    return buffer


def extend_images(buffer, first, n):
    numbers = torch.arange(first, first + n)
    image = (numbers % 251).to(torch.uint8)[:, None, None].expand(-1, 64, 64)
    buffer.extend(number=numbers, obs=numbers[:, None].expand(-1, 4).float(), image=image)


def wrong_values(batch):
    """How many values of a batch are not those of its items, computed where they are."""
    wrong = (batch["image"] != (batch["number"] % 251).to(torch.uint8)[:, None, None]).sum()
    return wrong + (batch["obs"] != batch["number"][:, None]).sum()


@pytest.mark.gpu
@pytest.mark.parametrize("pin", ["staging", "ring", "off"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_on_the_gpu_are_those_on_the_cpu(prefetch, pin):
    expected = list(tr.ReplayDataset(filled_buffer(), BATCH, steps=100, prefetch=prefetch))
    given = list(tr.ReplayDataset(filled_buffer(), BATCH, steps=100, prefetch=prefetch, device="cuda", pin=pin))
    assert all(batch["obs"].is_cuda and not batch["key"].is_cuda for batch in given)
    assert_same([batch.to("cpu", non_blocking=False) for batch in given], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("pin", ["staging", "ring", "off"])
@pytest.mark.parametrize("budget", [None, {"tokens": 60}], ids=str)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_values_of_any_length_on_the_gpu_are_those_on_the_cpu(prefetch, budget, pin):
    expected = list(tr.ReplayDataset(text_buffer(), BATCH, steps=100, prefetch=prefetch, budget=budget))
    dataset = tr.ReplayDataset(
        text_buffer(), BATCH, steps=100, prefetch=prefetch, budget=budget, device="cuda", pin=pin
    )
    given = list(dataset)
    assert all(batch["tokens"].is_cuda and batch.offsets("tokens").is_cuda for batch in given)
    assert not any(batch.lengths("tokens").is_cuda for batch in given)
    assert_same([batch.to("cpu", non_blocking=False) for batch in given], expected)


@pytest.mark.gpu
def test_nothing_in_a_step_with_values_of_any_length_waits_for_the_gpu():
    batches = iter(tr.ReplayDataset(text_buffer(), BATCH, device="cuda", budget={"tokens": 400}))
    for batch in itertools.islice(batches, 20):
        batch.padded("tokens").sum()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in itertools.islice(batches, 20):
            batch.padded("tokens").sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_batches_stay_right_beside_a_learner_that_keeps_the_gpu_busy():
    buffer = image_buffer(4096, 4096)
    matrix, wrong = torch.randn(2048, 2048, device="cuda"), torch.zeros((), device="cuda", dtype=torch.int64)
    for batch in tr.ReplayDataset(buffer, 512, steps=200, device="cuda"):
        matrix = torch.nn.functional.normalize(matrix @ matrix)
        wrong += wrong_values(batch)
        del batch  # its block is free for another copy while the kernels that read it are queued
    assert wrong.item() == 0


@pytest.mark.gpu
def test_a_batch_belongs_to_the_stream_on_which_it_was_handed_out():
    stream = torch.cuda.Stream()
    batches = iter(tr.ReplayDataset(filled_buffer(), BATCH, device="cuda"))
    for _ in range(50):
        with torch.cuda.stream(stream):
            batch = next(batches)
            same = (batch["obs"][:, 0] == batch["number"]).all()
        stream.synchronize()
        assert same.item()


@pytest.mark.gpu
def test_batches_of_long_values_from_a_page_locked_ring_are_those_on_the_cpu():
    expected = list(tr.ReplayDataset(image_buffer(4096, 8192), 64, steps=100))
    given = list(tr.ReplayDataset(image_buffer(4096, 8192), 64, steps=100, device="cuda", pin="ring"))
    assert_same([batch.to("cpu", non_blocking=False) for batch in given], expected)


@pytest.mark.gpu
def test_nothing_that_the_gpu_gets_is_torn_by_a_writer_that_laps_the_ring():
    buffer = image_buffer(512, 512)

    def write():
        for first in itertools.count(512, 64):
            extend_images(buffer, first, 64)

    with Forked(write) as writer:
        wrong = torch.zeros((), device="cuda", dtype=torch.int64)
        for batch in tr.ReplayDataset(buffer, 64, steps=2000, device="cuda", pin="ring"):
            wrong += wrong_values(batch)
            assert torch.equal(batch["number"].cpu(), batch["key"])
        writer.kill()
    assert wrong.item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("pin", ["staging", "ring"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_queue_hands_the_gpu_every_item_once_whole_and_in_order(prefetch, pin):
    queue, n = image_buffer(0, 512, tr.Fifo()), 40 * 512

    def write():
        for first in range(0, n, 64):
            extend_images(queue, first, 64)

    with Forked(write) as writer:
        wrong, numbers = torch.zeros((), device="cuda", dtype=torch.int64), []
        for batch in tr.ReplayDataset(queue, 64, steps=n // 64, prefetch=prefetch, device="cuda", pin=pin):
            wrong += wrong_values(batch)
            numbers.append(batch["number"])
            del batch  # done with: the writer overwrites its rows while the kernels that read it are queued
        assert writer.wait() == 0
    assert wrong.item() == 0
    assert torch.equal(torch.cat(numbers).cpu(), torch.arange(n))


@pytest.mark.gpu
def test_a_ring_that_is_closed_while_batches_are_copied_is_an_error_and_no_more():
    buffer = image_buffer(4096, 8192)
    batches = iter(tr.ReplayDataset(buffer, 512, device="cuda", pin="ring"))
    for _ in itertools.islice(batches, 30):
        pass
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
    assert (torch.ones(3, device="cuda") + 1).sum().item() == 6  # the device goes on


@pytest.mark.gpu
def test_nothing_in_a_step_waits_for_the_gpu():
    buffer = filled_buffer()
    batches = iter(tr.ReplayDataset(buffer, BATCH, device="cuda"))
    for batch in itertools.islice(batches, 20):  # slots are made, and kernels loaded
        buffer.update_priorities(batch, batch["obs"].sum(1))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in itertools.islice(batches, 20):
            buffer.update_priorities(batch, batch["obs"].sum(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    buffer.flush()


@pytest.mark.gpu
def test_feedback_is_given_back_while_the_gpu_still_computes_it():
    buffer = filled_buffer()
    td = torch.full((2,), 2.0, device="cuda")
    buffer.update_priorities([5, 6], td)
    buffer.flush()  # kernels are loaded
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    td.fill_(7.0)
    buffer.update_priorities([0, 1], td)
    td.fill_(9.0)  # too late for them
    assert buffer.stats().updated == 2
    buffer.flush()
    assert buffer.stats().updated == 4
    assert buffer._segment.column(-1)[:2].round().tolist() == [7, 7]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_feedback_of_every_dtype_and_layout_arrives(dtype):
    buffer = filled_buffer()
    td = torch.arange(8, device="cuda").view(4, 2).to(dtype)[:, 1].requires_grad_(dtype.is_floating_point)
    buffer.update_priorities([0, 1, 2, 3], td)
    buffer.flush()
    assert buffer._segment.column(-1)[:4].round().tolist() == [1, 3, 5, 7]


@pytest.mark.gpu
def test_the_buffers_own_memory_is_page_locked_until_it_is_closed():
    buffer = filled_buffer()
    storage = buffer.storage["obs"]
    assert not storage.is_pinned()
    next(iter(tr.ReplayDataset(buffer, BATCH, device="cuda", pin="ring")))
    assert storage.is_pinned()
    there = storage.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu()[:ROWS], storage[:ROWS])
    buffer.close()
    assert not storage.is_pinned()


@pytest.mark.gpu
def test_memory_refused_a_second_time_leaves_no_error_behind():
    buffer, registry = filled_buffer(), CudaRegistry(torch.device("cuda"))
    buffer._sampler.lock_pages(registry)
    with pytest.warns(RuntimeWarning, match="CUDA error"):
        PageLock(buffer, buffer._segment.address, buffer.nbytes, registry)
    assert torch.ones(3, device="cuda").sum().item() == 3
    buffer.close()


@pytest.mark.gpu
def test_a_child_forked_in_the_midst_of_an_iteration_writes_and_ends_in_order():
    buffer = filled_buffer()
    dataset = tr.ReplayDataset(buffer, BATCH, device="cuda")
    iterator = iter(dataset)
    batch = next(iterator)
    buffer.update_priorities(batch, batch["obs"].sum(1))

    def in_child():
        nonlocal iterator
        iterator = None
        buffer.extend(number=torch.zeros(8, dtype=torch.int64), obs=torch.zeros(8, 4))
        buffer.sample(BATCH)
        buffer.close()

    with Forked(in_child) as child:
        assert child.wait() == 0
    next(iterator)
    buffer.flush()
