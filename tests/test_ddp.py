"""Several learners on one machine: real ranks, real gloo, one buffer."""

import dataclasses
import importlib
import json
import os
import signal
import socket
import threading

import pytest
import torch
import torch.distributed as dist
from forked import Forked, eventually
from gloo_ranks import await_end_of, run_ranks
from torch.nn.parallel import DistributedDataParallel

import torchreplay as tr
from torchreplay import learners, peers
from torchreplay.hanging_up import hang_up

ROWS = 64
SPEC = {"number": tr.Field((), torch.int64), "obs": tr.Field((4,))}


def make_buffer(sampler=None, limiter=None, capacity=ROWS):
    """Holds 64 rows; the row with key k holds the number k, and its TD error is 1 + k."""
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=sampler or tr.Prioritized(alpha=1.0), limiter=limiter, seed=3)
    write(buffer)
    return buffer


def write(buffer, rows=ROWS):
    priority = 1.0 + torch.arange(rows)
    buffer.extend(number=torch.arange(rows), obs=torch.ones(rows, 4), priority=priority)


@pytest.fixture(scope="module", autouse=True)
def what_ranks_import():
    """What DDP imports late, here once instead of in every forked rank."""
    importlib.import_module("torch._dynamo")


class Crew:
    """Explorers that write down what is done to them, and whether the buffer had been stopped then."""

    def __init__(self, buffer, calls):
        self.buffer, self.calls = buffer, calls

    def start(self):
        self.calls.append(["start", self.buffer.stopped])

    def stop(self):
        self.calls.append(["stop", self.buffer.stopped])


# One buffer for all ranks.


def test_rank_zero_makes_the_buffer_and_runs_the_explorers_and_the_others_attach(tmp_path):
    def body(rank):
        made, calls = [], []

        def make():
            made.append(rank)
            return make_buffer()

        with tr.Learners(make, lambda buffer: Crew(buffer, calls)) as buffer:
            drawn = [buffer.sample(8)["key"].tolist() for _ in range(10)]
            dist.barrier()
            stats = buffer.stats()
            dist.barrier()
        with pytest.raises(RuntimeError, match="closed"):
            buffer.sample(8)
        return {"made": made, "calls": calls, "drawn": drawn, "sampled": stats.sampled, "learners": stats.learners}

    ranks = [outcome["value"] for outcome in run_ranks(tmp_path, body, n=3)]
    assert [rank["made"] for rank in ranks] == [[0], [], []]
    assert [rank["calls"] for rank in ranks] == [[["start", False], ["stop", True]], [], []]
    drawn = [tuple(keys) for rank in ranks for keys in rank["drawn"]]
    assert len(set(drawn)) == len(drawn) == 30
    assert [(rank["sampled"], rank["learners"]) for rank in ranks] == [(30 * 8, 3)] * 3


def test_a_single_process_needs_no_process_group():
    calls = []
    with tr.Learners(make_buffer, lambda buffer: Crew(buffer, calls)) as buffer:
        assert buffer.sample(8)["obs"].shape == (8, 4)
    assert calls == [["start", False], ["stop", True]]
    with pytest.raises(ZeroDivisionError), tr.Learners(make_buffer, lambda buffer: Crew(buffer, calls)):
        _ = 1 / 0
    assert calls == [["start", False], ["stop", True]] * 2


def test_a_given_buffer_is_that_of_rank_zero_and_stays_open(tmp_path):
    def body(rank):
        mine = make_buffer()
        with tr.Learners(mine) as buffer:
            buffer.update_priorities(torch.tensor([rank]), torch.tensor([500.0 + rank]))
            dist.barrier()
            is_mine, highest = buffer is mine, buffer.stats().priority_max
            dist.barrier()
        return [is_mine, highest, mine.sample(8)["obs"].shape[0], mine.stopped]

    ranks = [outcome["value"] for outcome in run_ranks(tmp_path, body)]
    assert ranks == [[True, 501.0, 8, False], [False, 501.0, 8, False]]


def test_a_view_with_functions_of_its_own_comes_along(tmp_path):
    def body(rank):
        spec = {
            "obs": {"observation": tr.Field(2), "achieved_goal": tr.Field(2), "desired_goal": tr.Field(2)},
            "action": tr.Field(), "reward": tr.Field(), "terminated": tr.Field(dtype=torch.bool),
            "truncated": tr.Field(dtype=torch.bool),
        }  # fmt: skip
        with tr.Learners(lambda: tr.ReplayBuffer(spec, 64, view=tr.Hindsight(distance))) as buffer:
            return buffer.view.compute_reward is distance

    assert [outcome["value"] for outcome in run_ranks(tmp_path, body)] == [True, True]


def distance(achieved_goal, desired_goal, info):
    return -torch.linalg.vector_norm(achieved_goal - desired_goal, dim=-1)


# Weights and limiter.


def test_every_rank_gives_an_item_the_weight_of_the_formula(tmp_path):
    def body(rank):
        with tr.Learners(lambda: make_buffer(tr.Prioritized(alpha=1.0, beta=0.7, eps=1e-6))) as buffer:
            batch = buffer.sample(32)
            dist.barrier()
            return [batch["number"].tolist(), batch["weight"].tolist()]

    # (N P)^-beta over the largest one of the buffer, that of the smallest leaf: P_i = p_i / sum p, p_i = 1 + i.
    for numbers, weights in (outcome["value"] for outcome in run_ranks(tmp_path, body)):
        expected = [(1.0 / (1.0 + number)) ** 0.7 for number in numbers]
        assert weights == pytest.approx(expected, rel=1e-4)


