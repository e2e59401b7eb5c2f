"""Damaged checkpoints: each is an error that names what is damaged, and nothing of it gets into a buffer."""

import errno
import math
import os
import random
import resource
import shutil

import numpy as np
import pytest
import torch
from forked import Forked, shared_counters
from saved_rows import assert_rows_are_those_of_their_keys, change_rows, filled, tell, told_by

import torchreplay as tr
from torchreplay.files.source import stored_rows
from torchreplay.files.verify import verify


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


# What a file says is checked before it is believed, also where its checksums are right.

STEP = {
    "obs": tr.Field((), torch.int64),
    "action": tr.Field((), torch.bool),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}
VIEWS = {
    "rows": tr.Rows(),
    "transitions": tr.Transitions(n_step=3, stack={"obs": 2}),
    "sequences": tr.Sequences(length=4, stride=2, burn_in=1),
    "across": tr.Sequences(length=4, stride=1, across_episodes=True),
}


def episodes_of(view, sampler=None):
    """Rows that come from two streams, whose episodes are of several lengths."""
    buffer = tr.ReplayBuffer(STEP, 64, view=view, sampler=sampler or tr.Prioritized(), seed=5)
    if isinstance(view, tr.Rows):
        flags = torch.zeros(50, dtype=torch.bool)
        numbers = torch.arange(50)
        buffer.extend(obs=numbers, action=flags, reward=numbers, terminated=flags, truncated=flags)
        return buffer
    with buffer.writer(2) as writer:
        writer.reset(obs=[0, 0])
        for step in range(1, 30):
            ends = [step % 7 == 0, step % 5 == 0]
            writer.step(obs=[step] * 2, action=ends, reward=[step] * 2, terminated=ends, truncated=[False] * 2)
    buffer.update_priorities(buffer.sample(32), torch.rand(32))
    return buffer


def circle(tensors):
    """Every row follows the one after it, and the last the first."""
    order = tensors["/key"].argsort()
    keys = tensors["/key"][order]
    tensors["/link"][order] = (keys.roll(-1) + 1) << 16
    tensors["/step"][order] = 1
    return tensors


@pytest.mark.timeout(60)
@pytest.mark.parametrize("view", ["transitions", "sequences", "across"])
def test_links_that_lead_in_a_circle_are_refused(view, tmp_path):
    episodes_of(VIEWS[view]).save(tmp_path)
    change_rows(tmp_path, circle)
    with pytest.raises(tr.CheckpointError, match="does not follow its episode"):
        tr.ReplayBuffer.load(tmp_path)


COUNTS = {"head": 0, "inserted": 1, "sampled": 2, "draws": 6, "streams": 8, "max_raw": 9, "priority_change": 10}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_raw", value) for value in (1e300, 1e39, math.inf, math.nan, -1.0, "1", None, True)),
        *(("priority_change", value) for value in (math.inf, -1.0)),
        *(
            (name, value)
            for name in ("head", "inserted", "sampled", "draws", "streams")
            for value in (-1, 2**64 - 1, 0.5)
        ),
        ("draws", 2**47),
        ("streams", 2**32),
    ],
)
def test_counters_that_no_buffer_has_are_refused(name, value, tmp_path):
    filled(5, 8).save(tmp_path)
    told = told_by(tmp_path)
    told["counts"][COUNTS[name]] = value
    tell(tmp_path, told)
    with pytest.raises(tr.CheckpointError):
        tr.ReplayBuffer.load(tmp_path)


def test_a_bool_of_another_byte_than_0_and_1_is_loaded_as_true(tmp_path):
    episodes_of(VIEWS["rows"]).save(tmp_path)

    def change(tensors):
        tensors["action"].view(torch.uint8)[7] = 2
        return tensors

    change_rows(tmp_path, change)
    assert set(tr.ReplayBuffer.load(tmp_path).storage["action"].view(torch.uint8).tolist()) <= {0, 1}


