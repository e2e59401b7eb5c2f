"""Pools whose workers are on several nodes of a Ray cluster: real nodes, real kills."""

import os
import signal
import time

import pytest
import torch
from forked import eventually
from numbered_rows import assert_intact, is_running, make_buffer, row
from safetensors.torch import load_file

import torchreplay as tr
from torchreplay.ray import AsyncReplay, Evaluator, ExplorerPool, ShardedReplay

pytestmark = pytest.mark.slow


STARTUP = 150.0  # seconds: processes that import torch on a machine that is busy with other things
SHARED = {name: tr.Field((), torch.int64) for name in ("explorer", "seed", "count")}


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
        time.sleep(0.002)  # an environment's pace: the machine is to have time for others


def on(cluster, *nodes):
    """A placement of explorers on nodes given by number, in turn."""
    return lambda index: cluster.on(nodes[index % len(nodes)])["scheduling_strategy"]


def nodes_of(pool):
    return [stats.node for stats in pool.stats()]


def assert_gone(cluster):
    """Nothing of a pool is left on any node."""
    eventually(lambda: not cluster.actors("WorkerProcess") and not cluster.actors("TableServer"))


def test_explorers_on_both_nodes_write_pull_and_record_and_one_that_is_killed_comes_back(cluster):
    policy = torch.nn.Linear(1, 1, bias=False)
    weights, buffer = tr.SharedWeights(policy), make_buffer(100_000)
    options = {"seed": 3, "restart_delay": 0.01, "placement": on(cluster, 0, 1)}
    with ExplorerPool(explore, 2, buffer, weights, **options) as pool:
        eventually(lambda: all(s.alive and s.episodes and s.weight_version == 0 for s in pool.stats()), STARTUP)
        assert nodes_of(pool) == cluster.node_ids
        weights.publish(policy)
        eventually(lambda: all(s.weight_version == 1 for s in pool.stats()), STARTUP)
        eventually(lambda: set(buffer.sample(512)["explorer"].tolist()) == {0, 1}, STARTUP)
        assert_intact(buffer.sample(512))
        near, far = pool.stats()
        assert 0 <= far.heartbeat_age < STARTUP
        os.kill(far.pid, signal.SIGKILL)
        seen = [far]
        eventually(lambda: seen.append(pool.stats()[1]) or seen[-1].restarts == 1, STARTUP)
        eventually(lambda: pool.stats()[1].alive and pool.stats()[1].episodes > far.episodes, STARTUP)
        assert [(f.index, f.died) for f in pool.errors] == [(1, True)]
        again = pool.stats()
        assert (again[0].pid, again[0].restarts) == (near.pid, 0)
        assert (again[1].node, again[1].rows > far.rows) == (far.node, True)
        assert pool.drain(timeout=STARTUP)  # while they write
    assert [s.state for s in pool.stats()] == ["stopped"] * 2
    assert [s.mean_return for s in pool.stats()] == [0.0, 1.0]
    eventually(lambda: not any(is_running(s.pid) for s in pool.stats()))
    assert_gone(cluster)
    eventually(lambda: buffer.stats().writers == 0)
    written = buffer.storage["seed"][: len(buffer)][buffer.storage["explorer"][: len(buffer)] == 1]
    _, second = dict.fromkeys(written.tolist())
    # What a drained explorer has written is all there; of a killed one the last rows are not.
    assert pool.stats()[1].rows - seen[-1].rows == (written == second).sum()
    assert pool.stats()[0].rows == len(buffer) - len(written)


def test_who_waits_for_the_limiter_on_another_node_is_stopped_at_once(cluster):
    def flood(ctx):
        writer = ctx.writer()
        for count in range(10**9):
            writer.append(**row(ctx.index, ctx.seed, count))

    buffer = make_buffer(limiter=tr.SamplesPerInsert(1.0, min_size=10))
    with ExplorerPool(flood, 1, buffer, placement=on(cluster, 1)) as pool:
        buffer.sample(8, timeout=STARTUP)
        eventually(lambda: pool.stats()[0].alive)
        began = time.monotonic()
        pool.stop(timeout=STARTUP)
        assert time.monotonic() - began < STARTUP, "it had to be killed"
        assert pool.stats()[0].state == "stopped"
        assert not pool.errors
    assert_gone(cluster)
    eventually(lambda: buffer.stats().writers == 0)


