"""What comes from outside: handles, segments and checkpoints that say anything, and other users."""

import copyreg
import fcntl
import io
import json
import os
import pickle
import socket
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from belongings import descriptors
from forked import Forked

import torchreplay as tr

SPEC = {"x": tr.Field((2,)), "deep": {"n": tr.Field((), torch.int16)}}
NOBODY = 65534


def make():
    return tr.ReplayBuffer(SPEC, 10, seed=0, sampler=tr.Prioritized(beta=tr.LinearSchedule(0.4, 1.0, 10)))


def handle_of(fd, **parts):
    """A handle of a file that this process has open."""
    status = os.fstat(fd)
    return replace(make().handle(), pid=os.getpid(), fd=fd, inode=status.st_ino, size=status.st_size, **parts)


# Handles


def classes_named_by(data):
    names = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            names.add(f"{module}.{name}")
            return super().find_class(module, name)

    Reader(io.BytesIO(data)).load()
    return names


def test_unpickling_a_handle_or_a_buffer_calls_nothing_but_attach():
    buffer = make()
    assert classes_named_by(pickle.dumps(buffer.handle())) <= {
        "torchreplay.segment.handle.Handle",
        *(f"{made.__module__}.{made.__name__}" for made in (copyreg.__newobj__,)),
    }
    assert classes_named_by(pickle.dumps(buffer)) - classes_named_by(pickle.dumps(buffer.handle())) <= {
        "torchreplay.buffer.replay_buffer.ReplayBuffer",
        "torchreplay.buffer.replay_buffer.attached",
    }


@pytest.mark.parametrize("name", ["pid", "fd", "inode", "size", "nonce"])
@pytest.mark.parametrize("value", [-1, 2**64, 1.5, True, None, "self", "../../etc/passwd", b"1", [1]], ids=str)
def test_a_handle_with_a_part_that_no_handle_has_is_a_value_error(name, value):
    buffer = make()
    with pytest.raises(ValueError, match=f"the handle's {name} is"):
        tr.ReplayBuffer.attach(replace(buffer.handle(), **{name: value}))


@pytest.mark.parametrize("name", ["pid", "fd", "inode", "size", "nonce"])
@pytest.mark.parametrize("value", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_handle_with_a_wrong_number_is_an_attach_error(name, value):
    buffer = make()
    with pytest.raises(tr.AttachError):
        tr.ReplayBuffer.attach(replace(buffer.handle(), **{name: value}))


@pytest.mark.parametrize("machine", ["00000000-0000-0000-0000-000000000000", "", None, 7, "../.."])
def test_a_handle_of_another_machine_is_an_attach_error_that_says_where_to_run(machine):
    with pytest.raises(tr.AttachError, match=r"on another machine .* run this process where"):
        tr.ReplayBuffer.attach(replace(make().handle(), machine=machine))


@pytest.mark.parametrize("given", [None, 5, "handle", (1, 2), ...], ids=str)
def test_what_is_no_handle_is_a_type_error(given):
    with pytest.raises(TypeError, match=r"expected a torchreplay\.Handle"):
        tr.ReplayBuffer.attach(given)


def test_a_handle_without_its_parts_is_an_error():
    with pytest.raises(ValueError, match="pid is None"):
        tr.ReplayBuffer.attach(tr.Handle.__new__(tr.Handle))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", ".", "/proc/self/maps", __file__])
def test_a_handle_of_another_file_is_an_attach_error(path):
    fd = os.open(path, os.O_RDONLY)
    before = descriptors()
    with pytest.raises(tr.AttachError):
        tr.ReplayBuffer.attach(handle_of(fd))
    assert descriptors() <= before
    os.close(fd)


def test_a_handle_of_a_pipe_or_a_socket_is_an_attach_error_at_once():
    reader, writer = os.pipe()
    with socket.socket() as plug:
        for fd in (reader, writer, plug.fileno()):
            with pytest.raises(tr.AttachError):
                tr.ReplayBuffer.attach(handle_of(fd))
    os.close(reader)
    os.close(writer)


def test_a_handle_of_a_file_that_another_program_has_locked_is_an_attach_error_and_no_hang(tmp_path, monkeypatch):
    monkeypatch.setattr("torchreplay.segment.handle.FILE_LOCK_SECONDS", 0.1)
    with (tmp_path / "locked").open("w+b") as file:
        file.truncate(4096)
        fcntl.flock(file, fcntl.LOCK_EX)
        before = descriptors()
        with pytest.raises(tr.AttachError, match=r"its file is locked by a process that .* \(waited 0\.\d s for"):
            tr.ReplayBuffer.attach(handle_of(file.fileno()))
        assert descriptors() <= before


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, 2**64, "64", None], ids=str)
def test_weights_of_a_size_that_their_memory_has_not_are_refused(nbytes):
    attach, (handle, entries, *_) = tr.SharedWeights(torch.nn.Linear(2, 2)).__reduce__()
    with pytest.raises((tr.AttachError, TypeError)):
        attach(handle, entries, nbytes)


