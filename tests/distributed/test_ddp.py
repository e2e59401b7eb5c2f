"""Several learners on one machine: real ranks, real gloo, one buffer."""

import os
import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from forked import eventually
from gloo_ranks import run_ranks
from shared_by_ranks import ROWS, RecordingExplorers, make_buffer, write

import torchreplay as tr
from torchreplay.distributed import learners


def test_rank_zero_makes_the_buffer_and_runs_the_explorers_and_the_others_attach(tmp_path):
    def body(rank):
        made, calls = [], []

        def make():
            made.append(rank)
            return make_buffer()

        with tr.Learners(make, lambda buffer: RecordingExplorers(buffer, calls)) as buffer:
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
    with tr.Learners(make_buffer, lambda buffer: RecordingExplorers(buffer, calls)) as buffer:
        assert buffer.sample(8)["obs"].shape == (8, 4)
    assert calls == [["start", False], ["stop", True]]
    with pytest.raises(ZeroDivisionError), tr.Learners(make_buffer, lambda buffer: RecordingExplorers(buffer, calls)):
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

    def draw_all(buffer, total):
        drawn = [0]

        def is_drawn():
            with suppress(tr.ReplayTimeout):  # the other rank may have taken what was left
                buffer.sample(4, timeout=0.01)
                drawn[0] += 4
            return buffer.stats().sampled >= total

        eventually(is_drawn)
        with pytest.raises(tr.ReplayTimeout):
            buffer.sample(4, timeout=0.1)
        return drawn[0]

    def body(rank):
        with tr.Learners(lambda: make_buffer(limiter=limiter)) as buffer, buffer.expect_writers():
            first = draw_all(buffer, 64)
            dist.barrier()
            if rank == 0:
                write(buffer, 10)  # which allows 20 more
            dist.barrier()
            second = draw_all(buffer, 84)
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
        with tr.Learners(lambda: make_buffer(limiter=limiter, capacity=1024)) as buffer:
            thread = threading.Thread(target=append_until_stopped, args=(buffer,))
            if rank == 0:
                thread.start()
            for drawn, rows in ((0, 96), (6, 144)):
                for _ in range(drawn):
                    buffer.sample(8)
                dist.barrier()
                eventually(lambda rows=rows: waits_at(buffer) == rows)
                dist.barrier()
            buffer.stop()
            if rank == 0:
                thread.join()
            return buffer.stats().rows_written

    for outcome in run_ranks(tmp_path, body):
        assert outcome["value"] == 144


def append_until_stopped(buffer):
    with buffer.writer() as writer:
        try:
            while True:
                writer.append(number=0, obs=torch.ones(4))
        except tr.Stopped:
            return


def waits_at(buffer):
    """How many rows there are, if the writer waits now; None if it does not."""
    return buffer.stats().rows_written if buffer._segment.census(False)["waiting"] else None


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
            assert "torchreplay.ray.ShardedReplay with a ReplayDataset of its own" in outcome["text"]
