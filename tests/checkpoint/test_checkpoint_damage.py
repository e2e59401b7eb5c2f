"""Damaged checkpoints: each is an error that names what is damaged, and nothing of it gets into a buffer."""

import errno
import os
import random
import shutil

import pytest
import torch
from forked import Forked, shared_counters
from saved_rows import assert_rows_are_those_of_their_keys, filled, tell, told_by

import torchreplay as tr
from torchreplay.files.source import stored_rows


def flipped(content, position, mask=0x41):
    return content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :]


def load_flipped(path, positions, masks, outcomes):
    """Loads with each byte changed in turn. In a process of its own: a crash must be seen."""
    content = path.read_bytes()
    root = next(parent for parent in path.parents if (parent / "checkpoint.json").exists())
    for position in positions:
        for mask in masks:
            path.write_bytes(flipped(content, position, mask))
            try:
                loaded = tr.ReplayBuffer.load(root)
            except tr.CheckpointError as error:
                outcomes[0] += path.name in str(error)
                continue
            assert_rows_are_those_of_their_keys(loaded.gather(torch.arange(300)))
            outcomes[1] += len(loaded) == 300


def flip(path, positions, masks):
    """Returns how many changes of a byte were refused; all others lost nothing."""
    outcomes = shared_counters(2)
    with Forked(load_flipped, path, positions, masks, outcomes) as process:
        assert process.wait(1200) == 0
    assert sum(outcomes) == len(positions) * len(masks)
    return outcomes[0]


def description_of(directory):
    filled(300, 300).save(directory)
    return directory / "checkpoint.json"


def test_any_damaged_byte_of_the_description_is_an_error_or_no_loss(tmp_path):
    path = description_of(tmp_path)
    size = path.stat().st_size
    assert flip(path, range(size), [0x41]) > 0.9 * size


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_any_damaged_bit_of_the_description_is_an_error_or_no_loss(tmp_path):
    path = description_of(tmp_path)
    flip(path, range(path.stat().st_size), [1 << bit for bit in range(8)])


def damage_rows(directory, flips, seed):
    filled(300, 300).save(directory)
    (path,) = directory.glob("rows-*/*.safetensors")
    size, chance = path.stat().st_size, random.Random(seed)
    positions = [0, 7, 8, size - 1, *(chance.randrange(size) for _ in range(flips))]
    assert flip(path, positions, [0x41]) == len(positions)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_any_of_20_000_damaged_bytes_of_the_rows_is_an_error(tmp_path):
    damage_rows(tmp_path, 20_000, seed=4)


def test_damaged_missing_and_shortened_files_of_rows_are_errors_that_name_them(tmp_path):
    damage_rows(tmp_path, 100, seed=3)
    shutil.rmtree(tmp_path)
    filled(300, 300).save(tmp_path)
    (path,) = tmp_path.glob("rows-*/*.safetensors")
    content = path.read_bytes()
    for damaged in (b"", content[:-1], content + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(tr.CheckpointError, match=path.name):
            tr.ReplayBuffer.load(tmp_path)
    path.unlink()
    with pytest.raises(tr.CheckpointError, match=path.name):
        tr.ReplayBuffer.load(tmp_path)


@pytest.mark.timeout(20)
def test_pipes_in_the_place_of_files_are_errors_and_not_waited_for(tmp_path):
    filled(5, 8).save(tmp_path)
    (path,) = tmp_path.glob("rows-*/*.safetensors")
    path.unlink()
    os.mkfifo(path)
    told = told_by(tmp_path)
    tell(tmp_path, told | {"shards": [[name, 0, 0] for name, _, _ in told["shards"]]})
    with pytest.raises(tr.CheckpointError, match="no regular file"):
        tr.ReplayBuffer.load(tmp_path)
    with pytest.raises(tr.CheckpointError, match="no regular file"):
        stored_rows(tmp_path)
    (tmp_path / "checkpoint.json").unlink()
    os.mkfifo(tmp_path / "checkpoint.json")
    with pytest.raises(tr.CheckpointError, match="no regular file"):
        tr.ReplayBuffer.load(tmp_path)


@pytest.mark.timeout(20)
def test_a_save_that_fails_beside_a_pipe_does_not_wait_for_it(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "checkpoint.json")
    buffer = filled(5, 8)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", no_room)
        with pytest.raises(OSError, match="No space left"):
            buffer.save(tmp_path)
    assert os.listdir(tmp_path) == ["checkpoint.json"]
    buffer.save(tmp_path)
    assert len(tr.ReplayBuffer.load(tmp_path)) == 5


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"crc32": 0, "checkpoint": "{}"}'])
def test_what_is_no_checkpoint_is_an_error(content, tmp_path):
    with pytest.raises(tr.CheckpointError, match=r"checkpoint\.json is missing"):
        tr.ReplayBuffer.load(tmp_path)
    (tmp_path / "checkpoint.json").write_bytes(content)
    with pytest.raises(tr.CheckpointError, match="no intact replay checkpoint"):
        tr.ReplayBuffer.load(tmp_path)


def test_a_checkpoint_of_another_format_says_which(tmp_path):
    filled(5, 8).save(tmp_path)
    tell(tmp_path, told_by(tmp_path) | {"format": 99})
    with pytest.raises(tr.CheckpointError, match="format 99"):
        tr.ReplayBuffer.load(tmp_path)
