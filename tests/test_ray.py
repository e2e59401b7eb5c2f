"""Explorers as Ray actors, on a real Ray."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import eventually
from numbered_rows import SPEC, assert_intact, is_running, make_buffer, row

import torchreplay as tr
from torchreplay.ray import ExplorerPool, ExplorersFailed


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


def explore(ctx):
    """Writes rows and episodes until it is stopped."""
    writer, count = ctx.writer(), 0
    while not ctx.stopped:
        writer.append(**row(ctx.index, ctx.seed, count))
        count += 1
        if count % 100 == 0:
            ctx.record(episode_return=float(ctx.index), episode_length=100)


def test_rows_of_ray_explorers_arrive_intact_and_stop_leaves_no_process(ray):
    buffer = make_buffer()
    with ExplorerPool(explore, 3, buffer, seed=3) as pool:
        assert pool.start() is pool  # again: does nothing
        eventually(lambda: all(s.alive and s.episodes for s in pool.stats()))
        for _ in range(20):
            assert_intact(buffer.sample(256, timeout=60.0))
        eventually(lambda: set(buffer.sample(1024)["explorer"].tolist()) == {0, 1, 2})
        batch = buffer.sample(1024)
        by_explorer = {(int(e), int(s)) for e, s in zip(batch["explorer"], batch["seed"], strict=True)}
        assert len({seed for _, seed in by_explorer}) == len({e for e, _ in by_explorer})
        pids = [s.pid for s in pool.stats()]
        assert len({os.getpid(), *pids}) == 4
    assert not any(is_running(pid) for pid in pids)
    assert [s.state for s in pool.stats()] == ["stopped"] * 3
    assert [s.mean_return for s in pool.stats()] == [0.0, 1.0, 2.0]
    assert buffer.stats().writers == 0
    assert not buffer.stopped
    pool.stop()


def test_a_sigkilled_explorer_is_restarted_while_the_others_go_on(ray):
    buffer = make_buffer()
    with ExplorerPool(explore, 2, buffer, restart_delay=0.01) as pool:
        eventually(lambda: all(s.alive and s.episodes for s in pool.stats()))
        victim, other = pool.stats()
        os.kill(victim.pid, signal.SIGKILL)
        eventually(lambda: pool.stats()[0].restarts == 1)
        before = buffer.stats().rows_written
        buffer.sample(64, timeout=60.0)
        eventually(lambda: buffer.stats().rows_written > before)
        eventually(lambda: pool.stats()[0].alive and pool.stats()[0].episodes > victim.episodes)
        again = pool.stats()
        assert again[0].pid != victim.pid
        assert (again[1].pid, again[1].restarts) == (other.pid, 0)
        assert [(f.index, f.died) for f in pool.errors] == [(0, True)]
        assert_intact(buffer.sample(512))


def test_a_raising_explorer_shows_its_own_traceback_and_comes_back(ray, caplog):
    def raise_once(ctx):
        writer = ctx.writer()
        writer.append(**row(ctx.index, ctx.seed, ctx.restarts))
        if ctx.restarts == 0:
            raise ValueError("the simulator is on fire")

    buffer = make_buffer()
    with ExplorerPool(raise_once, 1, buffer, restart_delay=0.01) as pool:
        assert pool.wait(60)
        (stats,) = pool.stats()
        (failure,) = pool.errors
    assert (stats.state, stats.restarts) == ("finished", 1)
    assert failure.error == stats.last_error == "ValueError: the simulator is on fire"
    assert "in raise_once" in failure.traceback
    assert "test_ray.py" in failure.traceback
    assert failure.traceback in caplog.text
    assert buffer.storage["count"][:2].tolist() == [0, 1]
    first, second = buffer.storage["seed"][:2].tolist()
    assert first != second


def test_when_all_explorers_have_failed_the_waiting_learner_learns_why(ray):
    def broken(ctx):
        raise ValueError("no such environment")

    buffer = make_buffer(limiter=tr.MinSize(100))
    pool = ExplorerPool(broken, 1, buffer, max_restarts=0)
    with pytest.raises(tr.WouldBlockForever) as caught, pool:
        buffer.sample(32)
    assert "no such environment" in "".join(caught.value.__notes__)
    assert pool.stats()[0].state == "failed"
    with pytest.raises(ExplorersFailed, match="no such environment"):
        pool.check()


def test_an_error_in_the_with_body_ends_explorers_that_wait_for_room(ray):
    def flood(ctx):
        writer = ctx.writer()
        for count in range(10**9):
            writer.append(**row(ctx.index, ctx.seed, count))

    buffer = make_buffer(limiter=tr.SamplesPerInsert(1.0, min_size=10))
    pool = ExplorerPool(flood, 1, buffer)
    pids = []

    def learn():
        with pool:
            buffer.sample(8, timeout=60.0)
            pids.extend(s.pid for s in pool.stats())
            raise RuntimeError("the learner fails")

    with pytest.raises(RuntimeError, match="the learner fails"):
        learn()
    assert not any(is_running(pid) for pid in pids)
    assert pool.stats()[0].state == "stopped"
    assert not pool.errors
    assert len(buffer.sample(8)["key"]) == 8


def test_a_function_that_never_looks_up_is_interrupted_and_cleans_up(ray, tmp_path):
    def sleep(ctx):
        try:
            ctx.record(episode_return=0.0, episode_length=1)
            time.sleep(3600)
        finally:
            (tmp_path / "cleaned up").touch()

    pool = ExplorerPool(sleep, 1, make_buffer()).start()
    eventually(lambda: pool.stats()[0].episodes)
    pool.stop(timeout=30.0)
    assert (tmp_path / "cleaned up").exists()
    assert not pool.errors


def test_explorers_pull_published_weights_and_a_stopped_pool_starts_again(ray):
    def explore_with_weights(ctx):
        policy = torch.nn.Linear(1, 1, bias=False)
        assert torch.get_num_threads() == 1
        with ctx.writer() as writer:
            while not ctx.stopped:
                if ctx.weights.pull(policy):
                    writer.append(**row(ctx.index, ctx.seed, int(policy.weight.detach())))

    policy = torch.nn.Linear(1, 1, bias=False)
    weights, buffer = tr.SharedWeights(policy), make_buffer()
    pool = ExplorerPool(explore_with_weights, 1, buffer, weights)
    for version in (11.0, 12.0):
        with pool:
            with torch.no_grad():
                policy.weight.fill_(version)
            weights.publish(policy)
            eventually(lambda version=version: version in buffer.storage["count"].tolist())
    seeds = buffer.storage["seed"][buffer.storage["count"] == 11].tolist()
    assert not set(seeds) & set(buffer.storage["seed"][buffer.storage["count"] == 12].tolist())


def test_a_buffer_passes_as_an_argument_to_any_remote_function_or_actor(ray):
    @ray.remote(num_cpus=0)
    def collect(buffer, rows):
        return buffer.extend(**rows).tolist()

    @ray.remote(num_cpus=0)
    class Collector:
        def __init__(self, buffer):
            self.writer = buffer.writer()

        def collect(self, row):
            return self.writer.append(**row)

    rows = [row(explorer=1, seed=0, count=count) for count in range(20)]
    together = {name: np.stack([np.asarray(r[name]) for r in rows]) for name in SPEC}
    buffer = make_buffer()
    collector = Collector.remote(buffer)
    assert ray.get(collect.remote(buffer, together)) == list(range(20))
    assert ray.get(collector.collect.remote(row(explorer=2, seed=0, count=0))) == 20
    assert len(buffer) == 21
    assert_intact(buffer.sample(64))
    ray.kill(collector)


# --- programs of their own ---

DRIVER = """
import sys, torch, torchreplay as tr
from torchreplay.ray import ExplorerPool

def explore(ctx):
    while True:
        ctx.buffer.extend(x=torch.zeros(1))

if __name__ == "__main__":
    buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=100)
    with ExplorerPool(explore, 1, buffer) as pool:
        buffer.sample(1)
        print(pool.stats()[0].pid, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def driver(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    with subprocess.Popen(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tr.__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def test_no_explorer_survives_a_sigkilled_program_that_brought_its_own_ray(driver):
    pid = int(driver.stdout.readline())
    assert is_running(pid)
    driver.kill()
    eventually(lambda: not is_running(pid))


def test_importing_needs_no_ray_and_starting_a_pool_without_it_says_what_to_install():
    program = """
import sys
sys.modules["ray"] = None
import torch, torchreplay as tr
from torchreplay.ray import ExplorerPool
buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=10)
try:
    ExplorerPool(print, 1, buffer).start()
except ImportError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "torchreplay[ray]" in out


def test_a_function_that_cannot_be_pickled_is_refused_at_the_start(ray):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent"):
        ExplorerPool(lambda ctx: lock, 1, make_buffer()).start()
