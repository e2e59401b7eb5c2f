"""What several files about sharded buffers draw from and look at."""

import pytest
from local_cluster import LocalActor, LocalCluster
from local_shards import SPEC
from three_shards import NODES
from unequal_shards import filled_shards

import torchreplay as tr
from torchreplay.ray.sharded.coordinator import Coordinator
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.schema.config import Config


@pytest.fixture(scope="module")
def filled(cluster):
    """A buffer of two very unequal shards, and its keys by (node, explorer)."""
    with filled_shards(cluster) as filled:
        yield filled


@pytest.fixture
def local_cluster(monkeypatch):
    made = LocalCluster(monkeypatch, a=2, b=2, c=2)
    yield made
    made.close()


@pytest.fixture
def union(local_cluster, monkeypatch):
    """Makes the shards, and returns the coordinator and a function that gives a process of some node its view."""
    viewed = []

    def make(limiter=None, nodes=NODES, anywhere=True):
        config = Config.of(SPEC, 100, tr.Uniform(), None, limiter)
        coordinator = Coordinator(config, [100] * len(nodes), list(nodes), anywhere, 1)
        coordinator.open()
        local_cluster.named["union"] = LocalActor(local_cluster, coordinator)

        def view(node):
            local_cluster.here = node
            viewed.append(ShardClient("union"))
            return viewed[-1]

        return coordinator, view

    yield make
    for shards in viewed:
        shards.local.release()
