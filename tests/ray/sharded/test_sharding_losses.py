"""What a `ShardedReplay` loses with a node: its rows, and nothing else."""

import gc
import logging
import os
import pickle
import signal

import numpy as np
import pytest
import torch
from forked import eventually
from sharded_rows import SPEC, assert_intact, shards_of, write, write_until_stopped

import torchreplay as tr
from torchreplay.ray import ReplayLost, ShardedReplay, ShardLost
from torchreplay.ray.sharded.shard_keys import KEY_BITS

pytestmark = pytest.mark.slow


def rows_by_node(replay):
    return {shard.node: shard.stats.size for shard in replay.stats().shards}


def pid_of_shard_on(cluster, node):
    """The process of the shard on a node of this cluster."""
    (found,) = {a["Pid"] for a in cluster.actors("Shard") if a["Address"]["NodeID"] == node}
    return found


@pytest.mark.soak
def test_a_shard_whose_actor_is_killed_costs_its_rows_and_comes_back_empty(cluster, caplog):
    home, other = cluster.node_ids
    task = cluster.ray.remote(write)
    with ShardedReplay(SPEC, 1000, sampler=tr.Prioritized(), seed=1) as replay:
        assert cluster.ray.get(task.options(**cluster.on(1)).remote(replay, 1, 0, 100))[0] >> KEY_BITS == 1
        kept = np.array(write(replay, 0, 0, 50))
        batch = replay.sample(128, timeout=120)
        assert shards_of(batch) == {0, 1}
        run = cluster.ray.remote(write_until_stopped).options(**cluster.on(1)).remote(replay, 1, 1)
        eventually(lambda: rows_by_node(replay)[other] > 100)
        stream = iter(tr.ReplayDataset(replay, 64, prefetch=3, timeout=120))
        next(stream)
        with caplog.at_level(logging.ERROR, "torchreplay.ray"):
            os.kill(pid_of_shard_on(cluster, other), signal.SIGKILL)
            while 1 in shards_of(following := next(stream)) or "is lost" not in caplog.text:
                pass  # its connection may break before Ray knows that it is gone
        assert_intact({k: following[k][following["node"] == 0] for k in SPEC})
        assert "shard 1 on node" in caplog.text
        # Feedback for what is gone is dropped and counted, the rest arrives.
        before = replay.stats()
        replay.update_priorities(batch, torch.full((128,), 3.0))
        gone = int((batch["key"] >> KEY_BITS == 1).sum())
        after = replay.stats()
        assert after.lost_updates == before.lost_updates + gone
        assert after.updated == before.updated + 128 - gone
        assert after.rows_lost >= 100
        # Its explorer fails with a reason, and the shard comes back, empty and with another number.
        written, end = cluster.ray.get(run)
        assert (written > 0, end) == (True, ShardLost.__name__)
        eventually(lambda: replay.stats().shards_missing == 0, timeout=120)
        assert rows_by_node(replay) == {home: 50, other: 0}
        (key,) = cluster.ray.get(task.options(**cluster.on(1)).remote(replay, 1, 2, 1))
        assert key >> KEY_BITS == 2
        eventually(lambda: shards_of(next(stream)) == {0, 2}, timeout=120)
        stream.close()
        replay.update_priorities(batch["key"], torch.full((128,), 4.0))  # old keys do not reach the new shard's rows
        assert replay.stats().lost_updates == after.lost_updates + gone
        assert set(kept >> KEY_BITS) == {0}


@pytest.mark.soak
def test_a_node_that_dies_is_done_without_and_replaced_by_one_that_joins(cluster):
    task = cluster.ray.remote(write)
    with cluster.one_more() as third:
        lost = cluster.node_ids[third]
        with ShardedReplay(SPEC, 900, seed=1) as replay:
            for node in (1, third):
                cluster.ray.get(task.options(**cluster.on(node)).remote(replay, node, 0, 30))
            write(replay, 0, 0, 10)
            assert sorted(rows_by_node(replay).values()) == [10, 30, 30]
            number = next(shard.number for shard in replay.stats().shards if shard.node == lost)
            replay.sample(64, timeout=120)
            cluster.kill(third)
            for _ in range(5):
                batch = replay.sample(64, timeout=120)
                assert number not in shards_of(batch)
                assert set(batch["node"].tolist()) == {0, 1}
                np.testing.assert_allclose(batch["probability"].numpy(), 1 / 40, rtol=1e-6)
                replay.update_priorities(batch, torch.ones(64))
            found = replay.stats()
            assert (found.size, found.shards_missing, found.rows_lost) == (40, 1, 30)
            assert (found.inserted, len(replay)) == (70, 40)
            with cluster.one_more() as fourth:
                eventually(lambda: cluster.node_ids[fourth] in rows_by_node(replay), timeout=120)
                cluster.ray.get(task.options(**cluster.on(fourth)).remote(replay, 7, 0, 60))
                eventually(lambda: 7 in replay.sample(64)["node"], timeout=120)
                assert replay.stats().shards_missing == 0


