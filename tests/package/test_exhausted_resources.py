"""A process that may open no more files, or map no more memory, gets such an error: an intact file counts as intact."""

import _testcapi
import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked, shared_counters
from limited_memory import MIB
from saved_rows import assert_rows_are_those_of_their_keys, filled

import torchreplay as tr
from torchreplay import _C
from torchreplay.checkpoint import directory as checkpoint_directory
from torchreplay.checkpoint import safetensors_io

SPEC = {"x": tr.Field((1000,)), "number": tr.Field((), torch.int64)}
ROWS = 3000
CALLS = ("load", "restore", "open", "attach", "make", "make in a file", "save")


class Stage:
    """What calls need: a buffer, a checkpoint of it, and a file that holds one."""

    def __init__(self, directory):
        self.directory, self.path = directory, directory / "replay.bin"
        self.buffer, self.empty = tr.ReplayBuffer(SPEC, ROWS), tr.ReplayBuffer(SPEC, ROWS)
        self.handle = self.buffer.handle()
        with tr.ReplayBuffer(SPEC, ROWS, path=self.path) as in_file:
            for buffer in (self.buffer, in_file):
                buffer.extend(x=np.zeros((ROWS, 1000), np.float32), number=np.arange(ROWS))
        self.buffer.save(directory / "saved")

    def make(self, call):
        """Makes a call in a child process."""
        if call == "load":
            assert len(tr.ReplayBuffer.load(self.directory / "saved")) == ROWS
        elif call == "restore":
            self.empty.restore(self.directory / "saved")
        elif call == "open":
            assert len(tr.ReplayBuffer.open(self.path)) == ROWS
        elif call == "attach":
            assert len(tr.ReplayBuffer.attach(self.handle)) == ROWS
        elif call == "make":
            tr.ReplayBuffer(SPEC, ROWS)
        elif call == "make in a file":
            tr.ReplayBuffer(SPEC, ROWS, path=self.directory / f"{os.getpid()}.bin")
        else:
            self.buffer.save(self.directory / "another")


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def count_outcome(stage, call, limit, left, expected, outcomes):
    """Counts [what worked, what was refused as expected]; all else ends the child with an error."""
    limit(left)
    error = None
    try:
        stage.make(call)
    except expected as refusal:
        error = refusal
    assert "damaged" not in str(error)
    assert not isinstance(error, tr.CheckpointError | ConnectionError)
    assert error is None or any(character.isdigit() for character in str(error))
    outcomes[error is not None] += 1


def sweep(stage, call, limit, amounts, expected):
    """Makes a call under one limit after the other, each in a new child."""
    outcomes = shared_counters(2)
    for left in amounts:
        with Forked(count_outcome, stage, call, limit, left, expected, outcomes) as child:
            assert child.wait() == 0, f"with {left} left"
        if stage.empty.stats().size:
            stage.empty = tr.ReplayBuffer(SPEC, ROWS)
    assert outcomes[1] > 0, "the test is about what is refused"
    assert outcomes[0] > 0, "the last of these limits is no limit"


def limit_descriptors(left):
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (fd := os.dup(0)) < highest:
        pass  # until none is free below the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1 + left,) * 2)


def limit_addresses(left):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + left,) * 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", CALLS)
def test_a_process_that_may_open_no_more_files_gets_an_os_error(call, stage):
    sweep(stage, call, limit_descriptors, range(12), OSError)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", CALLS)
def test_a_process_that_may_map_no_more_memory_gets_a_memory_error_with_numbers(call, stage):
    amounts = [*range(0, 48 * MIB, 3 * MIB), 1 << 30]
    sweep(stage, call, limit_addresses, amounts, MemoryError)


def test_a_draw_that_finds_no_memory_says_how_much_it_asked_for(stage):
    def draw():
        limit_addresses(100 * MIB)
        # Beside its fields a row of a batch has a key of 8 bytes, a weight and a probability of 4.
        size = 80_000 * (sum(field.nbytes for field in SPEC.values()) + 16) / MIB
        with pytest.raises(MemoryError, match=rf"^{size:.2f} MiB of memory were asked for, and cannot be had$"):
            stage.buffer.sample(80_000)
        assert len(stage.buffer.sample(100)["number"]) == 100

    with Forked(draw) as child:
        assert child.wait() == 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["checkpoint.json", "00000.safetensors"])
def test_a_file_that_cannot_be_read_is_no_damaged_one(name, number, tmp_path, monkeypatch):
    def opened(path, flags):
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        return opens(path, flags)

    filled(5, 8).save(tmp_path)
    opens = safetensors_io.open_regular
    for module in (safetensors_io, checkpoint_directory):
        monkeypatch.setattr(module, "open_regular", opened)
    with pytest.raises(OSError, match=f"{os.strerror(number)}.*{name}") as raised:
        tr.ReplayBuffer.load(tmp_path)
    assert raised.value.errno == number
    monkeypatch.undo()
    assert_rows_are_those_of_their_keys(tr.ReplayBuffer.load(tmp_path).gather(torch.arange(5)))


def test_a_missing_directory_of_rows_is_damage(tmp_path):
    filled(5, 8).save(tmp_path)
    (rows,) = tmp_path.glob("rows-*")
    for path in rows.iterdir():
        path.unlink()
    rows.rmdir()
    for _ in range(2):
        with pytest.raises(tr.CheckpointError, match=r"00000\.safetensors is damaged"):
            tr.ReplayBuffer.load(tmp_path)
        rows.touch()  # a file in its place
    with pytest.raises(tr.CheckpointError, match=r"checkpoint\.json is missing"):
        tr.ReplayBuffer.load(rows)


def describe_rows_without_memory(refused):
    fields = [(("observation", f"camera {i}"), 0, (2,)) for i in range(3)]
    view = *tr.Rows().native(), 0, 0, 0
    for n in range(200):
        _testcapi.set_nomemory(n, n + 1)  # the n-th request fails
        try:
            _C.segment_layout(10, fields, view, 0)
        except MemoryError:
            refused[0] += 1
        finally:
            _testcapi.remove_mem_hooks()


def test_an_interpreter_that_has_no_memory_for_the_names_of_fields_gets_a_memory_error():
    refused = shared_counters(1)
    with Forked(describe_rows_without_memory, refused) as process:
        assert process.wait() == 0
    assert refused[0] > 3
