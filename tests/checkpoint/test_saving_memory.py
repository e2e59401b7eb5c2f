"""A save and a load take little memory beside the buffer, and are refused with the numbers where there is less."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked
from limited_memory import MIB, Machine, cgroup_limited_to, join, require_disk
from saved_rows import assert_rows_are_those_of_their_keys, filled, rows

import torchreplay as tr
from torchreplay.checkpoint import buffer_checkpoint
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.schema.config import Config
from torchreplay.schema.spec import ELEMENTS

NEED = 18 * MIB
"""What a save takes at most: three files of 4 MiB, and 4 MiB for all else; and the page tables of these buffers."""
KINDS = {"small rows": ((9,), 1_000_000), "frames": ((4, 84, 84), 3_600), "rows of 20 MB": ((20_000_000,), 5)}
"""Shapes and numbers of rows: 100 MB each, of fewer bytes where a slot has many beside its row."""


def buffer_of(kind):
    shape, n = KINDS[kind]
    buffer = tr.ReplayBuffer({"x": tr.Field(shape, np.uint8)}, n)
    piece = max(1, n // 50)
    for first in range(0, n, piece):
        keys = np.arange(first, first + piece).reshape(-1, *[1] * len(shape))
        buffer.extend(x=np.broadcast_to((keys % 251).astype(np.uint8), (piece, *shape)))
    return buffer


def assert_rows_tell_their_keys(buffer):
    keys = torch.linspace(0, buffer.capacity - 1, 5).long()
    batch = buffer.gather(keys)
    assert batch["key"].tolist() == keys.tolist()
    assert (batch["x"].reshape(5, -1) == (keys % 251)[:, None]).all()


def within(group, left, call):
    join(group, left)
    call()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_takes_little_memory_whatever_the_rows(kind, tmp_path):
    require_disk(tmp_path)
    with (
        buffer_of(kind) as buffer,
        cgroup_limited_to(1 << 40) as group,
        Forked(within, group, NEED, lambda: buffer.save(tmp_path)) as child,
    ):
        assert child.wait() == 0
    assert_rows_tell_their_keys(tr.ReplayBuffer.load(tmp_path))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_takes_little_memory_beside_the_buffer(kind, tmp_path):
    require_disk(tmp_path)
    with buffer_of(kind) as buffer:
        size = buffer.nbytes
        buffer.save(tmp_path)

    def load():
        assert len(tr.ReplayBuffer.load(tmp_path)) == KINDS[kind][1]

    files = 20_000_000 if kind == "rows of 20 MB" else 16 * MIB
    with cgroup_limited_to(1 << 40) as group, Forked(within, group, size + files + 6 * MIB, load) as child:
        assert child.wait() == 0
    assert_rows_tell_their_keys(tr.ReplayBuffer.load(tmp_path))


def refused(call, match, left, group):
    join(group, left)
    with pytest.raises(MemoryError, match=match):
        call()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("left", [6, 14])
def test_a_save_without_that_memory_is_refused_before_anything_is_written(left, tmp_path):
    require_disk(tmp_path)
    numbers = r"saving the replay buffer needs 1\d\.\d\d MiB of memory, and \d+\.\d\d MiB can still be had here"
    with buffer_of("frames") as buffer, cgroup_limited_to(1 << 40) as group:
        buffer.save(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        with Forked(refused, lambda: buffer.save(tmp_path), numbers, left * MIB, group) as child:
            assert child.wait() == 0
        assert sorted(tmp_path.rglob("*")) == before
    assert_rows_tell_their_keys(tr.ReplayBuffer.load(tmp_path))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("beside", [2, 12])
def test_a_load_without_memory_beside_the_buffer_is_refused(beside, tmp_path):
    require_disk(tmp_path)
    with buffer_of("frames") as buffer:
        size = buffer.nbytes
        buffer.save(tmp_path)
    numbers = r"replay buffer needs \d+\.\d\d MiB of memory, and \d+\.\d\d MiB can still be had here"
    with cgroup_limited_to(1 << 40) as group:
        call = (lambda: tr.ReplayBuffer.load(tmp_path)), numbers, size + beside * MIB, group
        with Forked(refused, *call) as child:
            assert child.wait() == 0


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = Machine(tmp_path / "machine", monkeypatch)
    machine.memory(1000 * MIB)
    return machine


def test_a_machine_without_memory_for_it_refuses_a_save_a_load_and_a_restore(machine, tmp_path):
    buffer, empty, directory = filled(5, 8), filled(0, 8), tmp_path / "saved"
    buffer.save(directory)
    machine.memory(3 * MIB)
    numbers = r"the replay buffer needs 4\.\d\d MiB of memory, and 3\.00 MiB can still be had here"
    with pytest.raises(MemoryError, match=f"saving {numbers}"):
        buffer.save(tmp_path / "another")
    assert not (tmp_path / "another").exists()
    with pytest.raises(MemoryError, match=f"loading {numbers}"):
        tr.ReplayBuffer.load(directory)
    with pytest.raises(MemoryError, match=f"loading {numbers}"):
        empty.restore(directory)
    machine.memory(10 * MIB)
    empty.restore(directory)
    assert_rows_are_those_of_their_keys(empty.gather(torch.arange(5)))


def test_a_shard_that_finds_no_memory_to_save_with_says_so(machine, tmp_path):
    def save():
        while not shard.save(str(tmp_path / "shard")):
            time.sleep(0.001)

    shard = Shard(0, Config.of({"x": tr.Field()}, 8, None, None, None), 1, None)
    shard.open()
    machine.memory(3 * MIB)
    with pytest.raises(MemoryError, match=r"saving the replay buffer needs 4\.\d\d MiB of memory, and 3\.00 MiB"):
        save()
    assert not (tmp_path / "shard").exists()
    machine.memory(10 * MIB)
    save()
    assert len(tr.ReplayBuffer.load(tmp_path / "shard")) == 0


def test_page_cache_in_use_does_not_keep_a_buffer_from_being_saved(machine, tmp_path):
    buffer = filled(5, 8)
    machine.in_cgroup("0::/box")
    machine.limit("box", 100 * MIB, 100 * MIB, active=20 * MIB)
    buffer.save(tmp_path / "saved")
    with pytest.raises(MemoryError, match=r"and 0\.0 KiB can still be had here"):
        filled(5, 8)


def test_a_buffer_whose_pages_this_process_has_not_touched_may_need_tables_for_them(machine, tmp_path):
    buffer = filled(5, 8)
    machine.memory(5 * MIB)
    buffer.save(tmp_path / "saved")
    large = type("Segment", (), {"nbytes": 4 << 30, "__getattr__": lambda _, name: getattr(buffer._segment, name)})()
    with pytest.raises(MemoryError, match=r"needs 12\.\d\d MiB of memory"):  # 8 bytes for each of 2^20 pages
        buffer_checkpoint.save(large, buffer._config, tmp_path / "another")
    machine.write("proc/self/status", "VmPTE: 8192 kB")
    machine.memory(MIB)
    with pytest.raises(MemoryError, match=r"needs 4\.\d\d MiB of memory, and 1\.00"):
        buffer_checkpoint.save(large, buffer._config, tmp_path / "another")


# Rows too long for a file are written piece by piece


@pytest.fixture
def long_rows(monkeypatch):
    """Has rows of some bytes taken for such."""
    monkeypatch.setattr(buffer_checkpoint, "SHARD_BYTES", 16)


@pytest.mark.usefixtures("long_rows")
def test_long_rows_come_back(tmp_path):
    spec = {str(dtype): tr.Field((3,), dtype) for dtype in ELEMENTS} | {"scalar": tr.Field()}
    buffer = tr.ReplayBuffer(spec, 20, sampler=tr.Prioritized(), seed=1)
    numbers = torch.arange(75).reshape(25, 3)
    values = {name: (numbers % 100).to(field.dtype) for name, field in spec.items()} | {"scalar": torch.arange(25.0)}
    buffer.extend(**values, priority=torch.arange(25.0) + 1)
    buffer.save(tmp_path)
    assert len(list(tmp_path.glob("rows-*/*"))) == 20
    loaded = tr.ReplayBuffer.load(tmp_path)
    ours, theirs = buffer.gather(torch.arange(25)), loaded.gather(torch.arange(25))
    assert ours["key"].tolist() == theirs["key"].tolist() == list(range(5, 25))
    for name in spec:
        assert torch.equal(ours[name].double(), theirs[name].double()), name
    assert loaded.stats().priority_total == buffer.stats().priority_total


@pytest.mark.usefixtures("long_rows")
@pytest.mark.parametrize("again", [False, True])
def test_a_long_row_that_is_overwritten_while_it_is_written_is_left_out(again, tmp_path, monkeypatch):
    buffer, write_shard, written = filled(20, 20), buffer_checkpoint.write_shard, []

    def overwriting(path, tensors, room):
        written.append(path)
        if len(written) == 4:
            buffer.extend(**rows(20, 20 if again else 4))  # slots 0 to 3, and all after them
        return write_shard(path, tensors, room)

    monkeypatch.setattr(buffer_checkpoint, "write_shard", overwriting)
    monkeypatch.setattr(buffer_checkpoint, "WRITES", 1)
    buffer.save(tmp_path)
    batch = tr.ReplayBuffer.load(tmp_path).gather(torch.arange(40))
    assert_rows_are_those_of_their_keys(batch)
    keys = batch["key"].tolist()
    assert 3 not in keys
    assert {0, 1} <= {*keys}
    assert len(keys) == len(list(tmp_path.glob("rows-*/*")))
    assert ({*range(26, 40)} if again else {*range(6, 20)}) <= {*keys}


def test_the_rows_of_a_spec_of_many_fields_are_saved(tmp_path):
    buffer = tr.ReplayBuffer({f"field {n}": tr.Field(dtype=torch.int32) for n in range(500)}, 40)
    buffer.extend(**{f"field {n}": torch.arange(40) + n for n in range(500)})
    buffer.save(tmp_path)
    batch = tr.ReplayBuffer.load(tmp_path).gather(torch.arange(40))
    assert all(torch.equal(batch[f"field {n}"], torch.arange(40, dtype=torch.int32) + n) for n in range(500))


def test_the_memory_of_a_save_is_gone_after_it(tmp_path):
    def used():
        return int(Path("/proc/self/statm").read_text().split()[0])

    with buffer_of("frames") as buffer:
        buffer.save(tmp_path / "first")
        before = used()
        buffer.save(tmp_path / "second")
        assert used() == before
