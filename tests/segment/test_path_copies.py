"""Copies of a buffer's file: two files are never the same buffer, and what was copied in use is refused."""

import errno
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from file_buffers import image_of_a_closed_buffer, image_of_a_killed_process, make, rows
from namespaces import unshared
from paths import import_path

import torchreplay as tr
from torchreplay import _C


def assert_rows_are_those_of_their_keys(buffer, n):
    batch = buffer.gather(torch.arange(n))
    expected = rows(0, n)
    assert torch.equal(batch["key"], torch.arange(n))
    assert torch.equal(batch["number"], expected["number"])
    assert torch.equal(batch["wide"]["image"], expected["wide"]["image"])


@pytest.fixture(params=["copied", "sparse", "from a backup of the same name", "to another filesystem"])
def copied(request, path):
    """A way to copy a file: returns where the copy is."""

    def copy(source):
        other = path.with_name("copy.bin")
        if request.param == "sparse":
            subprocess.run(["cp", "--sparse=always", source, other], check=True)
        elif request.param == "from a backup of the same name":
            shutil.copy2(source, path.with_name("backup"))
            source.unlink()
            other = shutil.copy2(path.with_name("backup"), source)
        elif request.param == "to another filesystem":
            other = request.getfixturevalue("in_memory") / "copy.bin"
            shutil.copy(source, other)
        else:
            shutil.copy(source, other)
        return other

    return copy


@pytest.fixture
def in_memory(tmp_path_factory):
    """A directory that is on another filesystem than others, where /tmp is none in memory."""
    place = f"/dev/shm/torchreplay_test_{os.getpid()}_copies"
    os.mkdir(place)
    yield type(tmp_path_factory.getbasetemp())(place)
    shutil.rmtree(place)


def test_a_copy_of_a_closed_file_is_another_buffer_with_the_same_rows(path, copied):
    image_of_a_closed_buffer(path)
    with tr.ReplayBuffer.open(path) as original:
        batch = original.sample(8)
    with tr.ReplayBuffer.open(copied(path)) as other:
        assert_rows_are_those_of_their_keys(other, 50)
        with pytest.raises(ValueError, match="another buffer"):
            other.update_priorities(batch, torch.ones(8))
        again = other.sample(8)
        place = other.path
    with tr.ReplayBuffer.open(place) as other:  # it is the same one from now on
        other.update_priorities(again, torch.ones(8))
        assert_rows_are_those_of_their_keys(other, 50)


def test_a_copy_of_a_file_in_use_is_refused_and_names_the_way(path, copied):
    image_of_a_killed_process(path)
    with pytest.raises(tr.CheckpointError, match=r"copy that was made while the buffer was in use.*save\(directory\)"):
        tr.ReplayBuffer.open(copied(path))


def test_a_copy_of_a_file_that_a_live_process_has_open_is_refused_and_the_process_goes_on(path):
    with make(path) as buffer:
        buffer.extend(**rows(0, 50))
        shutil.copy(path, path.with_name("copy.bin"))
        with pytest.raises(tr.CheckpointError, match="copy that was made while the buffer was in use"):
            tr.ReplayBuffer.open(path.with_name("copy.bin"))
        with tr.ReplayBuffer.open(path) as same:
            same.update_priorities(buffer.sample(8), torch.ones(8))


def test_a_file_keeps_its_identity_under_another_name_and_when_it_is_opened_again(path):
    image_of_a_killed_process(path)
    path.rename(moved := path.with_name("moved.bin"))
    with tr.ReplayBuffer.open(moved) as buffer:
        batch, nonce = buffer.sample(8), buffer.handle().nonce
    moved.rename(path)
    with tr.ReplayBuffer.open(path) as buffer:
        assert buffer.handle().nonce == nonce
        buffer.update_priorities(batch, torch.ones(8))
        assert pickle.loads(pickle.dumps(buffer)).num_items == 50


def test_a_sparse_copy_has_its_room_on_the_disk_before_it_is_used(path):
    image_of_a_closed_buffer(path)
    sparse = path.with_name("sparse.bin")
    subprocess.run(["cp", "--sparse=always", path, sparse], check=True)
    size = path.stat().st_size
    assert sparse.stat().st_blocks * 512 < size
    with tr.ReplayBuffer.open(sparse) as buffer:
        assert sparse.stat().st_blocks * 512 >= size
        assert_rows_are_those_of_their_keys(buffer, 50)


def test_a_sparse_copy_that_finds_no_room_is_an_error_with_the_numbers(path, monkeypatch):
    image_of_a_closed_buffer(path)

    def no_room(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_C, "repair_file", no_room)
    with pytest.raises(OSError, match=r"has holes.*disk holds [\d.]+ .iB, and has [\d.]+ .iB left") as caught:
        tr.ReplayBuffer.open(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


FULL = """
import os, subprocess, sys
import torchreplay as tr
directory, original = sys.argv[1:]
size = os.stat(original).st_size
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size - (64 << 10)}", "none", directory], check=True)
subprocess.run(["cp", "--sparse=always", original, f"{directory}/ring"], check=True)
try:
    tr.ReplayBuffer.open(f"{directory}/ring")
except OSError as error:
    print(error.errno)
"""


@pytest.mark.slow
def test_a_sparse_copy_on_a_full_disk_kills_nobody(path, tmp_path):
    image_of_a_closed_buffer(path)
    (tmp_path / "mount").mkdir()
    command = [*unshared("--mount"), sys.executable, "-c", FULL, str(tmp_path / "mount"), str(path)]
    environment = os.environ | {"PYTHONPATH": import_path()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, str(errno.ENOSPC)), done.stderr


def test_a_closed_writer_that_somebody_still_has_keeps_no_file_in_use(tmp_path):
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 10, path=tmp_path / "first")
    with buffer.writer() as writer:
        for k in range(3):
            writer.append(x=k)
    buffer.close()
    shutil.copy(tmp_path / "first", tmp_path / "second")
    with tr.ReplayBuffer.open(tmp_path / "second") as copy:
        assert copy.gather(torch.arange(3))["x"].tolist() == [0, 1, 2]
    assert (writer.closed, writer.rows, writer._completed) == (True, 3, 3)
    assert repr(writer) == "Writer(closed)"
    for use in (
        lambda: writer.extend(x=[1.0]),
        lambda: writer.step(x=1.0),
        lambda: writer.reset(x=1.0),
        writer.end_episode,
        writer.flush,
        writer._admitted,
        lambda: writer._truncate([0]),
        lambda: writer._relay(None, 1, None, None, None, 0),
    ):
        with pytest.raises(ValueError, match="the writer is closed"):
            use()
    writer._depart()
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.append(x=3.0)
    writer.close()
