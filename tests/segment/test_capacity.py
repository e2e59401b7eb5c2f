"""Too little memory is an error with the numbers, before anything is touched; a small /dev/shm is no limit."""

import ctypes
import os
import re
from pathlib import Path

import numpy as np
import pytest
from belongings import descriptors
from forked import LIBC, Forked
from limited_memory import MIB, Machine, cgroup_limited_to

import torchreplay as tr
from torchreplay.segment import reservation

CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000
SPEC = {"x": tr.Field((MIB,), np.uint8)}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = Machine(tmp_path, monkeypatch)
    machine.memory(1000 * MIB)
    return machine


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_memory_that_is_free_within_the_limits_of_the_cgroup_can_be_had(machine):
    assert reservation.available_memory() == 1000 * MIB
    machine.in_cgroup("0::/pod/box")
    machine.limit("pod/box", 500 * MIB, 200 * MIB)
    assert reservation.available_memory() == 300 * MIB
    machine.limit("pod/box", 500 * MIB, 200 * MIB, inactive=50 * MIB)  # a cache gives way
    assert reservation.available_memory() == 350 * MIB
    machine.limit("pod", 400 * MIB, 390 * MIB)  # of the pod around it
    assert reservation.available_memory() == 10 * MIB
    machine.limit("pod", "max", 390 * MIB)
    assert reservation.available_memory() == 350 * MIB
    machine.in_cgroup("4:memory:/box\n0::/")
    machine.limit("memory/box", 100 * MIB, 120 * MIB, names=V1)  # over its limit
    assert reservation.available_memory() == 0


@pytest.mark.parametrize("short_of", ["memory", "cgroup"])
def test_too_little_of_it_is_an_error_with_the_numbers_before_a_file_is_made(machine, monkeypatch, short_of):
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("something was touched"))
    if short_of == "memory":
        machine.memory(30 * MIB)
    else:
        machine.in_cgroup("0::/box")
        machine.limit("box", 40 * MIB, 10 * MIB)
    numbers = r"MiB of memory, and 30\.00 MiB can still be had here \(free memory and cgroup limits\)"
    with pytest.raises(MemoryError, match=numbers) as error:
        tr.ReplayBuffer(SPEC, 31)
    # The rows, room for one that is being rewritten, and less than half a row of what is beside them.
    assert 32 <= float(re.search(r"needs ([\d.]+) MiB", str(error.value)).group(1)) < 32.5
    monkeypatch.undo()
    tr.ReplayBuffer(SPEC, 31)


def test_memory_that_is_gone_when_it_is_reserved_is_a_memory_error_and_not_a_crash(monkeypatch):
    before = descriptors()

    def reserve_nothing(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", reserve_nothing)
    with pytest.raises(MemoryError, match=r"replay buffer needs .* of memory: No space left on device"):
        tr.ReplayBuffer(SPEC, 2)
    assert descriptors() <= before


def test_the_kernels_own_limit_of_a_cgroup_is_told_before_its_killer_comes():
    def use(group):
        (group / "cgroup.procs").write_text(str(os.getpid()))
        numbers = r"needs 0\.39 GiB of memory, and (0\.\d\d) GiB can still be had here"
        with pytest.raises(MemoryError, match=numbers) as error:
            tr.ReplayBuffer(SPEC, 400)
        # All of the limit but the little that this child has taken since its fork.
        assert 0.25 < float(re.search(numbers, str(error.value))[1]) <= 0.29
        buffer = tr.ReplayBuffer(SPEC, 200, seed=0)
        for k in range(200):
            buffer.extend(x=np.full((1, MIB), k, np.uint8))
        assert buffer.sample(4)["x"].float().std(1).tolist() == [0.0] * 4
        with pytest.raises(MemoryError):
            tr.ReplayBuffer(SPEC, 200)

    with cgroup_limited_to(300 * MIB) as group, Forked(use, group) as child:
        assert child.wait() == 0


def with_small_dev_shm(body):
    """Runs `body` where /dev/shm is a file system of 64 MB, as in containers; where that is forbidden, as it is, and
    shared with others. `body` is told what the files there take, which only its own /dev/shm can tell."""
    alone = CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
    if LIBC.unshare(alone) == 0:
        assert LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
        assert LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, ctypes.c_char_p(b"size=64m")) == 0
        free = os.statvfs("/dev/shm")
        assert free.f_blocks * free.f_frsize == 64 * MIB
        body(taken_of_dev_shm)
    else:
        body(lambda: None)


def taken_of_dev_shm():
    return os.statvfs("/dev/shm").f_bfree, sorted(os.listdir("/dev/shm"))


def test_a_buffer_larger_than_dev_shm_works_and_takes_nothing_of_it():
    rows = 100

    def use(taken):
        before = taken()
        buffer = tr.ReplayBuffer(SPEC, rows, seed=0)
        for k in range(rows):
            buffer.extend(x=np.full((1, MIB), k, np.uint8))
        assert buffer.nbytes > 64 * MIB
        assert buffer.sample(4)["x"].float().std(1).tolist() == [0.0] * 4
        assert os.fstat(buffer.handle().fd).st_dev != Path("/dev/shm").stat().st_dev
        assert taken() == before

    with Forked(with_small_dev_shm, use) as child:
        assert child.wait() == 0
