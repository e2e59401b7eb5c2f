"""Several learners: ranks that die or fail, and what the others make of it."""

import dataclasses
import json
import os
import select
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked import Forked
from gloo_ranks import await_end_of, run_ranks
from shared_by_ranks import ROWS, RecordingExplorers, make_buffer
from torch.nn.parallel import DistributedDataParallel

import torchreplay as tr
from torchreplay.distributed import learners, rank_monitor


def train(buffer, at_step=None, then=None, steps=1000):
    """Trains under DDP, which waits for all ranks in every step; calls `then` at one step."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(steps):
        batch = buffer.sample(8)
        if step == at_step:
            then()
        (batch["weight"] * model(batch["obs"])[:, 0] ** 2).mean().backward()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("a bad batch\nin two lines")


def is_gone(outcome, rank):
    return f"rank {rank} (process {outcome['pid']}) is gone"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_training_ends_the_others_with_its_name(tmp_path, victim, capfd):
    def body(rank):
        calls = []
        try:
            with tr.Learners(make_buffer, lambda buffer: RecordingExplorers(buffer, calls)) as buffer:
                train(buffer, *((5, die) if rank == victim else ()))
        finally:
            (tmp_path / f"calls{rank}").write_text(json.dumps(calls))

    ranks = run_ranks(tmp_path, body, n=3)
    assert ranks[victim]["status"] == -signal.SIGKILL
    for number, outcome in enumerate(ranks):
        if number != victim:
            assert outcome["error"] == "LearnerLost"
            assert is_gone(ranks[victim], victim) in outcome["text"]
    assert is_gone(ranks[victim], victim) in capfd.readouterr().err
    if victim == 2:
        assert json.loads((tmp_path / "calls0").read_text()) == [["start", False], ["stop", True]]


@pytest.mark.parametrize("waiting", ["sample", "collective"])
def test_a_wait_for_a_rank_that_was_killed_ends(tmp_path, waiting):
    limiter = tr.MinSize(10 * ROWS)

    def body(rank):
        with tr.Learners(lambda: make_buffer(limiter=limiter)) as buffer, buffer.expect_writers():
            dist.barrier()
            if rank == 1:
                die()
            if waiting == "sample":
                buffer.sample(8)
            else:
                dist.all_reduce(torch.ones(4))

    first, second = run_ranks(tmp_path, body)
    assert first["error"] == "LearnerLost"
    assert is_gone(second, 1) in first["text"]


def test_a_stream_that_ends_because_a_rank_is_gone_is_an_error_at_the_end_of_the_block(tmp_path):
    def body(rank):
        with tr.Learners(make_buffer) as buffer:
            dist.barrier()
            if rank == 1:
                die()
            for _ in tr.ReplayDataset(buffer, 8):
                pass

    first, second = run_ranks(tmp_path, body)
    assert first["error"] == "LearnerLost"
    assert is_gone(second, 1) in first["text"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_but_lives_on_ends_the_others_with_its_error(tmp_path, failing, capfd, monkeypatch):
    monkeypatch.setattr(rank_monitor, "GRACE", 0.2)

    def body(rank):
        calls = []
        try:
            with tr.Learners(make_buffer, lambda buffer: RecordingExplorers(buffer, calls)) as buffer:
                train(buffer, *((5, fail) if rank == failing else ()))
        except ValueError:
            assert rank == failing
            await_end_of(tmp_path, 1 - failing)  # its connections stay open for as long as it lives
        return calls

    ranks = run_ranks(tmp_path, body)
    other = ranks[1 - failing]
    assert other["status"] == 1 or other["error"] == "LearnerLost"  # 1: it was ended in its collective
    reason = f"rank {failing} (process {ranks[failing]['pid']}) ended with ValueError: a bad batch"
    assert reason in (capfd.readouterr().err if other["status"] else other["text"])
    assert ranks[failing]["value"] == ([["start", False], ["stop", True]] if failing == 0 else [])


def test_ranks_that_all_fail_keep_their_process_group(tmp_path):
    def body(rank):
        with pytest.raises(ValueError, match="a bad batch"), tr.Learners(make_buffer) as buffer:
            train(buffer, 3, lambda: (dist.barrier(), fail()))
        total = torch.tensor([1.0 + rank])
        dist.all_reduce(total)
        return total.item()

    assert [outcome["value"] for outcome in run_ranks(tmp_path, body)] == [3.0, 3.0]


def test_a_rank_that_has_finished_may_end_while_others_go_on(tmp_path):
    def body(rank):
        with tr.Learners(make_buffer()) as buffer:
            train(buffer, steps=3)
            if rank == 0:
                await_end_of(tmp_path, 1)
            return [buffer.stopped, len(buffer.sample(8)["key"])]

    assert [outcome["value"] for outcome in run_ranks(tmp_path, body)] == [[False, 8]] * 2


def test_a_rank_that_cannot_come_out_of_what_it_does_is_ended_with_the_reason(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(rank_monitor, "GRACE", 0.2)

    def body(rank):
        with tr.Learners(make_buffer):
            dist.barrier()
            if rank == 1:
                die()
            signal.pause()

    first, second = run_ranks(tmp_path, body)
    assert first["status"] == 1
    assert "error" not in first
    text = capfd.readouterr().err
    assert is_gone(second, 1) in text
    assert "has not come out of this within 0.2 s" in text
    assert "most recent call first" in text


def test_a_buffer_that_cannot_be_made_is_an_error_on_every_rank(tmp_path):
    def body(rank):
        with tr.Learners(lambda: tr.ReplayBuffer({"x": tr.Field(2**20)}, 2**20)):  # 4 TiB
            pass

    def unattached(rank):
        if rank == 1:
            tr.ReplayBuffer.attach = fail
        with tr.Learners(make_buffer):
            pass

    first, second = run_ranks(tmp_path, body)
    assert first["error"] == "MemoryError"
    assert f"rank 0 (process {first['pid']}) ended with MemoryError" in second["text"]
    first, second = run_ranks(tmp_path, unattached)
    assert f"rank 1 (process {second['pid']}) ended with" in first["text"]


def test_a_rank_killed_while_the_buffer_is_made_is_named_too(tmp_path):
    def body(rank):
        with tr.Learners(die):
            pass

    first, second = run_ranks(tmp_path, body)
    assert second["error"] == "LearnerLost"
    assert is_gone(first, 0) in second["text"]


def test_a_rank_whose_process_is_not_to_be_seen_is_named():
    here = rank_monitor.RankMonitor(0, "here")
    try:
        for pid, inode in ((2**22 + 1, here.me.inode), (os.getpid(), here.me.inode + 1)):
            with pytest.raises(
                tr.AttachError, match=rf"rank 0 .* does not see the process of rank 1 \(process {pid}\)"
            ):
                here.meet([here.me, dataclasses.replace(here.me, rank=1, pid=pid, inode=inode)])
    finally:
        here.leave()


def test_a_rank_that_leaves_in_order_and_ends_while_one_look_goes_from_pipe_to_process_is_not_lost():
    here = rank_monitor.RankMonitor(0, "here")
    with Forked(signal.pause) as other:
        here.meet([here.me, dataclasses.replace(here.me, rank=1, pid=other.pid)])  # it has inherited the pipe
    alive = here._peers[1].alive
    # The pipe was looked at before it said so, its process after it had ended.
    looked = SimpleNamespace(poll=lambda timeout: [(alive, select.POLLIN)], unregister=lambda fd: None)
    here._write(here._own, "left 1")
    here._look(looked, 0.0)
    assert here.loss is None
    here.leave()


def test_ranks_are_freed_from_collectives_also_where_their_buffer_cannot_be_told(monkeypatch):
    def unreachable():
        raise OSError("the network is down")  # Ray's errors are no RuntimeErrors either

    freed = []
    world = SimpleNamespace(WORLD=SimpleNamespace(abort=lambda: freed.append("collectives")))
    monkeypatch.setattr(learners, "dist", SimpleNamespace(is_initialized=lambda: True, group=world))
    learners._end_waits([(SimpleNamespace(stop=unreachable), True)])
    assert freed == ["collectives"]