def test_weights_are_not_attached_as_a_buffer_nor_a_buffer_as_weights():
    weights = tr.SharedWeights(torch.nn.Linear(2, 2))
    attach, (handle, entries, nbytes, _) = weights.__reduce__()
    with pytest.raises(tr.AttachError, match="not a replay segment"):
        tr.ReplayBuffer.attach(handle)
    buffer = make()
    with pytest.raises(tr.AttachError, match="another size"):
        attach(buffer.handle(), entries, nbytes)
    # Weights take a page, and their bytes in whole pages twice: such a size must be possible.
    buffer = next(b for n in range(10, 1000, 50) if (b := tr.ReplayBuffer(SPEC, n)).nbytes % 8192 == 4096)
    with pytest.raises(tr.AttachError, match="other shared weights"):
        attach(buffer.handle(), entries, (buffer.nbytes - 4096) // 2)


# Other users


def test_processes_of_other_users_are_not_open():
    if os.geteuid() != 0:  # then the first process is another user's
        with pytest.raises(tr.AttachError, match="only the same user"):
            tr.ReplayBuffer.attach(replace(make().handle(), pid=1))
        return
    buffer = make()
    handle = buffer.handle()

    def attach():
        os.setuid(NOBODY)
        with pytest.raises(tr.AttachError, match="only the same user"):
            tr.ReplayBuffer.attach(handle)

    with Forked(attach) as child:
        assert child.wait() == 0


def test_memory_that_belongs_to_another_user_is_refused_even_where_it_can_be_opened(monkeypatch):
    buffer = make()
    handle = buffer.handle()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(tr.AttachError, match=rf"belongs to another user \(uid {uid}, here {uid + 1}\)"):
        tr.ReplayBuffer.attach(handle)


def test_memory_and_files_are_open_to_their_owner_only(tmp_path):
    umask = os.umask(0)
    try:
        buffer = make()
        buffer.extend(x=np.zeros((2, 2)), deep={"n": np.zeros(2, int)})
        buffer.save(tmp_path)
        weights = tr.SharedWeights(torch.nn.Linear(2, 2))
    finally:
        os.umask(umask)
    saved = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(saved) == 2
    for file in (buffer.handle().fd, weights._native.fd, *saved):
        assert os.stat(file).st_mode & 0o777 == 0o600, file


# The segment's description of itself


def described(buffer):
    """The file of a segment, where its description lies, and the description."""
    file = open(f"/proc/self/fd/{buffer.handle().fd}", "r+b", buffering=0)  # noqa: SIM115
    text = buffer._segment.text.encode()
    return file, os.pread(file.fileno(), 1 << 20, 0).index(text), text


def test_a_changed_byte_of_the_description_is_an_attach_error_or_makes_no_difference_to_the_rows():
    buffer = make()
    file, at, text = described(buffer)
    refused = 0
    with file:
        for position in range(len(text)):
            os.pwrite(file.fileno(), bytes([text[position] ^ 1]), at + position)
            try:
                attached = tr.ReplayBuffer.attach(buffer.handle())
            except tr.AttachError:
                refused += 1
            else:
                assert attached.capacity == 10
                assert [f.nbytes for f in attached._config.fields.values()] == [8, 2]
            os.pwrite(file.fileno(), text[position : position + 1], at + position)
    assert refused > len(text) // 2
    assert tr.ReplayBuffer.attach(buffer.handle()).spec == SPEC


@pytest.mark.parametrize(
    "change",
    [
        {"capacity": 11},
        {"capacity": -1},
        {"capacity": 2**70},
        {"capacity": "10"},
        {"capacity": None},
        {"fields": []},
        {"fields": {}},
        {"fields": 7},
        {"fields": [[["x"], 99, [2]]]},
        {"fields": [[["x"], 11, [2]], [["x"], 6, []]]},
        {"fields": [[["x"], 11, [2]], [["x", "n"], 6, []]]},
        {"fields": [[["x"], 11, [2]], [[1], 6, []]]},
        {"fields": [[["x"], 11, [2**80]]]},
        {"view": {"kind": "Sequences", "length": 2}},
        {"view": {"kind": "Uniform"}},
        {"view": {"kind": "object"}},
        {"view": {"kind": []}},
        {"view": {}},
        {"view": None},
        {"sampler": {"kind": "Rows"}},
        {"sampler": {"kind": "Prioritized", "alpha": "much"}},
        {"sampler": {"kind": "Prioritized", "beta": {"kind": "Uniform"}}},
        {"sampler": {"kind": "Prioritized", "__class__": 1}},
        {"limiter": [0]},
    ],
    ids=str,
)
def test_a_description_of_something_else_is_an_attach_error(change):
    buffer = make()
    file, at, text = described(buffer)
    changed = json.dumps(json.loads(text) | change, separators=(",", ":")).encode()
    assert len(changed) <= len(text)
    with file:
        os.pwrite(file.fileno(), changed.ljust(len(text)), at)
    with pytest.raises(tr.AttachError):
        tr.ReplayBuffer.attach(buffer.handle())


@pytest.mark.parametrize("byte", [b"[", b"{", b"9", b"\0", b"\xff", b" "])
def test_a_description_that_is_no_description_is_an_attach_error(byte):
    buffer = tr.ReplayBuffer({"x" * 5000: tr.Field()}, 10)  # long enough for brackets too deep to read
    file, at, text = described(buffer)
    with file:
        os.pwrite(file.fileno(), byte * len(text), at)
    with pytest.raises(tr.AttachError):
        tr.ReplayBuffer.attach(buffer.handle())


def test_memory_with_a_limiter_that_is_none_is_an_attach_error():
    buffer = make()
    buffer._segment.set_limiter((0, 0.0, 0.0, 0.0, 0.0))
    with pytest.raises(tr.AttachError, match="min_size is 0"):
        tr.ReplayBuffer.attach(buffer.handle())


# Checkpoints whose checksums fit


def saved(directory, **change):
    """Saves three rows, and changes what the description says."""
    buffer = make()
    buffer.extend(x=np.zeros((3, 2)), deep={"n": np.zeros(3, int)})
    buffer.save(directory)
    path = directory / "checkpoint.json"
    body = json.dumps(json.loads(json.loads(path.read_text())["checkpoint"]) | change)
    path.write_text(json.dumps({"crc32": zlib.crc32(body.encode()), "checkpoint": body}))


def counts(head=3, max_raw=1.0, grid=128):
    return [head, *[3] * 7, 1, max_raw, 0.0, 0, 0, grid, 0, 0, *[0] * 9]


def test_a_checkpoint_that_says_other_counts_than_it_was_saved_with_is_loaded(tmp_path):
    saved(tmp_path, counts=counts())
    assert tr.ReplayBuffer.load(tmp_path).stats().priority_max == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"counts": []},
        {"counts": [0] * 8},
        {"counts": counts(head=-1)},
        {"counts": counts(head=2**64)},
        {"counts": counts(head=2**48)},
        {"counts": counts(max_raw=float("nan"))},
        {"counts": counts(head="3")},
        {"counts": counts(grid=-1)},
        {"counts": counts(grid=2**63)},
        {"seed": -1},
        {"seed": 2**64},
        {"step": 0.5},
        {"config": {}},
        {"config": None},
        {"shards": [["/etc/passwd", 1, 1]]},
        {"shards": [["rows-0/../../x.safetensors", 1, 1]]},
        {"shards": [[None, 1, 1]]},
        {"shards": 5},
    ],
    ids=str,
)
def test_a_checkpoint_that_says_what_none_says_is_a_checkpoint_error(change, tmp_path):
    saved(tmp_path, **change)
    with pytest.raises(tr.CheckpointError):
        tr.ReplayBuffer.load(tmp_path)


@pytest.mark.parametrize("absolute", [False, True])
def test_rows_outside_of_the_checkpoints_directory_are_refused_though_they_are_intact(absolute, tmp_path):
    inner = tmp_path / "inner"
    saved(inner)
    assert len(tr.ReplayBuffer.load(inner)) == 3
    (rows,) = inner.glob("rows-*/*.safetensors")
    content = rows.read_bytes()
    outside = rows.rename(tmp_path / "outside.safetensors")
    name = str(outside) if absolute else f"../{outside.name}"
    saved(inner, shards=[[name, len(content), zlib.crc32(content)]])
    with pytest.raises(tr.CheckpointError, match="is no file of rows"):
        tr.ReplayBuffer.load(inner)


@pytest.mark.parametrize("name", ["checkpoint.json", "rows-0/00000.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "directory"])
def test_a_checkpoint_of_something_else_than_files_is_a_checkpoint_error(name, kind, tmp_path):
    saved(tmp_path, shards=[["rows-0/00000.safetensors", 100, 0]])
    path: Path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(kind)
    with pytest.raises(tr.CheckpointError):
        tr.ReplayBuffer.load(tmp_path)
