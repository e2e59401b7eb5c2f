"""Restores that do not come to their end: a buffer gets all rows of a checkpoint, or none."""

import random
import shutil
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from restores import (
    ACTS,
    ENDS,
    TIMES,
    assert_nothing_was_restored,
    assert_restored,
    end_by,
    kill_oneself,
    one,
    restore_beside,
    save,
)
from saved_rows import SPEC, assert_rows_are_those_of_their_keys, filled, rows

import torchreplay as tr

pytestmark = pytest.mark.usefixtures("small_files")


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


@pytest.mark.slow
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


def killed_restores(directory, rounds, seed, **sizes):
    """Kills restores at random moments. Returns how many were killed halfway."""
    saved, chance, killed = save(directory, **sizes), random.Random(seed), 0
    moments = shared_counters(2)

    def restore(buffer):
        moments[0] = time.monotonic_ns()
        buffer.restore(directory)
        moments[1] = time.monotonic_ns()

    with filled(0, 300, **sizes) as buffer, Forked(restore, buffer) as process:
        assert process.wait() == 0
    longest = (moments[1] - moments[0]) * 1e-9
    for _ in range(rounds):
        moments[0] = moments[1] = 0
        with filled(0, 300, **sizes) as buffer:
            with Forked(restore, buffer) as process:
                eventually(lambda: moments[0], interval=0)
                time.sleep(chance.uniform(0, longest))
                process.kill()
            if len(buffer) == 0:
                killed += 1
                assert_nothing_was_restored(buffer, **sizes)
                buffer.restore(directory)
            assert_restored(buffer, saved)
    return killed


@pytest.mark.parametrize("sizes", [{}, {"ragged_bytes": 300 * 512}], ids=["of one shape", "of any length"])
def test_killed_at_any_moment_a_restore_is_whole_or_none(sizes, tmp_path):
    assert killed_restores(tmp_path, 40, seed=1, **sizes) > 10


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_of_a_thousand_killed_restores_each_is_whole_or_none(tmp_path):
    assert killed_restores(tmp_path, 1000, seed=2) > 250
