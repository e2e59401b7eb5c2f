"""Restores that do not come to their end, or are not alone: a buffer gets all rows of a checkpoint, or none."""

import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from saved_rows import SPEC, assert_rows_are_those_of_their_keys, filled, rows

import torchreplay as tr
from torchreplay import checkpoint


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr("torchreplay.checkpoint.SHARD_BYTES", 4096)


def save(directory):
    """Saves 300 rows. Returns the statistics."""
    with filled(300, 300) as saved:
        saved.update_priorities(saved.sample(32), torch.rand(32) + 3.0)
        saved.save(directory)
        return saved.stats()


def assert_nothing_was_restored(buffer):
    with filled(0, buffer.capacity) as new:
        assert saved_counts(buffer.stats()) == saved_counts(new.stats())
        for name, counts in new.histograms(8).items():
            assert torch.equal(buffer.histograms(8)[name], counts)


def assert_restored(buffer, saved):
    assert saved_counts(buffer.stats()) == saved_counts(saved)
    assert buffer.stats().rows_written == saved.rows_written
    assert buffer.stats().priority_total == pytest.approx(saved.priority_total, rel=1e-6)
    assert_rows_are_those_of_their_keys(buffer.gather(torch.arange(300)))


def saved_counts(stats):
    figures = stats.drawable, stats.inserted, stats.sampled, stats.updated, stats.draws, stats.evicted_unsampled
    return stats.size, *figures, stats.priority_max


def leaves_of(buffer):
    """The leaf of each row, by its key."""
    keys1, leaves = buffer._segment.column(-2), buffer._segment.column(-1)
    return dict(zip((keys1[keys1 > 0] - 1).tolist(), leaves[keys1 > 0].tolist(), strict=True))


def restore_beside(monkeypatch, number, event):
    """A restore calls `event` when it has placed `number` files of rows; -1: all of them."""
    read_shards = checkpoint._read_shards

    def reading(*args):
        for place, columns in enumerate(read_shards(*args)):
            if place == number:
                event()
            yield columns
        if number < 0:
            event()

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
        assert replace(buffer.stats(), rows_written=0) == unused  # its keys are spent
        buffer.restore(tmp_path / "whole")
        assert buffer.gather(torch.arange(300))["key"].tolist() == list(range(300))
    with filled(0, 300) as buffer:
        with pytest.raises(tr.CheckpointError, match=last.name):
            buffer.restore(tmp_path / "damaged")
        keys = buffer.extend(**rows(0, 40)).tolist()
        assert set(buffer.sample(300)["key"].tolist()) <= set(keys)
        keys += buffer.extend(**rows(40, 270)).tolist()
        assert buffer.stats().evicted_unsampled == 0  # nothing was overwritten but what is no longer there
        buffer.save(tmp_path / "own")
    with tr.ReplayBuffer.load(tmp_path / "own") as loaded:
        assert torch.equal(loaded.gather(keys)["reward"], torch.arange(10.0, 310.0))


def end_by(end, buffer, directory):
    """Restores, and comes to this end when asked."""
    if end == "killed":
        with Forked(buffer.restore, directory) as process:
            assert process.wait() == -signal.SIGKILL
    else:
        with pytest.raises(ENDS[end]):
            buffer.restore(directory)


def fail():
    raise tr.CheckpointError("damaged")


def interrupt():
    raise KeyboardInterrupt


ENDS = {"killed": None, "failed": tr.CheckpointError, "interrupted": KeyboardInterrupt}
ACTS = {"killed": kill_oneself, "failed": fail, "interrupted": interrupt}
TIMES = [0, 1, 3, -1]


@pytest.mark.parametrize("number", TIMES)
@pytest.mark.parametrize("end", ENDS)
def test_of_a_restore_that_does_not_come_to_its_end_nothing_stays(end, number, tmp_path, monkeypatch):
    saved = save(tmp_path)
    with filled(0, 300) as buffer, buffer.writer() as explorer:
        with monkeypatch.context() as patch:
            restore_beside(patch, number, ACTS[end])
            end_by(end, buffer, tmp_path)
        assert_nothing_was_restored(buffer)
        buffer.restore(tmp_path)
        assert_restored(buffer, saved)
        assert explorer.append(**one(300)) == 300
        assert_rows_are_those_of_their_keys(buffer.gather(torch.arange(1, 301)))


