"""Restores that do not come to their end, or are not alone: a buffer gets all rows of a checkpoint, or none."""

import os
import random
import shutil
import signal
import time

import pytest
import torch
from forked import Forked
from saved_rows import SPEC, assert_rows_are_those_of_their_keys, filled, rows

import torchreplay as tr
from torchreplay import checkpoint


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr("torchreplay.checkpoint.SHARD_BYTES", 4096)


def save(directory):
    with filled(300, 300) as saved:
        saved.update_priorities(saved.sample(32), torch.rand(32))
        saved.save(directory)
        return saved.stats()


def assert_nothing_was_restored(buffer):
    with filled(0, 300) as new:
        assert counts_of(buffer) == counts_of(new)
    assert buffer.stats().priority_total == 0


def counts_of(buffer):
    stats = buffer.stats()
    return stats.size, stats.drawable, stats.inserted, stats.sampled, stats.updated, stats.rows_written


def restore_beside(monkeypatch, number, event):
    """A restore calls `event` when it has placed `number` files of rows."""
    read_shards = checkpoint._read_shards

    def reading(*args):
        for place, columns in enumerate(read_shards(*args)):
            if place == number:
                event()
            yield columns

    monkeypatch.setattr(checkpoint, "_read_shards", reading)


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_restore_that_fails_half_way_leaves_the_buffer_as_it_was(tmp_path):
    save(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    *before, last = sorted((tmp_path / "damaged").glob("rows-*/*"))
    assert len(before) > 3
    last.write_bytes(last.read_bytes()[:-1])
    with filled(0, 300) as buffer:
        unused = buffer.stats()
        with pytest.raises(tr.CheckpointError, match=last.name):
            buffer.restore(tmp_path / "damaged")
        assert buffer.stats() == unused
        buffer.restore(tmp_path / "whole")
        assert buffer.gather(torch.arange(300))["key"].tolist() == list(range(300))
    with filled(0, 300) as buffer:
        with pytest.raises(tr.CheckpointError, match=last.name):
            buffer.restore(tmp_path / "damaged")
        assert buffer.extend(**rows(0, 40)).tolist() == list(range(40))
        assert set(buffer.sample(300)["key"].tolist()) <= set(range(40))
        buffer.extend(**rows(40, 270))
        assert buffer.stats().evicted_unsampled == 0  # nothing was overwritten but what is no longer there
        buffer.save(tmp_path / "own")
    with tr.ReplayBuffer.load(tmp_path / "own") as loaded:
        assert loaded.gather(torch.arange(310))["key"].tolist() == list(range(10, 310))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_of_a_restore_that_is_killed_nothing_stays(number, tmp_path, monkeypatch):
    saved = save(tmp_path)
    with filled(0, 300) as buffer, buffer.writer() as explorer:
        with monkeypatch.context() as patch:
            restore_beside(patch, number, kill_oneself)
            with Forked(buffer.restore, tmp_path) as process:
                assert process.wait() == -signal.SIGKILL
        assert_nothing_was_restored(buffer)
        buffer.restore(tmp_path)
        assert counts_of(buffer)[:5] == (saved.size, saved.drawable, saved.inserted, saved.sampled, saved.updated)
        assert buffer.stats().priority_total == pytest.approx(saved.priority_total)
        key = explorer.append(**one(300))
        assert key == 300
        assert_rows_are_those_of_their_keys(buffer.gather(torch.arange(1, 301)))


def one(number):
    """One row, as append wants it."""
    return {"x": {name: column[0] for name, column in rows(number, 1)["x"].items()}, "reward": float(number)}


def test_explorers_go_on_in_what_a_killed_restore_leaves(tmp_path, monkeypatch):
    save(tmp_path)
    with filled(0, 300) as buffer:
        with monkeypatch.context() as patch:
            restore_beside(patch, 2, kill_oneself)
            with Forked(buffer.restore, tmp_path) as process:
                assert process.wait() == -signal.SIGKILL
        written = buffer.extend(**rows(0, 120)).tolist()  # before anybody has looked at what was left
        assert len(buffer) == len(written) == buffer.stats().drawable == buffer.stats().inserted == 120
        assert set(buffer.sample(2000)["key"].tolist()) == set(written)
        batch = buffer.gather(written)
        assert torch.equal(batch["reward"], torch.arange(120.0))
        assert len(buffer.extend(**rows(0, 600))) == 600
        assert len(buffer) == 300


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_restore_beside_explorers_that_write_is_an_error_and_loses_none_of_their_rows(number, tmp_path, monkeypatch):
    save(tmp_path)
    with filled(0, 300) as buffer:
        written = []
        with monkeypatch.context() as patch:
            restore_beside(patch, number, lambda: written.extend(buffer.extend(**rows(500, 40)).tolist()))
            with pytest.raises(tr.CheckpointError, match="explorers have written to the buffer while"):
                buffer.restore(tmp_path)
        assert len(buffer) == len(written) == buffer.stats().drawable == buffer.stats().inserted == 40
        assert set(buffer.sample(1000)["key"].tolist()) == set(written)
        assert torch.equal(buffer.gather(written)["reward"], torch.arange(500.0, 540.0))
        with pytest.raises(tr.CheckpointError, match="holds rows already"):
            buffer.restore(tmp_path)
        buffer.save(tmp_path / "own")
        with tr.ReplayBuffer.load(tmp_path / "own") as loaded:
            assert sorted(loaded.gather(written)["reward"].tolist()) == list(range(500, 540))


def test_nobody_sees_or_saves_rows_of_a_restore_before_its_end(tmp_path, monkeypatch):
    save(tmp_path)
    seen = []
    with filled(0, 300) as buffer, tr.ReplayBuffer.attach(buffer.handle()) as other:

        def look():
            assert_nothing_was_restored(other)
            for again in (buffer, other):
                with pytest.raises(tr.CheckpointError, match="being restored already"):
                    again.restore(tmp_path)
            other.save(tmp_path / "other")
            seen.append(len(other))

        with monkeypatch.context() as patch:
            restore_beside(patch, 2, look)
            buffer.restore(tmp_path)
        assert seen == [0]
        assert len(other) == 300
        with tr.ReplayBuffer.load(tmp_path / "other") as loaded:
            assert len(loaded) == 0


def test_a_file_in_which_a_restore_was_killed_opens_empty(tmp_path, monkeypatch):
    save(tmp_path / "checkpoint")
    path = tmp_path / "file"

    def restore():
        tr.ReplayBuffer(SPEC, 300, sampler=tr.Prioritized(alpha=0.7, beta=0.5), path=path).restore(
            tmp_path / "checkpoint"
        )

    restore_beside(monkeypatch, 3, kill_oneself)
    with Forked(restore) as process:
        assert process.wait() == -signal.SIGKILL
    monkeypatch.undo()
    with tr.ReplayBuffer.open(path) as buffer:
        assert_nothing_was_restored(buffer)
        assert buffer.stats().dropped_rows == 0
        buffer.restore(tmp_path / "checkpoint")
        assert len(buffer) == 300


def killed_restores(directory, rounds, seed):
    """Kills restores at random moments. Returns how many had not ended."""
    chance, killed = random.Random(seed), 0
    started = time.monotonic()
    with filled(0, 300) as buffer:
        buffer.restore(directory)
    longest = 2 * (time.monotonic() - started)
    for _ in range(rounds):
        with filled(0, 300) as buffer:
            with Forked(buffer.restore, directory) as process:
                time.sleep(chance.uniform(0, longest))
                process.kill()
            if len(buffer) == 0:
                killed += 1
                assert_nothing_was_restored(buffer)
                buffer.restore(directory)
            assert len(buffer) == buffer.stats().drawable == 300
            assert_rows_are_those_of_their_keys(buffer.gather(torch.arange(300)))
    return killed


def test_killed_at_any_moment_a_restore_is_whole_or_none(tmp_path):
    save(tmp_path)
    assert killed_restores(tmp_path, 30, seed=1) > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_of_a_thousand_killed_restores_each_is_whole_or_none(tmp_path):
    save(tmp_path)
    assert killed_restores(tmp_path, 1000, seed=2) > 100
