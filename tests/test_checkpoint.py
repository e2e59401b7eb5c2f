"""Saved buffers: what comes back, from saves beside writers, and from saves that were killed."""

import errno
import fcntl
import itertools
import multiprocessing as mp
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from kept_items import assert_new_goals_are_rewarded, assert_same_items, buffer_of_episodes, buffer_of_goals
from safetensors.torch import load_file
from saved_rows import SPEC, assert_rows_are_those_of_their_keys, filled, make_format_3, rows
from synced import watch_syncs

import torchreplay as tr
from torchreplay import checkpoint, file_lock
from torchreplay.shards import BLOCK, read_shard, room_for, write_shard
from torchreplay.spec import ELEMENTS


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


def test_the_limiter_and_the_counters_of_a_checkpoint_are_of_one_moment(tmp_path, monkeypatch):
    buffer = filled(60, 100, limiter=tr.SamplesPerInsert(4.0, min_size=10))
    buffer.sample(16)
    write_shards = checkpoint._write_shards

    def write_and_change(*args):
        buffer.limiter = tr.MinSize(5)
        return write_shards(*args)

    monkeypatch.setattr(checkpoint, "_write_shards", write_and_change)
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
    with pytest.raises(ValueError, match="expected the buffer's own"):
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
        due = ((td.double() + 0.01) ** (alpha or 0.0)).clamp(max=8192.0)
        assert buffer.stats().drawable == 300  # also that of a TD error of 0
        torch.testing.assert_close(buffer._segment.column(-1).double(), due, rtol=1e-4, atol=1e-4)
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
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1024)
    monkeypatch.setattr(checkpoint, "READS", 1)
    filled(100, 100).save(tmp_path)
    read_shards, turns = checkpoint._read_shards, []

    def reading(*args):
        turns.append(0)
        for place, columns in enumerate(read_shards(*args)):
            if len(turns) == 1 and place == number:
                filled(250, 300).save(tmp_path)
            yield columns

    monkeypatch.setattr(checkpoint, "_read_shards", reading)
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


def save_for_ever(buffer, directory, begun):
    begun[0] = 1
    while True:
        buffer.save(directory)


def kill_saves(directory, kills, seed):
    buffer, begun = filled(400, 400), shared_counters(1)
    began = time.monotonic()
    buffer.save(directory)
    duration = time.monotonic() - began  # of a save here and now, within which instants are chosen
    chance, interrupted = random.Random(seed), 0
    for _ in range(kills):
        begun[0] = 0
        with Forked(save_for_ever, buffer, directory, begun) as saver:
            eventually(lambda: begun[0], interval=0)
            time.sleep(chance.uniform(0, duration))  # the instant of the kill
            saver.kill()
        interrupted += len(list(directory.iterdir())) > 2  # a save begun and not ended has left something
        batch = tr.ReplayBuffer.load(directory).gather(torch.arange(400))
        assert len(batch["key"]) == 400
        assert_rows_are_those_of_their_keys(batch)
    assert interrupted > 0, "the test is about saves that are killed"
    buffer.save(directory)
    assert len(list(directory.iterdir())) == 2  # what killed saves had left is gone


def test_a_save_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    kill_saves(tmp_path, 25, seed=5)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_save_killed_at_1000_random_moments_leaves_a_checkpoint_that_loads(tmp_path):
    kill_saves(tmp_path, 1000, seed=6)


def test_a_save_that_fails_leaves_no_directory_that_it_has_made(tmp_path):
    buffer = filled(5, 8)
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        buffer.save(tmp_path / "new" / "place")
    assert list(tmp_path.iterdir()) == []


def test_the_directories_that_a_save_makes_are_on_the_disk_before_their_content(tmp_path, monkeypatch):
    fsync, synced = os.fsync, []

    def watched(fd):
        fsync(fd)
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", watched)
    filled(5, 8).save(tmp_path / "new" / "place")
    content = next(at for at, path in enumerate(synced) if "place" in path)
    assert {str(tmp_path), str(tmp_path / "new")} <= set(synced[:content])


@pytest.mark.parametrize("name", ["00000.safetensors", "checkpoint.json"])
def test_a_save_without_room_names_the_file_that_it_could_not_write(name, tmp_path, monkeypatch):
    fsync = os.fsync

    def full(fd):
        if name in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/.*{name}"):
        filled(5, 8).save(tmp_path)