def one(number):
    """One row, as append wants it."""
    return {"x": {name: column[0] for name, column in rows(number, 1)["x"].items()}, "reward": float(number)}


@pytest.mark.parametrize("number", TIMES)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("capacity", [90, 300, 1000])
def test_explorers_lose_nothing_by_a_restore_that_does_not_end(capacity, end, number, tmp_path, monkeypatch):
    save(tmp_path)
    keys = shared_counters(40)
    with filled(0, capacity) as buffer:

        def write_and_end():
            keys[:] = memoryview(np.asarray(buffer.extend(**rows(500, 40)))).cast("B").cast("q")
            ACTS[end]()

        with monkeypatch.context() as patch:
            restore_beside(patch, number, write_and_end)
            end_by(end, buffer, tmp_path)
        keys = list(keys)
        keys += buffer.extend(**rows(540, 20)).tolist()  # before anybody has looked at what is left
        assert len(buffer) == buffer.stats().drawable == buffer.stats().inserted == len(set(keys)) == 60
        assert buffer.stats().priority_total == pytest.approx(60.0, rel=1e-5)  # each (1 + eps)^0.7
        assert set(buffer.sample(2000)["key"].tolist()) == set(keys)
        assert torch.equal(buffer.gather(keys)["reward"], torch.arange(500.0, 560.0))
        with pytest.raises(tr.CheckpointError, match="holds rows already"):
            buffer.restore(tmp_path)
        assert len(buffer.extend(**rows(0, 2 * capacity))) == 2 * capacity
        assert len(buffer) == buffer.stats().drawable == capacity


@pytest.mark.parametrize("number", TIMES)
@pytest.mark.parametrize("capacity", [90, 300, 1000])
def test_what_explorers_write_beside_a_restore_is_newer_than_what_was_saved(capacity, number, tmp_path, monkeypatch):
    saved, keys, unready = save(tmp_path), [], []

    def write():
        keys.extend(buffer.extend(**rows(500, 40)).tolist())
        buffer.update_priorities(keys, torch.full((40,), 50.0))  # too early: nobody can have drawn them
        unready.append(buffer.stats().unready_updates)

    with filled(0, capacity) as alone, filled(0, capacity) as buffer:
        alone.restore(tmp_path)
        with monkeypatch.context() as patch:
            restore_beside(patch, number, write)
            buffer.restore(tmp_path)
        assert keys == list(range(300, 340))
        assert unready == [40]
        before, after = alone.stats(), buffer.stats()
        assert (after.sampled, after.updated, after.unready_updates) == (before.sampled, before.updated, 40)
        assert (after.inserted, after.size) == (saved.inserted + 40, min(capacity, 340))
        first = (saved.priority_max + 1e-6) ** 0.7
        due = leaves_of(alone) | dict.fromkeys(keys, pytest.approx(first, rel=1e-5))
        assert leaves_of(buffer) == {key: due[key] for key in sorted(due)[-capacity:]}
        assert torch.equal(buffer.gather(keys)["reward"], torch.arange(500.0, 540.0))
        kept = [key for key in sorted(due)[-capacity:] if key < 300]
        assert_rows_are_those_of_their_keys(buffer.gather(kept))
        assert len(buffer.gather(kept)["key"]) == len(kept)


def test_nobody_sees_or_saves_rows_of_a_restore_before_its_end(tmp_path, monkeypatch):
    saved, seen = save(tmp_path), []
    with filled(0, 300) as buffer, tr.ReplayBuffer.attach(buffer.handle()) as other:
        other.save(tmp_path / "before")

        def look():
            for again in (buffer, other):
                with pytest.raises(tr.CheckpointError, match="being restored already"):
                    again.restore(tmp_path)
                with pytest.raises(tr.CheckpointError, match="being restored: save it when"):
                    again.save(tmp_path / "before")
                assert (len(again), again.stats().drawable, again.stats().inserted, again.stats().sampled) == (0,) * 4
                assert len(again.gather(torch.arange(300))["key"]) == 0
                again.update_priorities(torch.arange(300), torch.full((300,), 9.0))
                assert int(again.histograms(8)["priority"].sum()) == int(again.histograms(8)["age"].sum()) == 0
                with pytest.raises(tr.ReplayTimeout):
                    again.sample(1, timeout=0)
            seen.append(True)

        for number in (2, -1):
            with filled(0, 300) as fresh, monkeypatch.context() as patch:
                buffer, other = fresh, tr.ReplayBuffer.attach(fresh.handle())
                restore_beside(patch, number, look)
                buffer.restore(tmp_path)
                assert saved_counts(other.stats()) == saved_counts(saved)
                assert other.stats().priority_total == pytest.approx(saved.priority_total, rel=1e-6)
                other.close()
        assert len(seen) == 2
    with tr.ReplayBuffer.load(tmp_path / "before") as loaded:
        assert len(loaded) == 0


