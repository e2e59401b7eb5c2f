"""A pool whose explorers are on several nodes of a Ray cluster: real nodes, real kills."""

import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
from cluster import ray_cluster
from forked import eventually
from numbered_rows import assert_intact, is_running, make_buffer, row

import torchreplay as tr
from torchreplay.ray import ExplorerPool, ShardedReplay

STARTUP = 150.0  # seconds: processes that import torch on a machine that is busy with other things


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(1) as cluster:
        cluster.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield cluster


def explore(ctx):
    """Writes rows of version after version of the weights, and episodes, until it is stopped."""
    policy, writer, count = torch.nn.Linear(1, 1, bias=False), ctx.writer(), 0
    while not ctx.stopped:
        if ctx.weights is not None:
            ctx.pull_weights(policy)
        writer.append(**row(ctx.index, ctx.seed, count))
        count += 1
        if count % 10 == 0:
            ctx.record(episode_return=float(ctx.index), episode_length=10)
        time.sleep(0.002)  # an environment's pace: nobody is to starve here


def on(cluster, *nodes):
    """A placement of explorers on nodes given by number, in turn."""
    return lambda index: cluster.on(nodes[index % len(nodes)])["scheduling_strategy"]


def nodes_of(pool):
    return [stats.node for stats in pool.stats()]


def assert_gone(cluster):
    """Nothing of a pool is left on any node."""
    eventually(lambda: not cluster.actors("WorkerProcess") and not cluster.actors("PageKeeper"))


def test_explorers_on_both_nodes_write_pull_and_record_and_a_stop_ends_them(cluster):
    policy = torch.nn.Linear(1, 1, bias=False)
    weights, buffer = tr.SharedWeights(policy), make_buffer()
    with ExplorerPool(explore, 2, buffer, weights, seed=3, placement=on(cluster, 0, 1)) as pool:
        eventually(lambda: all(s.alive and s.episodes and s.weight_version == 0 for s in pool.stats()), STARTUP)
        assert nodes_of(pool) == cluster.node_ids
        weights.publish(policy)
        eventually(lambda: all(s.weight_version == 1 for s in pool.stats()), STARTUP)
        eventually(lambda: set(buffer.sample(512)["explorer"].tolist()) == {0, 1}, STARTUP)
        assert_intact(buffer.sample(512))
        assert all(0 <= s.heartbeat_age < STARTUP for s in pool.stats())
        pids = [s.pid for s in pool.stats()]
    assert [s.state for s in pool.stats()] == ["stopped"] * 2
    assert [s.mean_return for s in pool.stats()] == [0.0, 1.0]
    assert [s.restarts for s in pool.stats()] == [0, 0]
    assert not pool.errors
    eventually(lambda: not any(is_running(pid) for pid in pids))
    assert_gone(cluster)
    # What they say last is all that they have written: none of it is lost on its way.
    assert sum(s.rows for s in pool.stats()) == buffer.stats().rows_written
    eventually(lambda: buffer.stats().writers == 0)
    assert not buffer.stopped


def test_a_sigkilled_explorer_on_another_node_comes_back_and_goes_on_counting(cluster):
    buffer = make_buffer()
    with ExplorerPool(explore, 1, buffer, restart_delay=0.01, placement=on(cluster, 1)) as pool:
        eventually(lambda: pool.stats()[0].alive and pool.stats()[0].episodes, STARTUP)
        (before,) = pool.stats()
        os.kill(before.pid, signal.SIGKILL)
        eventually(lambda: pool.stats()[0].restarts == 1, STARTUP)
        eventually(lambda: pool.stats()[0].alive and pool.stats()[0].episodes > before.episodes, STARTUP)
        (after,) = pool.stats()
        assert after.pid != before.pid
        assert after.rows > before.rows
        assert [f.died for f in pool.errors] == [True]
    assert_gone(cluster)
    stored = buffer.storage
    counts = np.bincount([len(set(stored["seed"][: len(buffer)].tolist()))])
    assert counts[-1] == 1
    assert len(set(stored["seed"][: len(buffer)].tolist())) == 2


