"""Saves that are killed, that fail, that wait for others and that are interrupted: what they leave behind."""

import errno
import fcntl
import itertools
import os
import random
import signal
import threading
import time

import pytest
import torch
from forked import Forked, eventually, shared_counters
from saved_rows import assert_rows_are_those_of_their_keys, filled, rows
from synced import watch_syncs

import torchreplay as tr
from torchreplay.checkpoint import buffer_checkpoint
from torchreplay.segment import file_lock


def save_for_ever(buffer, directory, begun):
    begun[0] = 1
    while True:
        buffer.save(directory)


def kill_saves(directory, kills, seed, **sizes):
    buffer, begun = filled(400, 400, **sizes), shared_counters(1)
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


@pytest.mark.parametrize("sizes", [{}, {"ragged_bytes": 1 << 18}], ids=["of one shape", "of any length"])
def test_a_save_killed_at_any_moment_leaves_a_checkpoint_that_loads(sizes, tmp_path):
    kill_saves(tmp_path, 25, seed=5, **sizes)


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

    buffer_checkpoint._write_shards = fork_and_wait
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