def test_another_threads_close_does_not_leave_the_buffer_to_nobody(tmp_path, monkeypatch):
    save(tmp_path)
    with filled(0, 300) as buffer, tr.ReplayBuffer.attach(buffer.handle()) as other:
        writer = other.writer()  # which keeps what it is attached to
        restore_beside(monkeypatch, 2, other.close)
        other.restore(tmp_path)
        assert len(buffer) == buffer.stats().drawable == 300
        writer.close()


def test_what_others_set_meanwhile_stays(tmp_path, monkeypatch):
    save(tmp_path)
    limiter = tr.SamplesPerInsert(2.0, min_size=10, tolerance=0.5)
    with filled(0, 300) as buffer, attached(buffer) as early, attached(buffer) as other, attached(buffer) as late:
        with pytest.raises(tr.ReplayTimeout):
            early.sample(1, timeout=0)  # which takes a stream of draws
        buffer._segment.raise_largest(70.0)

        def change():
            other.limiter = limiter

        restore_beside(monkeypatch, 1, change)
        buffer.restore(tmp_path)
        assert buffer.limiter == limiter
        assert buffer.stats().priority_max == 70.0
        batches = [each.sample(5, timeout=0) for each in (other, late)]  # as if 10 items had been inserted before
        assert len({early.stream, other.stream, late.stream, buffer.stream}) == 4
        assert not torch.equal(*(batch["key"] for batch in batches))


def attached(buffer):
    return tr.ReplayBuffer.attach(buffer.handle())


def test_learners_wait_for_a_restore_under_way(tmp_path, monkeypatch):
    save(tmp_path)
    begun = threading.Event()

    def take_long():
        begun.set()
        time.sleep(1.0)  # longer than anybody waits for nobody

    restore_beside(monkeypatch, 2, take_long)
    with filled(0, 300) as buffer, ThreadPoolExecutor(1) as other:
        restored = other.submit(buffer.restore, tmp_path)
        assert begun.wait(60)
        assert len(buffer.sample(4, timeout=60)["key"]) == 4
        restored.result(60)


def test_keys_of_a_killed_restore_are_no_turns_of_the_ring(tmp_path, monkeypatch):
    with filled(300, 300) as saved:
        saved.extend(**rows(300, 3000))
        saved.save(tmp_path)
    with filled(0, 100) as buffer, buffer.writer(), monkeypatch.context() as patch:
        restore_beside(patch, 2, kill_oneself)
        end_by("killed", buffer, tmp_path)
        with pytest.raises(tr.ReplayTimeout):
            buffer.sample(1, timeout=2.5)
        assert buffer.extend(**rows(0, 1)).tolist() == [3300]
        assert buffer.sample(1, timeout=0)["key"].tolist() == [3300]


def test_a_save_in_whose_midst_the_buffer_is_restored_is_refused(tmp_path, monkeypatch):
    save(tmp_path)
    write_shards = checkpoint._write_shards
    with filled(0, 300) as buffer:
        buffer.save(tmp_path / "own")

        def write_and_restore(*args):
            shards = write_shards(*args)
            buffer.restore(tmp_path)
            return shards

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_write_shards", write_and_restore)
            with pytest.raises(tr.CheckpointError, match="was restored meanwhile"):
                buffer.save(tmp_path / "own")
        with tr.ReplayBuffer.load(tmp_path / "own") as loaded:
            assert (len(loaded), loaded.stats().rows_written) == (0, 0)
        buffer.save(tmp_path / "own")
        with tr.ReplayBuffer.load(tmp_path / "own") as loaded:
            assert len(loaded) == 300