def test_who_waits_for_the_limiter_on_another_node_is_stopped_within_seconds(cluster):
    def flood(ctx):
        writer = ctx.writer()
        for count in range(10**9):
            writer.append(**row(ctx.index, ctx.seed, count))

    buffer = make_buffer(limiter=tr.SamplesPerInsert(1.0, min_size=10))
    with ExplorerPool(flood, 1, buffer, placement=on(cluster, 1)) as pool:
        buffer.sample(8, timeout=STARTUP)
        eventually(lambda: pool.stats()[0].alive)
        pool.stop(timeout=STARTUP)
        assert pool.stats()[0].state == "stopped"
        assert not pool.errors
    assert_gone(cluster)
    eventually(lambda: buffer.stats().writers == 0)


def test_draining_lets_an_explorer_on_another_node_complete_its_episode(cluster, tmp_path):
    def play(ctx):
        (tmp_path / "playing").touch()
        while not (tmp_path / "end").exists():
            time.sleep(0.01)
        writer = ctx.writer()
        writer.append(**row(ctx.index, ctx.seed, 0))
        ctx.record(episode_return=7.0, episode_length=1)
        (tmp_path / "written").touch()
        while not ctx.stopped:
            time.sleep(0.01)

    buffer = make_buffer()
    pool = ExplorerPool(play, 1, buffer, placement=on(cluster, 1)).start()
    eventually((tmp_path / "playing").exists, STARTUP)
    eventually(lambda: pool.stats()[0].alive)
    (tmp_path / "end").touch()
    assert pool.drain(timeout=STARTUP)
    assert (tmp_path / "written").exists()
    (stats,) = pool.stats()
    assert (stats.state, stats.rows, stats.last_return) == ("stopped", 1, 7.0)
    assert buffer.storage["count"][:1].tolist() == [0]
    assert_gone(cluster)


def test_explorers_of_a_node_that_dies_are_replaced_on_another(cluster):
    buffer = make_buffer()
    with cluster.one_more() as third:
        lost = cluster.node_ids[third]
        here = cluster.node_ids[0]

        def anywhere_else(index):
            strategy = cluster.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            alive = [n["NodeID"] for n in cluster.ray.nodes() if n["Alive"] and n["NodeID"] != here]
            return strategy(lost if lost in alive else alive[index % len(alive)], soft=False)

        with ExplorerPool(explore, 1, buffer, restart_delay=0.01, placement=anywhere_else) as pool:
            eventually(lambda: pool.stats()[0].alive and pool.stats()[0].episodes, STARTUP)
            (before,) = pool.stats()
            assert before.node == lost
            cluster.kill(third)
            eventually(lambda: pool.stats()[0].node == cluster.node_ids[1], STARTUP)
            eventually(lambda: pool.stats()[0].episodes > before.episodes, STARTUP)
            assert pool.stats()[0].restarts >= 1
    assert_gone(cluster)


def test_explorers_of_a_sharded_buffer_spread_over_its_nodes_and_write_to_their_own(cluster):
    spec = {"explorer": tr.Field((), torch.int64), "seed": tr.Field((), torch.int64), "count": tr.Field((), torch.int64)}

    def fill(ctx):
        writer, count = ctx.writer(), 0
        while not ctx.stopped:
            writer.append(explorer=ctx.index, seed=ctx.seed, count=count)
            count += 1
            time.sleep(0.002)

    with ShardedReplay(spec, 100_000, limiter=tr.MinSize(100), seed=1, nodes=cluster.node_ids) as replay:
        with ExplorerPool(fill, 2, replay) as pool:
            batch = replay.sample(64, timeout=STARTUP)
            eventually(lambda: all(s.alive and s.rows for s in pool.stats()), STARTUP)
            assert sorted(nodes_of(pool)) == sorted(cluster.node_ids)
            eventually(lambda: set(replay.sample(64)["explorer"].tolist()) == {0, 1}, STARTUP)
            replay.update_priorities(batch, torch.ones(64))
        assert not pool.errors
        rows = {shard.node: shard.stats.rows_written for shard in replay.stats().shards}
        assert {s.node: s.rows for s in pool.stats()} == rows
        assert_gone(cluster)
