"""Saved buffers: what comes back, also of saves beside writers, and what the files are."""

import multiprocessing as mp
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from forked import Forked, eventually
from kept_items import assert_new_goals_are_rewarded, assert_same_items, buffer_of_episodes, buffer_of_goals
from paths import SUPPORT
from safetensors.torch import load_file
from saved_rows import SPEC, assert_rows_are_those_of_their_keys, filled, make_format_3, rows, tell, told_by

import torchreplay as tr
from torchreplay.checkpoint import buffer_checkpoint
from torchreplay.checkpoint.safetensors_io import BLOCK, read_shard, room_for, write_shard
from torchreplay.schema.spec import ELEMENTS


def test_a_checkpoint_brings_back_rows_keys_priorities_counters_and_the_stream_of_draws(tmp_path):
    buffer = filled(150, 100)
    batch = buffer.sample(32)
    buffer.update_priorities(batch, torch.arange(32.0))
    buffer.save(tmp_path)
    loaded = tr.ReplayBuffer.load(tmp_path)
    before, after = buffer.stats(), loaded.stats()
    for name in (
        "size",
        "drawable",
        "inserted",
        "sampled",
        "draws",
        "updated",
        "rows_written",
        "priority_total",
        "priority_max",
        "priority_min",
    ):
        assert getattr(before, name) == getattr(after, name), name
    assert loaded.spec == buffer.spec
    assert (loaded.sampler, loaded.view, loaded.limiter) == (buffer.sampler, buffer.view, buffer.limiter)
    for _ in range(3):
        ours, theirs = buffer.sample(16), loaded.sample(16)
        assert_rows_are_those_of_their_keys(theirs)
        for name in ("key", "probability", "weight"):
            assert torch.equal(ours[name], theirs[name]), name


def test_keys_go_on_after_a_load_and_feedback_for_batches_drawn_before_the_save_is_applied(tmp_path):
    buffer = filled(60, 100)
    batch = buffer.sample(8)
    buffer.save(tmp_path)
    loaded = tr.ReplayBuffer.load(tmp_path)
    keys = loaded.extend(**rows(60, 5))
    assert keys.tolist() == [60, 61, 62, 63, 64]
    loaded.update_priorities(batch["key"], torch.ones(8))
    assert loaded.stats().stale_updates == 0
    assert_rows_are_those_of_their_keys(loaded.gather(torch.arange(65)))


def keys_of(buffer, batches):
    return [buffer.sample(16)["key"].tolist() for _ in range(batches)]


def draw_save_and_draw(buffer, directory, results):
    buffer.sample(16), buffer.sample(16)
    buffer.save(directory)
    results.put(keys_of(buffer, 3))


def test_the_draws_of_a_loaded_buffer_follow_on_those_of_whichever_process_has_saved_it(tmp_path):
    context = mp.get_context("fork")
    buffer, results = filled(60, 100), context.SimpleQueue()
    before = keys_of(buffer, 5)
    child = context.Process(target=draw_save_and_draw, args=(buffer, tmp_path, results))
    child.start()
    due = results.get()
    child.join()
    loaded = tr.ReplayBuffer.load(tmp_path)
    assert keys_of(loaded, 3) == due
    with Forked(lambda: results.put(keys_of(loaded, 6))) as child:
        drawn = results.get()
        child.wait()
    assert not [keys for keys in drawn if keys in (*before, *due)]


def test_the_draws_of_a_buffer_saved_by_a_process_that_drew_nothing_repeat_none(tmp_path):
    buffer = filled(60, 100)
    before = keys_of(buffer, 5)
    saver = tr.ReplayBuffer.attach(buffer.handle())
    saver.save(tmp_path)
    assert buffer.stats().learners == 1  # whoever saves is none
    assert not [keys for keys in keys_of(tr.ReplayBuffer.load(tmp_path), 5) if keys in before]
    with Forked(buffer.save, tmp_path) as child:
        assert child.wait() == 0
    assert not [keys for keys in keys_of(tr.ReplayBuffer.load(tmp_path), 5) if keys in before]


def test_a_restored_buffer_and_one_that_was_attached_before_draw_from_different_streams(tmp_path):
    def save():
        buffer = tr.ReplayBuffer.attach(handle)
        buffer.sample(4)
        buffer.save(tmp_path)  # the stream of a process that did not make the buffer

    made = filled(100, 100)
    handle = made.handle()
    with Forked(save) as saver:
        assert saver.wait() == 0
    buffer = tr.ReplayBuffer(SPEC, 100, sampler=tr.Prioritized(), seed=made._segment.seed)
    other = tr.ReplayBuffer.attach(buffer.handle())
    taken = other.stream
    buffer.restore(tmp_path)
    assert buffer.stream != other.stream == taken
    with tr.ReplayBuffer.load(tmp_path) as alone:
        assert alone.stream == taken  # where nobody has it, it goes on


