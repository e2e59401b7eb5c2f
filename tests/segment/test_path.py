"""Buffers in files: what comes back when they are opened again, and which processes have them open."""

import fcntl
import multiprocessing as mp
import os
import signal
import threading

import numpy as np
import pytest
import torch
from file_buffers import make, rows
from forked import Forked, eventually, shared_counters
from kept_items import assert_new_goals_are_rewarded, assert_same_items, buffer_of_episodes, buffer_of_goals

import torchreplay as tr
from torchreplay.segment import file_lock


def assert_equal_batches(ours, theirs):
    for name in ("number", "key", "probability", "weight"):
        assert torch.equal(ours[name], theirs[name]), name
    assert torch.equal(ours["wide"]["image"], theirs["wide"]["image"])


# What comes back


def test_a_buffer_that_is_closed_and_opened_goes_on_as_if_nothing_had_happened(path):
    in_file, in_memory = make(path), make(None)
    written = 0
    for turn in range(6):
        for buffer in (in_file, in_memory):
            buffer.extend(**rows(written, 35), priority=torch.arange(35) % 5 + 0.5)
        written += 35
        for _ in range(3):
            ours, theirs = in_file.sample(16), in_memory.sample(16)
            assert_equal_batches(ours, theirs)
            for buffer, batch in ((in_file, ours), (in_memory, theirs)):
                buffer.update_priorities(batch, torch.arange(16.0) * (turn + 1))
        in_file.close()
        in_file = tr.ReplayBuffer.open(path)
        before, after = in_memory.stats().as_dict(), in_file.stats().as_dict()
        for name in ("writers", "learners", "last_write_age"):  # these are of processes
            del before[name], after[name]
        assert before == after
    assert (in_file.spec, in_file.sampler, in_file.limiter) == (in_memory.spec, in_memory.sampler, in_memory.limiter)


def test_feedback_for_a_batch_drawn_before_the_file_was_closed_is_applied(path):
    buffer = make(path)
    buffer.extend(**rows(0, 30))
    batch = buffer.sample(8)
    buffer.close()
    again = tr.ReplayBuffer.open(path)
    again.update_priorities(batch, torch.ones(8))
    assert again.stats().updated == 8
    assert again.extend(**rows(30, 2)).tolist() == [30, 31]


@pytest.mark.parametrize(
    "view",
    [
        tr.Transitions(n_step=3, stack={"obs": 2}),
        tr.Sequences(4, stride=2, burn_in=1),
        tr.Sequences(3, across_episodes=True),
    ],
    ids=["transitions", "sequences", "across"],
)
def test_items_of_linked_rows_come_back_whole_and_incomplete_ones_stay_so(view, path):
    in_memory = buffer_of_episodes(view)
    buffer_of_episodes(view, path).close()
    in_file = tr.ReplayBuffer.open(path)
    assert_same_items(in_memory, in_file)
    writer = in_file.writer()
    with pytest.raises(ValueError, match="reset"):
        writer.step(obs=np.zeros(2), reward=0.0, terminated=False, truncated=False)


def test_the_reward_function_of_hindsight_is_given_again(path):
    buffer = buffer_of_goals(path)
    view = buffer.view
    buffer.close()
    with pytest.raises(ValueError, match="expected the buffer's own"):
        tr.ReplayBuffer.open(path, view=tr.Rows())
    assert_new_goals_are_rewarded(tr.ReplayBuffer.open(path, view=view).sample(64))


def test_a_stopped_buffer_is_opened_to_go_on(path):
    buffer = make(path)
    buffer.stop()
    buffer.close()
    again = tr.ReplayBuffer.open(path)
    assert not again.stopped
    again.extend(**rows(0, 1))


def test_a_checkpoint_is_loaded_into_a_file(path, tmp_path):
    buffer = make(None)
    buffer.extend(**rows(0, 120))
    buffer.save(tmp_path / "checkpoint")
    tr.ReplayBuffer.load(tmp_path / "checkpoint", path=path).close()
    again = tr.ReplayBuffer.open(path)
    assert_equal_batches(again.sample(32), buffer.sample(32))
    (shard,) = (tmp_path / "checkpoint").glob("rows-*/*")
    shard.unlink()
    with pytest.raises(tr.CheckpointError, match="damaged"):
        tr.ReplayBuffer.load(tmp_path / "checkpoint", path=tmp_path / "other.bin")
    assert not (tmp_path / "other.bin").exists()


# Who has it open


def test_a_file_that_is_open_is_opened_as_the_buffer_that_it_is(path):
    buffer = make(path)
    other = tr.ReplayBuffer.open(path)
    other.extend(**rows(0, 3))
    assert len(buffer) == 3
    with Forked(lambda: tr.ReplayBuffer.open(path).extend(**rows(3, 4))) as child:
        assert child.wait() == 0
    assert len(buffer) == 7
    buffer.close()
    other.extend(**rows(7, 2))
    other.close()
    assert len(tr.ReplayBuffer.open(path)) == 9


def test_a_forked_child_keeps_the_file_in_use_when_its_parent_is_killed(path):
    ours, theirs = mp.Pipe()

    def parent():
        buffer = make(path)
        if os.fork():
            theirs.send("forked")
            signal.pause()
        theirs.recv()
        buffer.extend(**rows(0, 5))
        theirs.send("written")
        theirs.recv()
        os._exit(0)

    with Forked(parent) as killed:
        assert ours.recv() == "forked"
        killed.kill()
    buffer = tr.ReplayBuffer.open(path)
    ours.send("write")
    assert ours.recv() == "written"
    assert len(buffer) == 5
    ours.send("end")


def test_a_wait_for_a_process_that_repairs_the_file_is_logged(path, monkeypatch, caplog):
    monkeypatch.setattr(file_lock, "LOG_EVERY", 0.05)
    make(path).close()
    repairer = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(repairer, fcntl.LOCK_EX)
        opener = threading.Thread(target=lambda: tr.ReplayBuffer.open(path).close())
        opener.start()
        eventually(lambda: f"waiting for another process that repairs {path}" in caplog.text)
    finally:
        os.close(repairer)
    opener.join()


def open_append_and_close(path, index, turns, acknowledged):
    for turn in range(turns):
        with tr.ReplayBuffer.open(path) as buffer:
            buffer.extend(**rows(index * 1000 + turn, 1))
            acknowledged[index] = turn + 1


def churn(path, processes, turns):
    make(path, capacity=processes * turns).close()
    acknowledged = shared_counters(processes)
    children = [Forked(open_append_and_close, path, index, turns, acknowledged) for index in range(processes)]
    assert [child.wait() for child in children] == [0] * processes
    numbers = tr.ReplayBuffer.open(path).gather(torch.arange(processes * turns))["number"]
    assert sorted(numbers.tolist()) == [index * 1000 + turn for index in range(processes) for turn in range(turns)]


def test_processes_that_open_and_close_one_file_all_the_time_lose_nothing(path):
    churn(path, processes=3, turns=12)


@pytest.mark.soak
def test_processes_that_open_and_close_one_file_a_thousand_times_lose_nothing(path):
    churn(path, processes=4, turns=250)
