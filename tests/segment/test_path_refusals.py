"""Files that cannot be made or opened as buffers: they are refused in a sentence, and stay as they are."""

import os
import pickle
import socket
import stat
import struct
import subprocess
import sys

import pytest
from file_buffers import BOOT, image_of_a_closed_buffer, image_of_a_killed_process, make, poke, rows

import torchreplay as tr
from torchreplay.files.source import stored_rows


def test_a_path_that_is_taken_names_open_and_stays_as_it_is(path):
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"ReplayBuffer\.open"):
        make(path)
    assert path.read_text() == "mine"


def test_a_directory_is_no_file_for_a_buffer(tmp_path):
    with pytest.raises(FileExistsError, match="this is a directory: name a file in it"):
        make(tmp_path)


def test_a_missing_directory_and_a_missing_file_are_said_to_be_missing(path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make(path.parent / "nowhere" / "replay.bin")
    with pytest.raises(FileNotFoundError, match=path.name):
        tr.ReplayBuffer.open(path)
    with pytest.raises(IsADirectoryError):
        tr.ReplayBuffer.open(path.parent)


def test_a_disk_with_too_little_room_is_an_error_with_the_numbers_and_leaves_nothing(path):
    with pytest.raises(OSError, match=r"needs [\d.]+ GiB, and the disk has [\d.]+ GiB left") as caught:
        make(path, capacity=1 << 31)
    assert caught.value.errno == 28
    assert list(path.parent.iterdir()) == []


def test_a_filesystem_without_byte_locks_is_an_error_and_leaves_nothing(path, monkeypatch):
    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    with pytest.raises(OSError, match="no locks of single bytes"):
        make(path)
    assert list(path.parent.iterdir()) == []


def test_only_the_owner_can_read_the_file(path):
    before = os.umask(0)
    try:
        make(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_of_another_user_is_refused(path, monkeypatch):
    make(path).close()
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="only the user who owns"):
        tr.ReplayBuffer.open(path)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 8192, bytes(1 << 20)])
def test_what_is_no_buffer_is_refused(content, path):
    path.write_bytes(content)
    with pytest.raises(tr.CheckpointError, match=r"too short|not a replay segment"):
        tr.ReplayBuffer.open(path)


@pytest.mark.timeout(20)
def test_pipes_sockets_and_devices_are_refused_and_not_waited_for(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    os.mkfifo("pipe")
    socket.socket(socket.AF_UNIX).bind("socket")
    for name in ("pipe", "socket", "/dev/null"):
        with pytest.raises(tr.CheckpointError, match="no regular file"):
            tr.ReplayBuffer.open(name)
        with pytest.raises(tr.CheckpointError, match="no regular file"):
            stored_rows(name)


def test_a_file_of_another_version_says_which(path):
    make(path).close()
    poke(path, 8, struct.pack("Q", 99))
    with pytest.raises(tr.CheckpointError, match="format version 99"):
        tr.ReplayBuffer.open(path)


def test_a_file_of_another_layout_is_refused(path):
    make(path).close()
    poke(path, 16, struct.pack("Q", 99))
    with pytest.raises(tr.CheckpointError, match="incompatible build"):
        tr.ReplayBuffer.open(path)


def test_a_shortened_or_lengthened_file_is_refused(path):
    buffer = make(path)
    buffer.extend(**rows(0, 50))
    size = buffer.nbytes
    buffer.close()
    for other in (size - 1, size - 4096, size // 2, 4096, 4095, 1, 0, size + 1):
        copy = path.with_name("copy.bin")
        copy.write_bytes(path.read_bytes()[:other].ljust(other, b"\0"))
        with pytest.raises(tr.CheckpointError, match=r"bytes long"):
            tr.ReplayBuffer.open(copy)


def test_after_a_restart_of_the_machine_a_closed_file_opens_and_one_that_was_in_use_does_not(path):
    image_of_a_closed_buffer(path)
    poke(path, BOOT, struct.pack("Q", 12345))
    assert len(tr.ReplayBuffer.open(path)) == 50
    path.unlink()
    image_of_a_killed_process(path)
    poke(path, BOOT, struct.pack("Q", 12345))
    for _ in range(2):
        with pytest.raises(tr.CheckpointError, match="machine was restarted while the buffer was in use"):
            tr.ReplayBuffer.open(path)


LAST_USER = """
import pickle, sys, torch
buffer = pickle.load(sys.stdin.buffer)
print(buffer.path, flush=True)
sys.stdin.buffer.read(1)
writer = buffer.writer()
writer.append(number=0, wide={"image": torch.zeros(600, dtype=torch.int32)})
batch = buffer.sample(2)
"""


@pytest.mark.slow
def test_a_process_that_got_a_pickle_and_outlives_the_others_puts_the_file_to_rest_when_it_ends(path):
    buffer = make(path)
    with subprocess.Popen([sys.executable, "-c", LAST_USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(pickle.dumps(buffer))
        process.stdin.flush()
        assert process.stdout.readline().decode().strip() == str(path) == str(buffer.path)
        buffer.close()
        process.stdin.close()
        assert process.wait() == 0
    poke(path, BOOT, struct.pack("Q", 12345))
    assert len(tr.ReplayBuffer.open(path)) == 1
    assert make(None).path is None