def test_the_limiter_and_the_counters_of_a_checkpoint_are_of_one_moment(tmp_path, monkeypatch):
    buffer = filled(60, 100, limiter=tr.SamplesPerInsert(4.0, min_size=10))
    buffer.sample(16)
    write_shards = buffer_checkpoint._write_shards

    def write_and_change(*args):
        buffer.limiter = tr.MinSize(5)
        return write_shards(*args)

    monkeypatch.setattr(buffer_checkpoint, "_write_shards", write_and_change)
    buffer.save(tmp_path)
    loaded = tr.ReplayBuffer.load(tmp_path)
    assert loaded.limiter == tr.MinSize(5)
    assert loaded._segment.counts() == buffer._segment.counts()


@pytest.mark.parametrize(("capacity", "first"), [(40, 110), (100, 50), (1000, 50)])
def test_the_newest_rows_that_fit_are_loaded_into_another_capacity(capacity, first, tmp_path):
    filled(150, 100).save(tmp_path)
    loaded = tr.ReplayBuffer.load(tmp_path, capacity)
    batch = loaded.gather(torch.arange(150))
    assert batch["key"].tolist() == list(range(first, 150))
    assert_rows_are_those_of_their_keys(batch)
    loaded.extend(**rows(150, 3 * capacity))
    assert len(loaded) == capacity
    assert loaded.stats().size == capacity


@pytest.mark.parametrize(
    "view",
    [tr.Transitions(n_step=3, stack={"obs": 2}), tr.Sequences(4, stride=2), tr.Sequences(3, across_episodes=True)],
)
def test_items_of_linked_rows_come_back_whole_and_incomplete_ones_stay_so(view, tmp_path):
    buffer = buffer_of_episodes(view)
    buffer.save(tmp_path)
    assert_same_items(buffer, tr.ReplayBuffer.load(tmp_path))


def test_the_reward_function_of_hindsight_is_given_again_at_the_load(tmp_path):
    buffer = buffer_of_goals()
    buffer.save(tmp_path)
    with pytest.raises(RuntimeError, match="lacks the view's functions"):
        tr.ReplayBuffer.load(tmp_path).sample(64)
    assert_new_goals_are_rewarded(tr.ReplayBuffer.load(tmp_path, view=buffer.view).sample(64))
    with pytest.raises(ValueError, match=r"view is Rows\(\), and the rows were written under Hindsight"):
        tr.ReplayBuffer.load(tmp_path, view=tr.Rows())


def write_until_stopped(buffer):
    number = 0
    with buffer.writer() as writer:
        while not buffer.stopped:
            values = rows(number, 1)
            value = {"a": values["x"]["a"][0], "b": values["x"]["b"][0]}
            writer.append(x=value, reward=values["reward"][0])
            number += 1


@pytest.mark.parametrize("alpha", [None, 0.0, 0.35, 1.0, 8.0])
def test_leaves_become_those_of_the_buffers_own_sampler(alpha, tmp_path):
    with filled(300, 300) as saved:
        td = torch.linspace(0.0, 20.0, 300)
        saved.update_priorities(torch.arange(300), td)
        saved.save(tmp_path)
    sampler = tr.Uniform() if alpha is None else tr.Prioritized(alpha, eps=0.01)
    with tr.ReplayBuffer(SPEC, 300, sampler=sampler) as buffer:
        buffer.restore(tmp_path)
        due = (td.double() + 0.01) ** (alpha or 0.0)
        assert buffer.stats().drawable == 300  # also that of a TD error of 0
        torch.testing.assert_close(buffer._segment.column(-1).double(), due, rtol=1e-4, atol=0.0)
        assert buffer.stats().priority_total == pytest.approx(float(due.sum()), rel=1e-4)
    uniform = tr.ReplayBuffer(SPEC, 300, sampler=tr.Uniform())
    uniform.extend(**rows(0, 300))
    uniform.save(tmp_path / "uniform")
    with tr.ReplayBuffer(SPEC, 300, sampler=sampler) as buffer:
        buffer.restore(tmp_path / "uniform")  # where no TD error is known: each may be the largest
        assert buffer.stats().priority_total == pytest.approx(300 * 1.01 ** (alpha or 0.0), rel=1e-4)