def test_a_wait_for_another_save_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(file_lock, "LOG_EVERY", 0.05)
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        saver = threading.Thread(target=filled(5, 8).save, args=(tmp_path,))
        saver.start()
        eventually(lambda: caplog.text.count(f"waiting for another save to {tmp_path} since") == 2)
    finally:
        os.close(other)
    saver.join()
    assert len(tr.ReplayBuffer.load(tmp_path)) == 5


def fork_in_a_save_and_wait(buffer, directory, child):
    def fork_and_wait(*_):
        if forked := os.fork():
            child[0] = forked
        signal.pause()

    checkpoint._write_shards = fork_and_wait
    buffer.save(directory)


@pytest.mark.timeout(60)
def test_a_child_that_was_forked_in_the_midst_of_a_save_keeps_nobody_from_saving(tmp_path):
    buffer, child = filled(5, 8), shared_counters(1)
    with Forked(fork_in_a_save_and_wait, buffer, tmp_path, child) as saver:
        eventually(lambda: child[0])
        saver.kill()
    try:
        buffer.save(tmp_path)
    finally:
        os.kill(child[0], signal.SIGKILL)
    assert len(tr.ReplayBuffer.load(tmp_path)) == 5


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_a_save_interrupted_after_any_of_its_steps_leaves_a_checkpoint_that_loads(failure, tmp_path, monkeypatch):
    buffer = filled(60, 100)
    buffer.save(tmp_path)
    found, outcomes = 60, set()
    for step in itertools.count():
        buffer.extend(**rows(60 + step, 1))
        with monkeypatch.context() as patch:
            watch_syncs(patch, tmp_path, step, failure)
            try:
                buffer.save(tmp_path)
            except failure:
                pass
            else:
                break
        batch = tr.ReplayBuffer.load(tmp_path).gather(torch.arange(100))
        assert_rows_are_those_of_their_keys(batch)
        assert len(batch["key"]) in (found, 61 + step)  # the one before, or the new one
        outcomes.add("before" if len(batch["key"]) == found else "new")
        assert len(list(tmp_path.iterdir())) == (2 if len(batch["key"]) == found else 3)  # what it had written is gone
        found = len(batch["key"])
    assert outcomes == {"before", "new"}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.timeout(60)
def test_a_signal_handler_may_save_to_where_its_own_thread_is_saving(tmp_path, monkeypatch):
    fsync = os.fsync
    for step in itertools.count(1):
        buffer, directory, synced = filled(60, 100), tmp_path / str(step), []

        def handle(*_, buffer=buffer, directory=directory):
            buffer.extend(**rows(60, 1))
            buffer.save(directory)

        def watched(fd, synced=synced, step=step):
            fsync(fd)
            if threading.current_thread() is threading.main_thread():
                synced.append(fd)
                if len(synced) == step:
                    signal.raise_signal(signal.SIGUSR1)

        monkeypatch.setattr(os, "fsync", watched)
        before = signal.signal(signal.SIGUSR1, handle)
        try:
            buffer.save(directory)
        finally:
            signal.signal(signal.SIGUSR1, before)
        batch = tr.ReplayBuffer.load(directory).gather(torch.arange(100))
        assert_rows_are_those_of_their_keys(batch)
        assert len(batch["key"]) in (60, 61)
        assert len(list(directory.iterdir())) == 2
        if len(synced) < step:
            break
    assert step > 4


def test_all_that_a_checkpoint_names_is_on_the_disk_before_it_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    filled(5, 8).save(tmp_path)
    with monkeypatch.context() as patch:
        synced = watch_syncs(patch, tmp_path)
        filled(6, 8).save(tmp_path)
    (data,) = tmp_path.glob("rows-*")
    for before in (f"{data.name}/00000.safetensors", data.name, "."):
        assert before in synced[: synced.index("replaced")]
    assert "." in synced[synced.index("replaced") :]


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


@pytest.mark.parametrize("when", LATE)
def test_a_buffer_is_saved_and_loaded_while_the_interpreter_ends(when, tmp_path):
    program = f"""
import atexit, pathlib, sys, threading
sys.path.insert(0, {os.path.dirname(__file__)!r})
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