def test_restores_that_come_to_nothing_may_follow_each_other(tmp_path, monkeypatch):
    small, large = tmp_path / "small", tmp_path / "large"
    save(small)
    with filled(300, 300) as more:
        more.extend(**rows(300, 700))
        more.save(large)
    with filled(0, 200) as buffer:
        for directory in (small, large, small):
            with monkeypatch.context() as patch:
                restore_beside(patch, 3, kill_oneself)
                end_by("killed", buffer, directory)
            assert_nothing_was_restored(buffer)
        buffer.restore(small)
        assert (len(buffer), buffer.stats().drawable) == (200, 200)
        assert_rows_are_those_of_their_keys(buffer.gather(torch.arange(100, 300)))
        assert buffer.extend(**rows(0, 500)).tolist() == list(range(1000, 1500))
        assert len(buffer) == buffer.stats().drawable == 200


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


@pytest.mark.parametrize("sampler", [tr.Uniform(), tr.Prioritized(0.7, 0.5)])
def test_a_file_in_which_a_restore_was_killed_opens_empty(sampler, tmp_path, monkeypatch):
    save(tmp_path / "checkpoint")
    path = tmp_path / "file"

    def restore():
        tr.ReplayBuffer(SPEC, 300, sampler=sampler, path=path).restore(tmp_path / "checkpoint")

    with monkeypatch.context() as patch:
        restore_beside(patch, 3, kill_oneself)
        with Forked(restore) as process:
            assert process.wait() == -signal.SIGKILL
    with tr.ReplayBuffer.open(path) as buffer:
        stats = buffer.stats()
        assert (stats.size, stats.drawable, stats.inserted, stats.dropped_rows, len(buffer)) == (0,) * 5
        buffer.restore(tmp_path / "checkpoint")
        assert len(buffer) == 300
    with tr.ReplayBuffer.open(path) as buffer:
        assert len(buffer) == 300


def test_a_file_of_trajectories_with_a_killed_restore_opens_with_what_explorers_wrote(tmp_path, monkeypatch):
    view = tr.Transitions()
    fields = {"obs": tr.Field((), torch.int64), "action": tr.Field(), "reward": tr.Field()}
    spec = fields | {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}

    def play(buffer, first, steps):
        with buffer.writer() as writer:
            writer.reset(obs=first)
            for step in range(1, steps + 1):
                writer.step(action=0.0, reward=0.0, obs=first + step, terminated=step == steps, truncated=False)

    with tr.ReplayBuffer(spec, 300, view=view) as saved:
        for episode in range(31):  # the ring has turned a little: old rows follow on younger slots
            play(saved, 100 * episode, 9)
        saved.save(tmp_path / "checkpoint")
    path = tmp_path / "file"

    def restore():
        buffer = tr.ReplayBuffer(spec, 300, view=view, path=path)
        restore_beside(monkeypatch, 3, lambda: (play(buffer, 1_000_000, 150), kill_oneself()))
        buffer.restore(tmp_path / "checkpoint")

    with Forked(restore) as process:
        assert process.wait() == -signal.SIGKILL
    with tr.ReplayBuffer.open(path) as buffer:
        assert (len(buffer), buffer.stats().drawable) == (151, 150)
        batch = buffer.sample(1000)
        assert set(batch["obs"].tolist()) == set(range(1_000_000, 1_000_150))
        assert torch.equal(batch["next_obs"], batch["obs"] + 1)


def killed_restores(directory, rounds, seed):
    """Kills restores at random moments. Returns how many were in the midst of it."""
    saved, chance, killed = save(directory), random.Random(seed), 0
    moments = shared_counters(2)

    def restore(buffer):
        moments[0] = time.monotonic_ns()
        buffer.restore(directory)
        moments[1] = time.monotonic_ns()

    with filled(0, 300) as buffer, Forked(restore, buffer) as process:
        assert process.wait() == 0
    longest = (moments[1] - moments[0]) * 1e-9
    for _ in range(rounds):
        moments[0] = moments[1] = 0
        with filled(0, 300) as buffer:
            with Forked(restore, buffer) as process:
                eventually(lambda: moments[0], interval=0)
                time.sleep(chance.uniform(0, longest))
                process.kill()
            if len(buffer) == 0:
                killed += 1
                assert_nothing_was_restored(buffer)
                buffer.restore(directory)
            assert_restored(buffer, saved)
    return killed


def test_killed_at_any_moment_a_restore_is_whole_or_none(tmp_path):
    assert killed_restores(tmp_path, 40, seed=1) > 10


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_of_a_thousand_killed_restores_each_is_whole_or_none(tmp_path):
    assert killed_restores(tmp_path, 1000, seed=2) > 250