def test_a_save_beside_four_writers_holds_whole_rows_only(tmp_path):
    buffer = tr.ReplayBuffer(SPEC, 3000, sampler=tr.Prioritized())
    with ExitStack() as running:
        explorers = [running.enter_context(Forked(write_until_stopped, buffer)) for _ in range(4)]
        eventually(lambda: buffer.stats().rows_written >= 6000)
        for turn in range(3):
            buffer.save(tmp_path / str(turn))
        buffer.stop()
        assert [explorer.wait() for explorer in explorers] == [0] * 4
    for turn in range(3):
        loaded = tr.ReplayBuffer.load(tmp_path / str(turn))
        batch = loaded.sample(20_000)
        numbers = batch["reward"].long()
        assert torch.equal(batch["x"]["a"], numbers[:, None] * torch.tensor([1, 2, 3]))
        assert torch.equal(batch["x"]["b"], (numbers % 100).bfloat16())
        assert loaded.stats().size > 1000


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("restored", [False, True])
def test_a_load_that_a_save_takes_the_files_from_begins_again(restored, number, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(buffer_checkpoint, "SHARD_BYTES", 1024)
    monkeypatch.setattr(buffer_checkpoint, "READS", 1)
    filled(100, 100).save(tmp_path)
    read_shards, turns = buffer_checkpoint._read_shards, []

    def reading(*args):
        turns.append(0)
        for place, columns in enumerate(read_shards(*args)):
            if len(turns) == 1 and place == number:
                filled(250, 300).save(tmp_path)
            yield columns

    monkeypatch.setattr(buffer_checkpoint, "_read_shards", reading)
    if restored:
        buffer = filled(0, 300)
        buffer.restore(tmp_path)
    else:
        buffer = tr.ReplayBuffer.load(tmp_path)
        assert buffer.capacity == 300
    assert len(turns) == 2
    assert "was saved to while it was read" in caplog.text
    batch = buffer.gather(torch.arange(250))
    assert batch["key"].tolist() == list(range(250))
    assert_rows_are_those_of_their_keys(batch)


def test_a_save_removes_nothing_that_is_not_its_own(tmp_path):
    filled(5, 8).save(tmp_path)
    (before,) = tmp_path.glob("rows-*")
    theirs = [
        tmp_path / name for name in ("rows-train", "rows-0123", f"{before.name}-copy", "shards-train", "x-rows-1")
    ]
    killed = tmp_path / "rows-0123456789abcdef", tmp_path / "checkpoint.json-0123456789abcdef"
    notes = tmp_path / "checkpoint.json-notes"
    for directory in (*theirs, killed[0]):
        directory.mkdir()
        (directory / "data").touch()
    for file in (notes, killed[1]):
        file.touch()
    filled(6, 8).save(tmp_path)
    assert all((directory / "data").exists() for directory in theirs)
    assert notes.exists()
    assert not any(left.exists() for left in (before, *killed))
    assert len(tr.ReplayBuffer.load(tmp_path)) == 6


def test_a_checkpoint_is_two_entries_and_holds_no_pickle(tmp_path):
    filled(5, 8).save(tmp_path / "new" / "place")
    entries = sorted(path.name for path in (tmp_path / "new" / "place").rglob("*") if path.is_file())
    assert entries == ["00000.safetensors", "checkpoint.json"]
    moved = shutil.move(tmp_path / "new" / "place", tmp_path / "elsewhere")
    assert len(tr.ReplayBuffer.load(moved)) == 5


@pytest.mark.parametrize("rows", [1, 4095, 4096, 4097, 40_000])
def test_a_file_of_any_size_is_what_the_safetensors_package_reads(tmp_path, rows):
    values = {
        "odd": torch.randint(0, 256, (rows, 3), dtype=torch.uint8),
        "key": torch.arange(rows),
        "none": torch.empty(0, 5),
    }
    size, checksum = write_shard(tmp_path / "a.safetensors", values, room_for(2 * BLOCK))
    assert (tmp_path / "a.safetensors").stat().st_size == size
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], value) for name, value in values.items())
    given = read_shard(tmp_path / "a.safetensors", size, checksum, list(values), torch.empty(size, dtype=torch.uint8))
    assert all(torch.equal(*pair) for pair in zip(given, values.values(), strict=True))


def test_the_files_of_rows_are_what_the_safetensors_package_reads(tmp_path):
    buffer = filled(80, 50)
    buffer.save(tmp_path)
    (path,) = tmp_path.glob("rows-*/*.safetensors")
    tensors = load_file(path)
    batch = buffer.gather(tensors["/key"])
    assert tensors["/key"].sort().values.tolist() == list(range(30, 80))
    assert torch.equal(tensors["x/a"], batch["x"]["a"])
    assert torch.equal(tensors["x/b"], batch["x"]["b"])
    assert torch.equal(tensors["reward"], batch["reward"])