def test_nobody_waits_for_rows_that_nobody_will_write_or_when_its_maker_has_closed_it(cluster, tmp_path, monkeypatch):
    def learn(replay):
        (tmp_path / "attached").touch()
        try:
            replay.sample(8, timeout=600)
        except tr.Stopped as error:
            return str(error)

    monkeypatch.setattr("torchreplay.segment.waits.STARTUP_GRACE", 0.5)
    replay = ShardedReplay(SPEC, 100, nodes=cluster.node_ids[:1])
    with pytest.raises(tr.WouldBlockForever, match="no writer has come"):
        replay.sample(8)
    replay.expect_writers()
    call = cluster.ray.remote(learn).options(**cluster.on(1)).remote(replay)
    eventually((tmp_path / "attached").exists, timeout=120)
    replay.close()
    assert "was closed" in cluster.ray.get(call)
    eventually(lambda: not cluster.actors("Shard"))
    replay.close()


def test_when_nobody_keeps_it_where_it_was_made_everyone_is_told(cluster):
    replay = ShardedReplay(SPEC, 100, nodes=cluster.node_ids[:1])
    copy = pickle.loads(pickle.dumps(replay))
    write(replay, 0, 0, 10)
    assert len(copy.sample(8, timeout=120)["key"]) == 8
    del replay
    gc.collect()
    eventually(lambda: not cluster.actors("Shard"))
    with pytest.raises(ReplayLost, match="kept by nobody in the process that made it"):
        copy.stats()
    copy.close()


def test_a_learner_whose_shards_end_without_a_stop_does_not_take_it_for_the_end_of_its_training(cluster):
    replay = ShardedReplay(SPEC, 500, seed=1, nodes=cluster.node_ids)
    write(replay, 0, 0, 100)
    drawn = 0
    with pytest.raises(ReplayLost, match="the ShardedReplay is gone"):  # noqa: PT012
        for _ in tr.ReplayDataset(replay, 32, steps=100_000, timeout=120):
            drawn += 1
            if drawn == 20:
                cluster.ray.kill(replay._owned)  # as when the system kills the coordinator's process
    assert drawn >= 20
    replay.close()


def test_a_stop_ends_an_iteration_over_shards_in_order(cluster):
    with ShardedReplay(SPEC, 500, seed=1, nodes=cluster.node_ids) as replay:
        write(replay, 0, 0, 100)
        drawn = 0
        for _ in tr.ReplayDataset(replay, 32, steps=100_000, timeout=120):
            drawn += 1
            if drawn == 20:
                replay.stop()
        assert 20 <= drawn < 100_000


def test_a_learner_beside_a_shard_whose_step_outlasts_a_stop_and_the_close_after_it_ends_in_order(cluster, tmp_path):
    def learn(replay):
        for step, _ in enumerate(tr.ReplayDataset(replay, 8, steps=100_000, timeout=600)):
            if step == 5:
                (tmp_path / "under way").touch()
                eventually((tmp_path / "closed").exists, timeout=120)
        return "ended"

    replay = ShardedReplay(SPEC, 100, nodes=cluster.node_ids)
    write(replay, 0, 0, 50)
    call = cluster.ray.remote(learn).options(**cluster.on(1)).remote(replay)
    eventually((tmp_path / "under way").exists, timeout=120)
    replay.stop()
    replay.close()
    eventually(lambda: not cluster.actors("Coordinator"), timeout=120)
    (tmp_path / "closed").touch()
    assert cluster.ray.get(call) == "ended"
