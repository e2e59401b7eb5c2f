"""Explorers on a node without a shard, which write to another node's: real nodes, real kills."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from forked import eventually
from remote_explorers import SPEC, Explorer, assert_complete, rows_of

import torchreplay as tr
from torchreplay.ray import ExplorerPool, ReplayLost, ShardedReplay, ShardLost
from torchreplay.ray.sharded.shard_keys import KEY_BITS
from torchreplay.segment import waits

pytestmark = pytest.mark.slow

BARE = 2
"""The node without a shard."""


@pytest.fixture(scope="module")
def cluster(shared_cluster):
    with shared_cluster.of(3) as cluster:
        yield cluster


class ShardExplorer(Explorer):
    """An explorer that knows shards."""

    def pid(self):
        return os.getpid()

    def write_until_lost(self):
        """Writes until the shard is lost, and then with another writer; returns the errors of both."""
        try:
            while True:
                self.write(10)
        except RuntimeError as error:
            lost = error
        before, self.count = self.count, 0
        self.index += 1
        with self.buffer.writer() as self.writer:
            self.write(20)
        return type(lost).__name__, str(lost), before

    def look_until_stopped(self):
        """Writes until it sees that the buffer was stopped; returns how it ended."""
        try:
            while not self.buffer.stopped:
                self.append(1)
        except tr.Stopped as error:
            return str(error)
        return "seen"


@pytest.fixture(scope="module")
def explorers(cluster):
    """Two explorers on the node without a shard, which tests give buffers to."""
    return [cluster.ray.remote(ShardExplorer).options(**cluster.on(BARE)).remote() for _ in range(2)]


@pytest.fixture
def give(cluster, explorers):
    """Gives a buffer to one of them; after the test it has none."""
    given = []

    def give(which, replay):
        given.append(explorers[which])
        cluster.ray.get(explorers[which].open.remote(replay, 10 * which))
        return explorers[which]

    yield give
    cluster.ray.get([actor.let_go.remote() for actor in given])


@pytest.fixture
def make(cluster):
    """Makes buffers with a shard on each node but the bare one."""
    made = []

    def make(capacity=100_000, spec=SPEC, shards=2, **options):
        made.append(ShardedReplay(spec, capacity, seed=0, nodes=cluster.node_ids[:shards], **options))
        return made[-1]

    yield make
    for replay in made:
        replay.close()


def shard_of(replay, writer):
    """The number of the only shard that has rows of a writer."""
    rows = rows_of(replay)
    (found,) = set((rows["key"][rows["writer"] == writer] >> KEY_BITS).tolist())
    return found


def pid_of(cluster, kind, node, named=""):
    """The process of the actor of a kind on a node."""
    found = {a["Pid"] for a in cluster.actors(kind) if a["Address"]["NodeID"] == node and named in a["Name"]}
    return found.pop() if len(found) == 1 else None


def ingest_of(cluster, replay):
    """The process that writes the rows of other nodes to the only shard."""
    (entry,) = replay._shards.look().entries.values()
    return pid_of(cluster, "Ingest", entry.node, f"{entry.handle.nonce:016x}")


def test_they_write_to_the_shards_with_the_fewest_writers_and_each_keeps_to_its_own(cluster, give, make):
    replay = make()
    with replay.writer() as near:  # of shard 0
        frame = np.zeros(400, np.float32)
        near.append(writer=7, count=0, frame=frame)
        first = give(0, replay)
        assert cluster.ray.get(first.write.remote(700)) == 700
        assert shard_of(replay, 0) == 1
        assert cluster.ray.get(give(1, replay).write.remote(500)) == 500
        two = {"writer": [3, 3], "count": [0, 1], "frame": [[0.375] * 400, [1.375] * 400]}
        assert cluster.ray.get(first.try_to.remote(lambda b, w: b.extend(**two))) is None
        for row in range(1, 5):
            near.append(writer=7, count=row, frame=frame)
        assert shard_of(replay, 3) == 1
    rows = rows_of(replay)
    for writer, count in {0: 700, 10: 500, 3: 2}.items():
        chosen = rows["writer"] == writer
        assert torch.equal(rows["count"][chosen], torch.arange(count))
        expected = (rows["count"] + rows["writer"] / 8).float()[chosen]
        assert torch.equal(rows["frame"][chosen], expected[:, None].expand(-1, 400))
    assert len(replay) == replay.stats().rows_written == 700 + 500 + 2 + 5
    back = cluster.ray.get(first.try_to.remote(lambda b, w: b))
    assert len(back) == len(replay)
    inodes = {entry.handle.inode for entry in replay._shards.table.entries.values()}
    assert not inodes & cluster.ray.get(first.mapped.remote())
    assert set((replay.sample(512, timeout=120)["key"] >> KEY_BITS).tolist()) == {0, 1}


def test_the_limiter_counts_their_items_over_all_shards_and_holds_them_back(cluster, give, make):
    limiter = tr.SamplesPerInsert(4.0, min_size=100, tolerance=0.5)
    _, _, low, high = limiter.bounds()
    replay = make(limiter=limiter)
    with pytest.raises(tr.ReplayTimeout, match="0 items were inserted, 100 are needed"):
        replay.sample(8, timeout=1.0)
    ends = [give(0, replay).write_until_stopped.remote(), give(1, replay).look_until_stopped.remote()]
    for batch in tr.ReplayDataset(replay, 16, steps=60, timeout=120):
        assert len(batch["key"]) == 16
        found = replay.stats()
        # A remote writer begins up to 64 rows at a time. Two batches are not counted as drawn yet.
        assert low <= found.inserted * 4.0 - found.sampled <= high + 4.0 * 2 * 64 + 2 * 16
    assert replay.stats().writers == 2
    replay.stop()
    (_, text, stopped), end = cluster.ray.get(ends)
    assert (text, stopped) == ("the replay buffer was stopped", True)
    assert end in ("seen", "the replay buffer was stopped")


def test_a_shard_whose_actor_is_killed_is_left_for_another_one(cluster, give, make):
    replay = make()
    far = give(0, replay)
    assert cluster.ray.get(far.write.remote(50)) == 50
    number = shard_of(replay, 0)
    end = far.write_until_lost.remote()
    eventually(lambda: replay.stats().rows_written > 100, 120)
    os.kill(pid_of(cluster, "Shard", cluster.node_ids[number]), signal.SIGKILL)
    lost = cluster.ray.get(end)
    assert lost[0] == ShardLost.__name__
    assert "call writer() again for another one" in lost[1]
    assert lost[2] > 50
    rows = rows_of(replay)
    assert torch.equal(rows["count"][rows["writer"] == 1], torch.arange(20))  # of the writer made then
    assert shard_of(replay, 1) != number
    found = replay.stats()
    assert found.rows_lost >= 50
    assert found.inserted >= found.rows_lost + 20


@pytest.mark.soak
def test_a_node_that_is_killed_costs_its_shard_and_its_writers_go_to_another(cluster, give):
    with cluster.one_more() as node:
        nodes = [cluster.node_ids[0], cluster.node_ids[node]]
        with ShardedReplay(SPEC, 100_000, seed=0, nodes=nodes) as replay, replay.writer():
            far = give(0, replay)
            assert cluster.ray.get(far.write.remote(50)) == 50
            assert shard_of(replay, 0) == 1  # the other one has a writer
            end = far.write_until_lost.remote()
            cluster.kill(node)
            assert cluster.ray.get(end)[0] == ShardLost.__name__
            assert shard_of(replay, 1) == 0
            assert_complete(replay, {1: 20})


@pytest.mark.soak
def test_an_explorer_that_is_killed_costs_its_unsent_rows_alone(cluster, give, make):
    replay = make(shards=1)
    victim = cluster.ray.remote(ShardExplorer).options(**cluster.on(BARE)).remote()
    other = give(0, replay)
    cluster.ray.get(victim.open.remote(replay, 5))
    assert cluster.ray.get(victim.write.remote(50)) == 50
    pid = cluster.ray.get(victim.pid.remote())
    victim.write_until_stopped.remote()
    eventually(lambda: len(replay) > 100, 120)
    os.kill(pid, signal.SIGKILL)
    assert cluster.ray.get(other.write.remote(300)) == 300
    rows = rows_of(replay)
    counts = rows["count"][rows["writer"] == 5]
    assert torch.equal(counts, torch.arange(len(counts)))
    assert len(counts) > 50
    assert torch.equal(rows["count"][rows["writer"] == 0], torch.arange(300))


def test_a_learner_that_waits_for_their_rows_outlasts_a_killed_ingest(cluster, give, make, monkeypatch):
    monkeypatch.setattr(waits, "RETURN_GRACE", 0.1)  # less than it takes to start a process
    replay = make(shards=1, limiter=tr.MinSize(20))
    far = give(0, replay)
    assert cluster.ray.get(far.write.remote(10)) == 10
    with ThreadPoolExecutor(1) as learner:
        batch = learner.submit(replay.sample, 4)
        eventually(lambda: ingest_of(cluster, replay), 120)
        killed = ingest_of(cluster, replay)
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: ingest_of(cluster, replay) not in (None, killed), 120)
        assert cluster.ray.get(far.write.remote(10)) == 20
        assert len(batch.result(120)["key"]) == 4
    assert_complete(replay, {0: 20})


@pytest.mark.soak
def test_when_the_buffer_is_closed_they_are_told(cluster, give, make):
    replay = make(shards=1)
    far = give(0, replay)
    assert cluster.ray.get(far.write.remote(10)) == 10
    end = far.write_until_lost.remote()
    replay.close()
    with pytest.raises(ReplayLost, match="was closed"):  # of its second writer
        cluster.ray.get(end)


def explore(ctx):
    """Writes as fast as it may."""
    count = 0
    with ctx.writer() as writer:
        while not ctx.stopped:
            writer.append(writer=ctx.index, count=count, frame=np.full(400, count + ctx.index / 8, np.float32))
            count += 1


def test_a_pool_places_explorers_on_a_node_without_a_shard_and_stops_those_that_wait(cluster, make):
    replay = make(shards=1, limiter=tr.SamplesPerInsert(1.0, min_size=300, tolerance=0.5))
    place = cluster.on(BARE)["scheduling_strategy"]
    with ExplorerPool(explore, 1, replay, placement=place) as pool:
        assert len(replay.sample(64, timeout=150)["key"]) == 64
        eventually(lambda: pool.stats()[0].rows > 300, 60)
        assert pool.stats()[0].node == cluster.node_ids[BARE]
        eventually(lambda: replay.stats().insert_wait > 0, 60)
    assert not pool.errors
    rows = rows_of(replay)
    assert torch.equal(rows["count"], torch.arange(len(rows["count"])))
    assert len(rows["count"]) >= 300