COLUMNS = ["row.key", "row.leaf", "row.link", "row.step", "row.priority", "__metadata__"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_fields_may_be_named_like_what_the_files_hold_beside_them(dtype, tmp_path):
    spec = {name: tr.Field((2,), dtype) for name in COLUMNS} | {"row": {"key": tr.Field(), "leaf": tr.Field()}}
    buffer = tr.ReplayBuffer(spec, 20, sampler=tr.Prioritized(), seed=1)
    values = {name: torch.arange(40).view(20, 2).to(dtype) + i for i, name in enumerate(COLUMNS)}
    buffer.extend(**values, row={"key": torch.arange(20.0), "leaf": -torch.arange(20.0)}, priority=torch.arange(20.0))
    buffer.save(tmp_path)
    loaded = tr.ReplayBuffer.load(tmp_path)
    batch = loaded.gather(torch.arange(20))
    assert all(torch.equal(batch[name], value) for name, value in values.items())
    assert torch.equal(batch["row"]["leaf"], -torch.arange(20.0))
    assert torch.equal(loaded._segment.column(-1), buffer._segment.column(-1))
    (path,) = tmp_path.glob("rows-*/*.safetensors")
    assert torch.equal(load_file(path)["/__metadata__"], values["__metadata__"])


def test_a_checkpoint_of_format_4_is_read_and_its_priorities_are_those_it_was_saved_with(tmp_path):
    buffer = filled(150, 100)
    buffer.update_priorities(torch.arange(50, 150), torch.logspace(-9, 9, 100))
    buffer.save(tmp_path)
    told = told_by(tmp_path)
    tell(tmp_path, told | {"format": 4, "counts": told["counts"][:13]})
    loaded = tr.ReplayBuffer.load(tmp_path)
    assert torch.equal(loaded._segment.column(-1), buffer._segment.column(-1))
    expected = buffer.gather(torch.arange(50, 150))["probability"]
    torch.testing.assert_close(loaded.gather(torch.arange(50, 150))["probability"], expected, rtol=1e-6, atol=0.0)
    tell(tmp_path, told | {"counts": told["counts"][:13]})
    with pytest.raises(tr.CheckpointError, match="13 counters, not 25"):
        tr.ReplayBuffer.load(tmp_path)


def test_checkpoints_of_format_3_are_read_unless_their_own_columns_took_the_place_of_a_field(tmp_path):
    buffer = filled(150, 100)
    buffer.save(tmp_path / "old")
    make_format_3(tmp_path / "old")
    loaded = tr.ReplayBuffer.load(tmp_path / "old")
    assert_rows_are_those_of_their_keys(loaded.gather(torch.arange(50, 150)))
    assert torch.equal(loaded._segment.column(-1), buffer._segment.column(-1))
    tr.ReplayBuffer({"row.leaf": tr.Field(), "x": tr.Field()}, 8).save(tmp_path / "lost")
    make_format_3(tmp_path / "lost")
    with pytest.raises(tr.CheckpointError, match=r"did not keep the values of fields named \['row\.leaf'\]"):
        tr.ReplayBuffer.load(tmp_path / "lost")


@pytest.mark.usefixtures("small_files")
def test_every_dtype_and_a_buffer_of_several_files_come_back(tmp_path):
    spec = {str(dtype): tr.Field((3,), dtype) for dtype in ELEMENTS}
    buffer = tr.ReplayBuffer(spec, 500, seed=1)
    numbers = np.arange(1500).reshape(500, 3)
    buffer.extend(**{name: torch.from_numpy(numbers % 100).to(field.dtype) for name, field in spec.items()})
    buffer.save(tmp_path)
    assert len(list(tmp_path.glob("rows-*/*"))) > 10
    ours, theirs = buffer.gather(torch.arange(500)), tr.ReplayBuffer.load(tmp_path).gather(torch.arange(500))
    assert ours["key"].tolist() == theirs["key"].tolist() == list(range(500))
    for name in spec:
        assert torch.equal(ours[name].double(), theirs[name].double()), name


def test_an_empty_buffer_can_be_saved(tmp_path):
    tr.ReplayBuffer(SPEC, 10).save(tmp_path)
    loaded = tr.ReplayBuffer.load(tmp_path)
    assert len(loaded) == 0
    assert loaded.extend(**rows(0, 2)).tolist() == [0, 1]


def save_and_load(path):
    buffer = filled(50, 100)
    buffer.save(path)
    assert_rows_are_those_of_their_keys(tr.ReplayBuffer.load(path).gather(torch.arange(50)))
    (path / "done").touch()


LATE = {
    "in an exit handler": "atexit.register(save_and_load, path)",
    "in a thread that outlives the main one": "threading.Thread(target=wait_save_and_load).start()",
}


@pytest.mark.slow
@pytest.mark.parametrize("when", LATE)
def test_a_buffer_is_saved_and_loaded_while_the_interpreter_ends(when, tmp_path):
    program = f"""
import atexit, pathlib, sys, threading
sys.path[:0] = [{os.path.dirname(__file__)!r}, {str(SUPPORT)!r}]
from test_checkpoint import save_and_load
path, main = pathlib.Path({str(tmp_path)!r}), threading.main_thread()
def wait_save_and_load():
    main.join()
    save_and_load(path)
{LATE[when]}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert (tmp_path / "done").exists()
