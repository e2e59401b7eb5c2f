"""A pool of explorers, as Ray actors and as plain processes: the same things hold for both."""

import os
import signal
import time

import pytest
import torch
from forked import eventually
from numbered_rows import assert_intact, is_running, make_buffer, row

import torchreplay as tr
from torchreplay.ray import ExplorerPool, ExplorersFailed

STARTUP = 150.0  # seconds: processes that import torch on a machine that is busy with other things


def explore(ctx):
    """Writes rows and episodes until it is stopped."""
    writer, count = ctx.writer(), 0
    while not ctx.stopped:
        writer.append(**row(ctx.index, ctx.seed, count))
        count += 1
        if count % 100 == 0:
            ctx.record(episode_return=float(ctx.index), episode_length=100)


def test_rows_of_explorers_arrive_intact_and_stop_leaves_no_process(backend):
    buffer = make_buffer()
    with ExplorerPool(explore, 2, buffer, seed=3, backend=backend) as pool:
        assert pool.start() is pool  # again: does nothing
        eventually(lambda: all(s.alive and s.episodes for s in pool.stats()), STARTUP)
        for _ in range(20):
            assert_intact(buffer.sample(256, timeout=STARTUP))
        eventually(lambda: set(buffer.sample(1024)["explorer"].tolist()) == {0, 1})
        batch = buffer.sample(1024)
        by_explorer = {(int(e), int(s)) for e, s in zip(batch["explorer"], batch["seed"], strict=True)}
        assert len({seed for _, seed in by_explorer}) == len({e for e, _ in by_explorer})
        pids = [s.pid for s in pool.stats()]
        assert len({os.getpid(), *pids}) == 3
    assert not any(is_running(pid) for pid in pids)
    assert [s.state for s in pool.stats()] == ["stopped"] * 2
    assert [s.mean_return for s in pool.stats()] == [0.0, 1.0]
    assert buffer.stats().writers == 0
    assert not buffer.stopped
    pool.stop()


@pytest.mark.slow
def test_a_sigkilled_explorer_is_restarted_while_the_others_go_on(backend):
    buffer = make_buffer()
    with ExplorerPool(explore, 2, buffer, restart_delay=0.01, backend=backend) as pool:
        eventually(lambda: all(s.alive and s.episodes for s in pool.stats()), STARTUP)
        victim, other = pool.stats()
        os.kill(victim.pid, signal.SIGKILL)
        eventually(lambda: pool.stats()[0].restarts == 1)
        before = buffer.stats().rows_written
        buffer.sample(64, timeout=STARTUP)
        eventually(lambda: buffer.stats().rows_written > before)
        eventually(lambda: pool.stats()[0].alive and pool.stats()[0].episodes > victim.episodes, STARTUP)
        again = pool.stats()
        assert again[0].pid != victim.pid
        assert (again[1].pid, again[1].restarts) == (other.pid, 0)
        assert [(f.index, f.died) for f in pool.errors] == [(0, True)]
        assert_intact(buffer.sample(512))


@pytest.mark.slow
def test_a_raising_explorer_shows_its_own_traceback_and_comes_back(backend, caplog):
    def raise_once(ctx):
        writer = ctx.writer()
        writer.append(**row(ctx.index, ctx.seed, ctx.restarts))
        if ctx.restarts == 0:
            raise ValueError("the simulator is on fire")

    buffer = make_buffer()
    with ExplorerPool(raise_once, 1, buffer, restart_delay=0.01, backend=backend) as pool:
        assert pool.wait(STARTUP)
        (stats,) = pool.stats()
        (failure,) = pool.errors
    assert (stats.state, stats.restarts) == ("finished", 1)
    assert failure.error == stats.last_error == "ValueError: the simulator is on fire"
    assert "in raise_once" in failure.traceback
    assert "test_pool.py" in failure.traceback
    assert failure.traceback in caplog.text
    assert buffer.storage["count"][:2].tolist() == [0, 1]
    first, second = buffer.storage["seed"][:2].tolist()
    assert first != second