def test_under_a_uniform_sampler_all_items_that_a_checkpoint_has_are_drawn_alike(tmp_path):
    episodes_of(VIEWS["rows"], tr.Uniform()).save(tmp_path / "saved")
    change_rows(tmp_path / "saved", lambda tensors: tensors | {"/leaf": torch.arange(50.0)})
    with tr.ReplayBuffer.load(tmp_path / "saved", path=tmp_path / "ring") as buffer:
        assert set(buffer.gather(buffer.keys())["probability"].tolist()) == {np.float32(1 / buffer.num_items)}
    tr.ReplayBuffer.open(tmp_path / "ring")


WHOLE = [0, 1, -1, 2, 7, 8, 15, 16, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**47, 2**48, 2**62, 2**63 - 1]
REAL = [0.0, -1.0, 1.0, 1e-45, 1e38, 1e300, math.inf, -math.inf, math.nan]


def change_something(directory, chance):
    """Changes one to three numbers of a checkpoint; its checksums fit."""
    told = told_by(directory)
    for _ in range(chance.randint(0, 2)):
        what = chance.choice(["counts", "counts", "counts", "step", "seed", "stream"])
        value = chance.choice([*WHOLE, *REAL, 2**64 - 1])
        if what == "counts":
            told["counts"][chance.randrange(len(told["counts"]))] = value
        else:
            told[what] = value
    tell(directory, told)

    def change(tensors):
        for _ in range(chance.randint(0, 3)):
            name = chance.choice(["/key", "/leaf", "/link", "/link", "/step", "/priority"])
            column = tensors[name]
            at = chance.randrange(len(column))
            if column.is_floating_point():
                column[at] = torch.tensor(chance.choice(REAL), dtype=torch.float64).to(column.dtype)
            elif chance.random() < 0.5:
                column[at] = column[chance.randrange(len(column))]
            else:
                value = chance.choice([*WHOLE, chance.randrange(70) << 16 | chance.randrange(16)])
                column[at] = torch.tensor(value).to(column.dtype)
        return tensors

    change_rows(directory, change)


def load_changed(view, sampler, rounds, seed, directory, tally):
    """In a process of its own: its memory is measured."""
    chance, saved = random.Random(seed), directory / "saved"
    original = episodes_of(view, sampler)
    for number in range(rounds + 1):
        tally[0] = number
        original.save(saved)
        if number:
            change_something(saved, chance)
        try:
            loaded = tr.ReplayBuffer.load(saved, path=directory / "ring")
        except tr.CheckpointError:
            tally[1] += 1
            continue
        assert_all_is_in_order(loaded, directory)
        (directory / "ring").unlink()
        if not number:  # by now it has all the memory that a load takes
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 64 << 10, "KiB"


def assert_all_is_in_order(buffer, directory):
    keys = buffer.keys()
    assert len(keys) == buffer.num_items
    assert torch.equal(buffer.gather(keys, missing="raise")["key"], keys)
    buffer.copy().close()
    buffer.save(directory / "again")
    if len(keys):
        buffer.update_priorities(buffer.sample(16, timeout=0), torch.ones(16))
    buffer.close()
    assert verify(stored_rows(directory / "ring")).problems == []
    assert verify(stored_rows(directory / "again")).problems == []
    with tr.ReplayBuffer.open(directory / "ring") as again:
        assert torch.equal(again.keys(), keys)


def load_changed_everywhere(view, rounds, directory):
    for sampler in (tr.Prioritized(), tr.Uniform()):
        tally = shared_counters(2)
        with Forked(load_changed, VIEWS[view], sampler, rounds, 7, directory, tally) as process:
            assert process.wait(600) == 0, f"round {tally[0]}"
        assert 0 < tally[1] < rounds


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("view", VIEWS)
def test_a_checkpoint_whose_numbers_were_changed_is_refused_or_makes_a_buffer_in_order(view, tmp_path):
    load_changed_everywhere(view, 40, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("view", VIEWS)
def test_a_checkpoint_whose_numbers_were_changed_in_3000_ways_is_refused_or_makes_a_buffer_in_order(view, tmp_path):
    load_changed_everywhere(view, 3000, tmp_path)
