"""`torchreplay inspect` says what is in a file, finds damage, and changes nothing."""

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys

import pytest
import stored_buffers
import torch
from click.testing import CliRunner
from forked import Forked, eventually, shared_counters
from namespaces import unshared
from saved_rows import change_rows

import torchreplay as tr
from torchreplay.cli import main

FORMS = ["file", "directory", "archive"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return stored_buffers.make(tmp_path_factory.mktemp("stored"))


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def card(*arguments):
    result = run("inspect", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.parametrize("form", FORMS)
def test_the_card_has_the_counts_of_the_buffer_itself(stored, form):
    told, stats = card(stored.forms[form]), stored.buffer.stats()
    assert (told["rows"], told["capacity"]) == (stats.size, stats.capacity)
    assert (told["oldest_key"], told["newest_key"]) == (int(stored.keys[0]), int(stored.keys[-1]))
    assert told["next_key"] == stored.buffer.next_key == 70
    for name in ("inserted", "sampled", "updated", "stale_updates", "draws", "priority_max"):
        assert told[name] == getattr(stats, name), name
    assert told["seed"] == 1
    assert told["view"] == str(stored.buffer.view)
    assert told["sampler"] == str(stored.buffer.sampler)


@pytest.mark.parametrize("form", FORMS)
def test_the_card_has_every_field_with_shape_dtype_and_bytes(stored, form):
    fields = {
        field["name"]: (field["shape"], field["dtype"], field["nbytes"]) for field in card(stored.forms[form])["fields"]
    }
    assert fields["obs"] == ([12, 10], "uint8", 120)
    assert fields["state/hidden"] == ([3], "bfloat16", 6)
    assert fields["terminated"] == ([], "bool", 1)
    assert list(fields) == ["obs", "state/hidden", "action", "reward", "terminated", "truncated"]


def test_the_size_is_that_on_the_disk(stored):
    live, directory = stored.forms["file"], stored.forms["directory"]
    assert card(live)["nbytes"] == live.stat().st_size == stored.buffer.nbytes
    assert card(directory)["nbytes"] == sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


@pytest.mark.parametrize("form", FORMS)
def test_verify_finds_nothing_wrong_with_what_is_whole(stored, form):
    found = card("--verify", stored.forms[form])["verified"]
    assert found == {"rows": stored_buffers.CAPACITY, "changed": 0, "problems": [], "remarks": []}


def test_a_live_file_is_not_changed_and_its_process_goes_on(stored):
    path = stored.forms["file"]
    learners = stored.buffer.stats().learners
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    assert "in use by 1 process" in card("--verify", path)["state"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert stored.buffer.stats().learners == learners


@pytest.mark.slow
def test_a_live_file_is_in_use_in_a_pid_namespace_that_does_not_see_its_processes(stored):
    program = [*unshared("--pid", "--mount-proc"), sys.executable, "-m", "torchreplay", "inspect", "--json"]
    result = subprocess.run([*program, stored.forms["file"]], capture_output=True, timeout=120)
    assert json.loads(result.stdout)["state"] == "in use, by processes that cannot be named from here"


def test_a_live_file_is_in_use_where_the_kernel_lists_its_locks_under_another_device(stored, monkeypatch):
    """As it does on btrfs and overlay."""
    monkeypatch.setattr("torchreplay.files.buffer_rows.holders_of", lambda path: [])
    assert card(stored.forms["file"])["state"] == "in use, by processes that cannot be named from here"


def test_a_file_that_was_closed_and_one_whose_processes_died_say_so(tmp_path):
    closed, died = tmp_path / "closed.bin", tmp_path / "died.bin"
    with tr.ReplayBuffer({"x": tr.Field()}, 10, path=closed) as buffer:
        buffer.extend(x=torch.zeros(4))

    def die():
        buffer = tr.ReplayBuffer({"x": tr.Field()}, 10, path=died)
        buffer.extend(x=torch.zeros(4))
        os._exit(0)

    assert Forked(die).wait() == 0
    assert card(closed)["state"].startswith("closed in order")
    assert "ReplayBuffer.open repairs it" in card(died)["state"]
    content = died.read_bytes()
    assert card("--verify", died)["rows"] == 4
    assert died.read_bytes() == content


def write_without_end(path, made):
    spec = {"obs": tr.Field((20,)), "terminated": tr.Field((), bool), "truncated": tr.Field((), bool)}
    buffer = tr.ReplayBuffer(spec, 64, view=tr.Sequences(2), path=path)
    flags = torch.arange(1, 6) == 5
    while True:
        buffer.extend(obs=torch.rand(6, 20), terminated=flags, truncated=torch.zeros(5, dtype=bool))
        made[0] = 1


def test_a_ring_that_turns_meanwhile_has_no_false_alarms(tmp_path):
    made, path = shared_counters(1), tmp_path / "b.bin"
    with Forked(write_without_end, path, made):
        eventually(lambda: made[0])
        for _ in range(30):
            found = card("--verify", path)["verified"]
            assert found["problems"] == []
            assert found["rows"] <= 64


def test_text_has_the_card_and_the_verdict(stored):
    result = run("inspect", "--verify", stored.forms["directory"])
    assert result.exit_code == 0
    for text in ("checkpoint, format 8", "50 of 50", "20 to 69", "state/hidden", "intact"):
        assert text in result.output


def test_the_checkpoint_of_a_sharded_buffer_names_its_shards(stored, tmp_path):
    """Its directory has a checkpoint of each shard: two levels below, as `torchreplay.ray` saves them."""
    (tmp_path / "checkpoint.json").write_text("{}")
    for number in range(2):
        shutil.copytree(stored.forms["directory"], tmp_path / "shards-00" / str(number))
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    assert (
        f"2 shards of a ShardedReplay: each is a checkpoint of its own, such as {tmp_path}/shards-00/0" in result.output
    )
    assert card(tmp_path / "shards-00" / "0")["rows"] == stored_buffers.CAPACITY


def save_without_end(directory, saved):
    with tr.ReplayBuffer({"x": tr.Field((4,))}, 1000) as buffer:
        buffer.extend(x=torch.zeros(1000, 4))
        while True:
            buffer.save(directory)
            saved[0] += 1


def test_a_checkpoint_that_is_saved_to_meanwhile_is_read_or_asked_for_again(tmp_path):
    saved, outcomes = shared_counters(1), set()
    with Forked(save_without_end, tmp_path / "checkpoint", saved):
        eventually(lambda: saved[0])
        for _ in range(30):
            result = run("inspect", "--verify", tmp_path / "checkpoint")
            outcomes.add(result.exit_code)
            assert result.exit_code == 0 or "try again" in " ".join(result.output.split()), result.output
    assert 0 in outcomes


# Damage


@pytest.fixture
def damaged(stored, tmp_path):
    """Returns the path of a copy of a form, with some bytes changed."""

    def copy(form, change):
        path = tmp_path / form
        (shutil.copytree if form == "directory" else shutil.copy)(stored.forms[form], path)
        change(path)
        return path

    return copy


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


@pytest.mark.parametrize("form", ["directory", "archive"])
def test_one_flipped_byte_of_a_checkpoint_is_found_by_verify_and_names_the_file(damaged, form):
    def change(path):
        shard = next(path.rglob("*.safetensors")) if form == "directory" else path
        flip(shard, shard.stat().st_size // 2)

    result = run("inspect", "--verify", damaged(form, change))
    assert result.exit_code == 1
    assert "00000.safetensors: its checksum is" in result.output.replace("\n", "")


def poke(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def record_of(path, value, header):
    """Returns where the row begins whose first field is this float64, after so many bytes of header."""
    content = path.read_bytes()
    place = content.index(struct.pack("<d", value))
    assert content.count(struct.pack("<d", value)) == 1
    return place - header


def test_a_key_that_was_never_issued_is_found(tmp_path):
    path = tmp_path / "b.bin"
    with tr.ReplayBuffer({"x": tr.Field((), torch.float64)}, 8, path=path) as buffer:
        buffer.extend(x=torch.tensor([1.25, 2.5, 5.125], dtype=torch.float64))
    poke(path, record_of(path, 2.5, 16), (10 << 16 | 1 << 1).to_bytes(8, "little"))  # key 9, by writer 1
    result = run("inspect", "--verify", path)
    assert result.exit_code == 1
    assert "keys go from 0 to 9: expected 0 to 2" in result.output


def test_a_flag_that_is_neither_true_nor_false_is_found(tmp_path):
    path = tmp_path / "b.bin"
    with tr.ReplayBuffer({"x": tr.Field((), torch.float64), "flag": tr.Field((), bool)}, 8, path=path) as buffer:
        buffer.extend(x=torch.tensor([1.25, 2.5, 5.125], dtype=torch.float64), flag=torch.zeros(3, dtype=bool))
    poke(path, record_of(path, 5.125, 16) + 24, b"\x07")
    result = run("inspect", "--verify", path)
    assert result.exit_code == 1
    assert "'flag' is neither True nor False in 1 rows, the first has key 2" in result.output


def test_a_row_that_does_not_follow_its_episode_is_found(tmp_path):
    path = tmp_path / "b.bin"
    spec = {"obs": tr.Field((), torch.float64), "terminated": tr.Field((), bool), "truncated": tr.Field((), bool)}
    none = torch.zeros(4, dtype=bool)
    with tr.ReplayBuffer(spec, 8, view=tr.Sequences(2), path=path) as buffer:
        buffer.extend(obs=torch.arange(5, dtype=torch.float64) + 0.125, terminated=none, truncated=none)
    poke(path, record_of(path, 2.125, 24) + 12, (7).to_bytes(4, "little"))  # its step, which was 2
    result = run("inspect", "--verify", path)
    assert result.exit_code == 1
    assert "2 rows do not follow their episode, the first has key 2" in result.output.replace("\n", " ")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_remarked_with_field_and_key(tmp_path, value):
    with tr.ReplayBuffer({"x": tr.Field((2,))}, 8, path=tmp_path / "b.bin") as buffer:
        buffer.extend(x=torch.tensor([[0.0, 1.0], [2.0, value], [value, 3.0]]))
        found = card("--verify", tmp_path / "b.bin")["verified"]
    assert found["remarks"] == ["'x' is NaN or infinite in 2 rows, the first has key 1"]
    assert found["problems"] == []


# What is no such file


def test_a_sentence_and_exit_code_2_for_what_is_no_replay_file(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, expected in (
        (tmp_path / "absent", "there is nothing at"),
        (text, "too short for a replay segment"),
        (empty, "without checkpoint.json"),
        ("/dev/null", "it is no regular file"),
        ("", "path is ''"),
    ):
        result = run("inspect", path)
        assert result.exit_code == 2
        assert expected in result.output
        assert "Traceback" not in result.output


@pytest.mark.parametrize("form", ["file", "archive"])
def test_a_truncated_file_is_refused(stored, damaged, form):
    def cut(path):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])

    result = run("inspect", damaged(form, cut))
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_checkpoint_that_lacks_a_file_is_refused(damaged):
    result = run("inspect", damaged("directory", lambda path: next(path.rglob("*.safetensors")).unlink()))
    assert result.exit_code == 2
    assert "is missing" in result.output


@pytest.mark.parametrize("form", ["file", "directory", "archive"])
def test_values_of_any_length_are_in_the_table_and_are_verified(form, tmp_path):
    file = tmp_path / "b.bin"
    spec = {"x": tr.Ragged(torch.float32), "m": tr.Ragged(torch.bool, (2,), like="x"), "n": tr.Field()}
    with tr.ReplayBuffer(spec, 8, path=file, ragged_bytes=1 << 16) as buffer:

        def stored():
            if form == "directory":
                buffer.save(tmp_path / form)
            if form == "archive":
                with (tmp_path / form).open("wb") as archive:
                    buffer.save(archive)
            return file if form == "file" else tmp_path / form

        buffer.extend(x=[[1.0], [2.0, 3.0]], m=[[[True, False]], [[True, True]] * 2], n=[1.0, 2.0])
        told = card(stored())
        assert told["ragged_bytes"] == 1 << 16
        assert told["ragged_held"] == 3 * 4 + 3 * 2
        assert (told["rows"], told["capacity"]) == (2, 8)
        assert [(field["name"], field["ragged"], field["like"], field["nbytes"]) for field in told["fields"]] == [
            ("x", True, None, 4),
            ("m", True, "x", 2),
            ("n", False, None, 4),
        ]
        output = run("inspect", "--verify", stored()).output
        assert "0.0 KiB of 64.0 KiB for values of any length" in output
        assert re.search(r"m +\[n, 2\] like x +bool +2 x n", output)
        assert "intact" in output
        buffer.extend(x=[[float("nan")]], m=[[[True, True]]], n=[1.0])
        assert "NaN or infinite" in run("inspect", "--verify", stored()).output


@pytest.mark.parametrize("name", ["x", "/lengths/x", "m"])
def test_a_checkpoint_whose_lengths_do_not_fit_its_values_is_refused(name, tmp_path):
    spec = {"x": tr.Ragged(torch.float32), "m": tr.Ragged(torch.bool, (2,), like="x"), "n": tr.Field()}
    with tr.ReplayBuffer(spec, 8, ragged_bytes=1 << 16) as buffer:
        buffer.extend(x=[[1.0], [2.0, 3.0]], m=[[[True, False]], [[True, True]] * 2], n=[1.0, 2.0])
        buffer.save(tmp_path)
    change_rows(tmp_path, lambda tensors: tensors | {name: tensors[name][:-1].clone()})
    result = run("inspect", "--verify", tmp_path)
    assert result.exit_code == 2
    assert re.search(r"00000.safetensors is damaged: the\s+lengths of", result.output)