@pytest.mark.slow
def test_when_all_explorers_have_failed_the_waiting_learner_learns_why(backend):
    def broken(ctx):
        raise ValueError("no such environment")

    buffer = make_buffer(limiter=tr.MinSize(100))
    pool = ExplorerPool(broken, 1, buffer, max_restarts=0, backend=backend)
    with pytest.raises(tr.WouldBlockForever) as caught, pool:
        buffer.sample(32)
    assert "no such environment" in "".join(caught.value.__notes__)
    assert pool.stats()[0].state == "failed"
    with pytest.raises(ExplorersFailed, match="no such environment"):
        pool.check()


@pytest.mark.slow
def test_an_error_in_the_with_body_ends_explorers_that_wait_for_room(backend):
    def flood(ctx):
        writer = ctx.writer()
        for count in range(10**9):
            writer.append(**row(ctx.index, ctx.seed, count))

    buffer = make_buffer(limiter=tr.SamplesPerInsert(1.0, min_size=10))
    pool = ExplorerPool(flood, 1, buffer, backend=backend)
    pids = []

    def learn():
        with pool:
            buffer.sample(8, timeout=STARTUP)
            pids.extend(s.pid for s in pool.stats())
            raise RuntimeError("the learner fails")

    with pytest.raises(RuntimeError, match="the learner fails"):
        learn()
    assert not any(is_running(pid) for pid in pids)
    assert pool.stats()[0].state == "stopped"
    assert not pool.errors
    assert len(buffer.sample(8)["key"]) == 8


@pytest.mark.slow
def test_a_function_that_never_looks_up_is_interrupted_and_cleans_up(backend, tmp_path):
    def sleep(ctx):
        try:
            ctx.record(episode_return=0.0, episode_length=1)
            time.sleep(3600)
        finally:
            (tmp_path / "cleaned up").touch()

    pool = ExplorerPool(sleep, 1, make_buffer(), backend=backend).start()
    eventually(lambda: pool.stats()[0].episodes, STARTUP)
    pool.stop(timeout=30.0)
    assert (tmp_path / "cleaned up").exists()
    assert not pool.errors


@pytest.mark.slow
def test_explorers_pull_published_weights_and_a_stopped_pool_starts_again(backend):
    def explore_with_weights(ctx):
        policy = torch.nn.Linear(1, 1, bias=False)
        assert torch.get_num_threads() == 1
        with ctx.writer() as writer:
            while not ctx.stopped:
                if ctx.pull_weights(policy):
                    writer.append(**row(ctx.index, ctx.seed, int(policy.weight.detach())))

    policy = torch.nn.Linear(1, 1, bias=False)
    weights, buffer = tr.SharedWeights(policy), make_buffer()
    pool = ExplorerPool(explore_with_weights, 1, buffer, weights, backend=backend)
    for version in (11.0, 12.0):
        with pool:
            with torch.no_grad():
                policy.weight.fill_(version)
            weights.publish(policy)
            eventually(lambda version=version: version in buffer.storage["count"].tolist(), STARTUP)
        (stats,) = pool.stats()
        assert stats.weight_version == weights.version
        assert 1 <= stats.weight_syncs <= 2  # the first pull may come before or after the publication
        assert stats.rows == stats.weight_syncs
    seeds = buffer.storage["seed"][buffer.storage["count"] == 11].tolist()
    assert not set(seeds) & set(buffer.storage["seed"][buffer.storage["count"] == 12].tolist())


@pytest.mark.slow
def test_an_explorer_that_keeps_failing_is_dropped_with_its_traceback_while_the_others_go_on(backend, caplog):
    def explore_or_fail(ctx):
        if ctx.index == 0:
            raise ValueError("a broken simulator")
        explore(ctx)

    buffer = make_buffer()
    with ExplorerPool(explore_or_fail, 2, buffer, max_restarts=1, restart_delay=0.01, backend=backend) as pool:
        eventually(lambda: pool.stats()[0].state == "failed" and pool.stats()[1].alive, STARTUP)
        written = buffer.stats().rows_written
        eventually(lambda: buffer.stats().rows_written > written)
        pool.check()  # one is left
        assert not pool.wait(timeout=0)
        dropped, other = pool.stats()
    assert (dropped.restarts, other.restarts) == (1, 0)
    assert "in explore_or_fail" in dropped.last_traceback
    assert "ValueError: a broken simulator" in dropped.last_traceback
    assert (other.last_error, other.last_traceback) == (None, None)
    assert "explorer 0 of 2 failed (dropped: max_restarts=1 is used up)" in caplog.text