def test_what_ray_does_not_take_as_a_placement_is_refused_at_the_start(cluster):
    with pytest.raises(TypeError, match="scheduling_strategy"):
        ExplorerPool(print, 1, make_buffer(), placement=cluster.ray.put(5)).start()
    assert_gone(cluster)


def test_explorers_of_a_sharded_buffer_spread_over_its_nodes_and_write_to_their_own(cluster):
    def fill(ctx):
        writer, count = ctx.writer(), 0
        while not ctx.stopped:
            writer.append(explorer=ctx.index, seed=ctx.seed, count=count)
            count += 1
            time.sleep(0.002)

    with ShardedReplay(SHARED, 100_000, limiter=tr.MinSize(100), seed=1, nodes=cluster.node_ids) as replay:
        with pytest.raises(ValueError, match="through Ray"):
            ExplorerPool(fill, 2, replay, backend="process")
        pool = ExplorerPool(fill, 2, replay)
        with AsyncReplay(pool, lambda batch: batch["weight"], batch_size=64, timeout=STARTUP) as learner:
            assert list(learner.steps(5)) == [1, 2, 3, 4, 5]
            eventually(lambda: all(s.alive and s.rows for s in pool.stats()), STARTUP)
            assert sorted(nodes_of(pool)) == sorted(cluster.node_ids)
            assert learner.stats().buffers["buffer"].rows_written > 100
            assert replay._shards.look().expected
        assert not replay._shards.look().expected
        assert not pool.errors
        rows = {shard.node: shard.stats.rows_written for shard in replay.stats().shards}
        assert {s.node: s.rows for s in pool.stats()} == rows
        assert_gone(cluster)


@pytest.mark.soak
def test_draining_lets_an_explorer_on_another_node_complete_its_episode(cluster, tmp_path):
    def play(ctx):
        (tmp_path / "playing").touch()
        while not ctx.stopped:
            time.sleep(0.01)
        time.sleep(3)  # longer than a stop would let it play
        ctx.writer().append(**row(ctx.index, ctx.seed, 0))
        ctx.record(episode_return=7.0, episode_length=1)

    buffer = make_buffer()
    pool = ExplorerPool(play, 1, buffer, placement=on(cluster, 1)).start()
    eventually((tmp_path / "playing").exists, STARTUP)
    eventually(lambda: pool.stats()[0].alive)
    assert pool.drain(timeout=STARTUP)
    (stats,) = pool.stats()
    assert (stats.state, stats.rows, stats.last_return) == ("stopped", 1, 7.0)
    assert buffer.stats().rows_written == 1
    assert_gone(cluster)


@pytest.mark.soak
def test_a_function_on_another_node_that_never_looks_up_is_interrupted_and_cleans_up(cluster, tmp_path):
    def sleep(ctx):
        try:
            ctx.record(episode_return=0.0, episode_length=1)
            time.sleep(3600)
        finally:
            (tmp_path / "cleaned up").touch()

    pool = ExplorerPool(sleep, 1, make_buffer(), placement=on(cluster, 1)).start()
    eventually(lambda: pool.stats()[0].episodes, STARTUP)
    pool.stop(timeout=STARTUP)
    assert (tmp_path / "cleaned up").exists()
    assert not pool.errors
    assert_gone(cluster)


@pytest.mark.soak
def test_explorers_of_a_node_that_dies_are_replaced_on_another(cluster):
    buffer = make_buffer()
    with cluster.one_more() as third:
        _, other, lost = cluster.node_ids
        strategy = cluster.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy

        def elsewhere(index):
            alive = [node["NodeID"] for node in cluster.ray.nodes() if node["Alive"]]
            return strategy(lost if lost in alive else other, soft=False)

        with ExplorerPool(explore, 1, buffer, restart_delay=0.01, placement=elsewhere) as pool:
            eventually(lambda: pool.stats()[0].alive and pool.stats()[0].episodes, STARTUP)
            (before,) = pool.stats()
            assert before.node == lost
            cluster.kill(third)
            eventually(lambda: pool.stats()[0].node == other, STARTUP)
            eventually(lambda: pool.stats()[0].episodes > before.episodes, STARTUP)
            assert pool.stats()[0].restarts >= 1
            buffer.sample(8)
    assert_gone(cluster)


