"""A Ray node that is as good as on another machine: no memory, no processes and no files of Ray's in common."""

import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import sharded_rows
import torch
from cluster import MEMORY, SETTINGS
from forked import eventually
from other_machine import joined, network, ray_node
from paths import import_path
from sharded_rows import SPEC, assert_intact, write, write_until_stopped

import torchreplay as tr
from torchreplay.ray import ExplorerPool, ShardedReplay

pytestmark = pytest.mark.slow


ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def head():
    """A Ray cluster whose only node is this machine, on a network with others; its address."""
    from ray.cluster_utils import Cluster

    with network() as net:
        cluster = Cluster(shutdown_at_exit=True)
        try:
            options = {"num_cpus": 2, "object_store_memory": MEMORY, "include_dashboard": False}
            cluster.add_node(node_ip_address=net.address, _system_config=SETTINGS, **options)
            ray.init(cluster.address, _node_ip_address=net.address, logging_level=logging.ERROR, log_to_driver=False)
            ray.cloudpickle.register_pickle_by_value(sharded_rows)
            yield net, cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture
def other(head):
    """The other machine: its process, Ray's id of it, and the options that put a remote function there."""
    net, cluster = head
    with net.machine(lambda address: ray_node(cluster, address), PYTHONPATH=import_path()) as (process, address):
        node = joined(ray, address)
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        yield SimpleNamespace(process=process, node=node, options={"num_cpus": 0, "scheduling_strategy": strategy})


def look_around(buffer, weights):
    """What a process there finds of the buffer and the weights it was given."""
    module = torch.nn.Linear(2, 2)
    weights.pull(module)
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if "memfd:torchreplay-replay" in line]
    return type(buffer).__name__, mapped, os.listdir("/dev/shm"), module.weight.sum().item()


def test_rows_and_weights_cross_the_link_and_no_memory_does(other):
    sampler = tr.Prioritized(alpha=1.0, eps=1e-9)
    module = torch.nn.Linear(2, 2)
    with tr.ReplayBuffer(SPEC, 5000, sampler=sampler, seed=0) as buffer:
        weights = tr.SharedWeights(module)
        weights.publish(module)
        look = ray.remote(look_around).options(**other.options).remote(buffer, weights)
        kind, mapped, shm, total = ray.get(look)
        assert "memfd:torchreplay-replay" in Path("/proc/self/maps").read_text()
        assert (kind, mapped) == ("RemoteBuffer", [])
        assert not set(shm) & set(os.listdir("/dev/shm"))
        assert total == pytest.approx(module.weight.sum().item())
        ray.get(ray.remote(write).options(**other.options).remote(buffer, 1, 0, 3000))
        assert buffer.storage["count"][:3000].tolist() == list(range(3000))
        batch = buffer.sample(256)
        assert_intact(batch)
        buffer.update_priorities(batch, torch.ones(256))


@pytest.mark.soak
def test_a_machine_that_is_switched_off_takes_its_unacknowledged_rows_along_and_nothing_else(other):
    with tr.ReplayBuffer(SPEC, 1000, seed=0) as buffer:
        ray.remote(write_until_stopped).options(max_retries=0, **other.options).remote(buffer, 1, 0)
        eventually(lambda: len(buffer) == 1000)
        other.process.kill()
        eventually(lambda: not any(n["Alive"] for n in ray.nodes() if n["NodeID"] == other.node), timeout=120)
        buffer.extend(**sharded_rows.rows_of(0, 10))
        batch = buffer.sample(512)
        of_there = batch["count"][batch["node"] == 1]
        newest = int(buffer.storage["count"].max())
        assert len(of_there) > 0
        assert newest - 1000 < int(of_there.min()) <= int(of_there.max()) <= newest


@pytest.mark.soak
def test_a_buffer_over_both_machines_is_drawn_from_as_one(other):
    here = ray.get_runtime_context().get_node_id()
    with ShardedReplay(SPEC, 1000, sampler=tr.Prioritized(), seed=0, nodes=[here, other.node]) as replay:
        write(replay, 0, 0, 100)
        ray.get(ray.remote(write).options(**other.options).remote(replay, 1, 0, 300))
        eventually(lambda: len(replay) == 400)
        drawn = set()
        for _ in range(20):
            batch = replay.sample(400)
            assert_intact(batch)
            drawn |= set(zip(batch["node"].tolist(), batch["count"].tolist(), strict=True))
            replay.update_priorities(batch, torch.ones(400))
        assert drawn == {(0, n) for n in range(100)} | {(1, n) for n in range(300)}
        other.process.kill()
        eventually(lambda: replay.stats().rows_lost == 300, timeout=120)
        batch = replay.sample(64)
        assert set(batch["node"].tolist()) == {0}


@pytest.mark.soak
def test_a_pool_explores_there_and_stops_there(other):
    def explore(ctx):
        module, writer, count = torch.nn.Linear(2, 2), ctx.writer(), 0
        while not ctx.stopped:
            ctx.pull_weights(module)
            row = {name: value[0] for name, value in sharded_rows.rows_of(1, 1).items()}
            writer.append(**row | {"count": count})
            count += 1
            ctx.record(episode_return=1.0, episode_length=1)
            time.sleep(0.002)

    weights = tr.SharedWeights(torch.nn.Linear(2, 2))
    strategy = other.options["scheduling_strategy"]
    with tr.ReplayBuffer(SPEC, 100_000, seed=0) as buffer:
        with ExplorerPool(explore, 1, buffer, weights, placement=strategy, restart_delay=0.1) as pool:
            eventually(lambda: pool.stats()[0].alive and pool.stats()[0].episodes > 10, timeout=150)
            buffer.sample(32, timeout=150)
            (stats,) = pool.stats()
            assert (stats.node, stats.weight_version, stats.restarts) == (other.node, 0, 0)
            assert 0 <= stats.heartbeat_age < 150
            assert pool.drain(timeout=150)
        (stats,) = pool.stats()
        assert stats.rows == stats.episodes == buffer.stats().rows_written
        assert torch.equal(buffer.storage["count"][: stats.rows], torch.arange(stats.rows))
        assert not pool.errors


def test_the_other_machine_sees_no_process_of_this_one(other):
    found = ray.get(ray.remote(lambda: os.listdir("/proc")).options(**other.options).remote())
    assert sum(name.isdigit() for name in found) < sum(name.isdigit() for name in os.listdir("/proc"))