def test_weights_that_would_differ_between_ranks_are_refused_on_all_of_them(tmp_path):
    def body(rank):
        tr.Learners(lambda: make_buffer(tr.Prioritized(weights="batch"))).join()

    first, second = run_ranks(tmp_path, body)
    assert first["error"] == "ValueError"
    assert 'use weights="buffer"' in first["text"]
    assert second["error"] == "LearnerLost"
    assert f"rank 0 (process {first['pid']}) ended with ValueError" in second["text"]


def test_one_limiter_counts_what_all_ranks_draw(tmp_path):
    # 2 draws an item: at 64 items the balance 128 - sampled must stay at 128 - 64 or above, so 64 draws are allowed.
    limiter = tr.SamplesPerInsert(2.0, min_size=ROWS, tolerance=0.5)

    def draw_all(buffer):
        drawn = 0
        while True:
            try:
                buffer.sample(4, timeout=0.3)
            except tr.ReplayTimeout:
                return drawn
            drawn += 4

    def body(rank):
        with tr.Learners(lambda: make_buffer(limiter=limiter)) as buffer, buffer.expect_writers():
            first = draw_all(buffer)
            dist.barrier()
            if rank == 0:
                write(buffer, 10)  # which allows 20 more
            dist.barrier()
            second = draw_all(buffer)
            dist.barrier()
            return [first, second, buffer.stats().sampled]

    ranks = [outcome["value"] for outcome in run_ranks(tmp_path, body)]
    assert sum(first for first, _, _ in ranks) == 64
    assert sum(second for _, second, _ in ranks) == 20
    assert [total for _, _, total in ranks] == [84, 84]


def test_explorers_are_held_to_the_draws_of_all_ranks(tmp_path):
    # Inserted * 2 - sampled may reach 128 + 64: 96 items, and (192 + 96) / 2 = 144 once 2 * 6 * 8 were drawn.
    limiter = tr.SamplesPerInsert(2.0, min_size=ROWS, tolerance=0.5)

    def body(rank):
        stalls = []
        with tr.Learners(lambda: make_buffer(limiter=limiter, capacity=1024)) as buffer:
            thread = threading.Thread(target=append_until_stopped, args=(buffer,))
            if rank == 0:
                thread.start()
            for drawn in (0, 6):
                for _ in range(drawn):
                    buffer.sample(8)
                dist.barrier()
                stalls.append(stalled_at(buffer))
                dist.barrier()
            buffer.stop()
            if rank == 0:
                thread.join()
        return stalls

    for outcome in run_ranks(tmp_path, body):
        assert outcome["value"] == [96, 144]


def append_until_stopped(buffer):
    with buffer.writer() as writer:
        try:
            while True:
                writer.append(number=0, obs=torch.ones(4))
        except tr.Stopped:
            return


def stalled_at(buffer):
    """Returns how many rows there are once the writer waits."""
    seen = [-1, -2, -3]

    def waits():
        seen.append(buffer.stats().rows_written)
        return len(set(seen[-30:])) == 1

    eventually(waits, interval=0.01)
    return seen[-1]


# Ranks that die or fail.


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
            with tr.Learners(make_buffer, lambda buffer: Crew(buffer, calls)) as buffer:
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
def test_a_rank_that_fails_but_lives_on_ends_the_others_with_its_error(tmp_path, failing):
    def body(rank):
        calls = []
        try:
            with tr.Learners(make_buffer, lambda buffer: Crew(buffer, calls)) as buffer:
                train(buffer, *((5, fail) if rank == failing else ()))
        except ValueError:
            assert rank == failing
            await_end_of(tmp_path, 1 - failing)  # its connections stay open for as long as it lives
        return calls

    ranks = run_ranks(tmp_path, body)
    other = ranks[1 - failing]
    assert other["error"] == "LearnerLost"
    assert f"rank {failing} (process {ranks[failing]['pid']}) ended with ValueError: a bad batch" in other["text"]
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
    monkeypatch.setattr(peers, "GRACE", 0.2)

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
        with tr.Learners(lambda: tr.ReplayBuffer(SPEC, 2**31 - 1)):
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
    here = peers.Peers(0, "here")
    try:
        for pid, inode in ((2**22 + 1, here.me.inode), (os.getpid(), here.me.inode + 1)):
            with pytest.raises(
                tr.AttachError, match=rf"rank 0 .* does not see the process of rank 1 \(process {pid}\)"
            ):
                here.meet([here.me, dataclasses.replace(here.me, rank=1, pid=pid, inode=inode)])
    finally:
        here.leave()


def test_hanging_up_ends_the_connections_with_one_process_and_no_others():
    with socket.create_server(("127.0.0.1", 0)) as server:
        own, mine = connection(server), connection(server)  # both of whose ends are ours
        with Forked(connect_and_wait, server.getsockname()) as other:
            theirs, _ = server.accept()
            assert hang_up([other.pid]) == 1
            assert theirs.recv(1) == b""
            assert other.wait() == 0
        for near, far in (own, mine):
            near.sendall(b"x")
            assert far.recv(1) == b"x"
            near.close()
            far.close()
        theirs.close()


def connection(server):
    near = socket.create_connection(server.getsockname())
    return near, server.accept()[0]


def connect_and_wait(address):
    with socket.create_connection(address) as connection:
        assert connection.recv(1) == b""


# More than one machine.


def test_ranks_on_several_machines_are_refused(tmp_path, monkeypatch):
    def told(rank):
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        tr.Learners(make_buffer).join()

    def found_out(rank):
        learners.machine_id = lambda: f"machine {rank}"
        tr.Learners(make_buffer).join()

    for body, words in ((told, "2 ranks, 1 of them on this machine"), (found_out, "spread over 2 machines")):
        for outcome in run_ranks(tmp_path, body):
            assert outcome["error"] == "RuntimeError"
            assert words in outcome["text"]
            assert "torchreplay.ray.ShardedReplay" in outcome["text"]