@pytest.mark.soak
def test_explorers_of_a_sharded_buffer_that_lose_their_node_go_on_where_there_is_a_shard(cluster):
    def fill(ctx):
        with ctx.writer() as writer:
            for count in range(10**9):
                if ctx.stopped:
                    return
                writer.append(explorer=ctx.index, seed=ctx.seed, count=count)
                time.sleep(0.002)

    with cluster.one_more() as third:
        nodes = [cluster.node_ids[1], cluster.node_ids[third]]
        with ShardedReplay(SHARED, 10_000, seed=1, nodes=nodes) as replay:
            with ExplorerPool(fill, 2, replay, restart_delay=0.01) as pool:
                eventually(lambda: sorted(nodes_of(pool)) == sorted(nodes), STARTUP)
                eventually(lambda: all(s.rows for s in pool.stats()), STARTUP)
                rows = [s.rows for s in pool.stats()]
                cluster.kill(third)
                eventually(lambda: set(nodes_of(pool)) == {nodes[0]}, STARTUP)
                eventually(lambda: all(s.rows > n for s, n in zip(pool.stats(), rows, strict=True)), STARTUP)
                replay.sample(32, timeout=STARTUP)
            assert_gone(cluster)


@pytest.mark.soak
def test_a_killed_table_server_keeps_nobody_from_exploring_and_stopping(cluster):
    buffer = make_buffer()
    with ExplorerPool(explore, 1, buffer, placement=on(cluster, 1)) as pool:
        eventually(lambda: pool.stats()[0].alive and pool.stats()[0].episodes, STARTUP)
        (server,) = cluster.actors("TableServer")
        os.kill(server["Pid"], signal.SIGKILL)
        eventually(lambda: not is_running(server["Pid"]))
        (before,) = pool.stats()
        eventually(lambda: pool.stats()[0].episodes > before.episodes, STARTUP)
        assert pool.drain(timeout=STARTUP)
    (stats,) = pool.stats()
    assert (stats.restarts, stats.rows) == (0, buffer.stats().rows_written)
    assert_gone(cluster)


@pytest.mark.soak
def test_this_machine_comes_first_and_then_the_others(cluster):
    buffer = make_buffer()
    with ExplorerPool(explore, 3, buffer, num_cpus=1, placement="LOCAL_FIRST") as pool:
        eventually(lambda: all(s.alive for s in pool.stats()), STARTUP)
        assert nodes_of(pool).count(cluster.node_ids[0]) == 2  # it has two CPUs
        eventually(lambda: set(buffer.sample(512)["explorer"].tolist()) == {0, 1, 2}, STARTUP)
    assert_gone(cluster)


@pytest.mark.soak
def test_an_evaluator_on_another_node_reports_here_and_saves_here(cluster, tmp_path):
    policy = torch.nn.Linear(1, 1, bias=False)
    weights = tr.SharedWeights(policy)
    evaluator = Evaluator(
        lambda module, seed: [float(module.weight.detach()), cluster_node()],
        weights,
        policy,
        every=1,
        directory=tmp_path,
        buffer=(buffer := make_buffer()),
        placement=on(cluster, 1),
    )
    buffer.extend(**{name: value[None] for name, value in numbered(5).items()})
    with evaluator:
        for number in (1.0, 2.0):
            with torch.no_grad():
                policy.weight.fill_(number)
            version = weights.publish(policy)
            found = evaluator.wait(timeout=STARTUP)
            assert (found.version, found.min_return) == (version, number)
            assert found.max_return == float(int(cluster.node_ids[1][:8], 16))
            assert load_file(tmp_path / "best.safetensors")["weight"].item() == number
        assert tr.ReplayBuffer.load(tmp_path / "buffer").gather(torch.tensor([0]))["count"].tolist() == [5]
    assert not evaluator.errors
    assert_gone(cluster)


def cluster_node():
    """The node on which this runs, as a number."""
    from torchreplay.segment.ray_node import ray_node

    return float(int(ray_node()[:8], 16))


def numbered(count):
    return {name: torch.as_tensor(value) for name, value in row(0, 0, count).items()}
