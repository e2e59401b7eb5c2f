"""The shard on the learner's own node: drawn from and fed back to through shared memory, by nobody's leave."""

import logging
import os
import signal

import numpy as np
import pytest
import torch
from forked import eventually
from late_copies import StagedDataset
from sharded_rows import SPEC, assert_follows, assert_intact, shards_of, write, write_until_stopped

import torchreplay as tr
from torchreplay.ray import ShardedReplay, ShardLost
from torchreplay.ray.sharded.coordinator import Coordinator
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.ray.sharded.shard_keys import KEY_BITS
from torchreplay.schema.config import Config

pytestmark = pytest.mark.slow


ALPHA, EPS, BETA = 0.6, 1e-6, 0.4
BATCH = 1024  # of 280 bytes: Ray would carry it through the object store


def shard_on(cluster, node):
    """The process of the shard on a node of this cluster."""

    def found():
        return {a["Pid"] for a in cluster.actors("Shard") if a["Address"]["NodeID"] == cluster.node_ids[node]}

    eventually(lambda: len(found()) == 1)  # those of tests before may not be gone yet
    return found().pop()


def prioritized():
    return tr.Prioritized(alpha=ALPHA, beta=BETA, eps=EPS)


def test_nothing_is_asked_of_the_process_that_holds_it(cluster):
    with ShardedReplay(SPEC, 500, sampler=prioritized(), seed=1, nodes=cluster.node_ids[:1]) as replay:
        keys = torch.tensor(write(replay, 0, 0, 200))
        replay.sample(BATCH, timeout=120)
        td = 10.0 ** np.random.default_rng(1).uniform(-2, 2, 200)
        replay.update_priorities(keys, td)
        before = replay.stats()  # which hears all that the process was told
        leaves = (td + EPS) ** ALPHA
        p, observed = leaves / leaves.sum(), np.zeros(200)
        holder = shard_on(cluster, 0)
        os.kill(holder, signal.SIGSTOP)
        try:
            for step, batch in enumerate(tr.ReplayDataset(replay, BATCH, steps=60, prefetch=2, timeout=120)):
                at = batch["count"].numpy()
                observed += np.bincount(at, minlength=200)
                np.testing.assert_allclose(batch["probability"].numpy(), p[at], rtol=2e-6)
                np.testing.assert_allclose(batch["weight"].numpy(), (p.min() / p[at]) ** BETA, rtol=5e-6)
                if step % 10 == 0:
                    assert_intact(batch)
                replay.update_priorities(batch, td[at])
            replay.flush()
        finally:
            os.kill(holder, signal.SIGCONT)
        assert_follows(observed, p)
        after = replay.stats()
        assert after.updated - before.updated == after.sampled - before.sampled == 60 * BATCH
        assert after.draws == before.draws + 60
        assert (after.stale_updates, after.lost_updates) == (0, 0)


def test_its_items_and_those_of_the_other_node_make_one_batch_in_proportion(cluster):
    with ShardedReplay(SPEC, 1000, sampler=prioritized(), seed=2, nodes=cluster.node_ids) as replay:
        task = cluster.ray.remote(write).options(**cluster.on(1))
        keys = [*write(replay, 0, 0, 150), *cluster.ray.get(task.remote(replay, 1, 0, 90))]
        td = 10.0 ** np.random.default_rng(2).uniform(-2, 2, 240)
        replay.update_priorities(torch.tensor(keys), td)
        leaves = (td + EPS) ** ALPHA
        p, observed = leaves / leaves.sum(), np.zeros(240)
        place_of = {key: i for i, key in enumerate(keys)}
        staged = StagedDataset(replay, BATCH, steps=40, prefetch=2, timeout=120)
        given = []
        for batch in staged:
            given.append(batch)
            replay.update_priorities(batch, td[[place_of[key] for key in batch["key"].tolist()]])
        staged.copies.run()  # as late as they can
        for step, batch in enumerate(given):
            at = 150 * batch["node"].numpy() + batch["count"].numpy()
            observed += np.bincount(at, minlength=240)
            assert [keys[i] for i in at] == batch["key"].tolist()
            np.testing.assert_allclose(batch["probability"].numpy(), p[at], rtol=2e-6)
            np.testing.assert_allclose(batch["weight"].numpy(), (p.min() / p[at]) ** BETA, rtol=5e-6)
            if step % 10 == 0:
                assert_intact(batch)
        assert_follows(observed, p)
        assert len(given) == 40
        assert replay.stats().updated == 240 + 40 * BATCH


def test_feedback_comes_after_the_draws_asked_for_before_and_before_those_asked_for_later(cluster):
    with ShardedReplay(SPEC, 500, sampler=prioritized(), seed=3, nodes=cluster.node_ids[:1]) as replay:
        keys = torch.tensor(write(replay, 0, 0, 10))
        replay.update_priorities(keys, np.ones(10))
        replay.sample(8, timeout=120)
        stream = iter(tr.ReplayDataset(replay, 64, prefetch=2, timeout=120))
        next(stream)  # two more are under way
        before, one = 1.0, (1.0 + EPS) ** ALPHA
        for after in (30.0, 0.05, 200.0, 1.5):
            replay.update_priorities(keys[:1], [after])
            for value in (before, before, after):
                batch = next(stream)
                rest = batch["probability"][batch["key"] != keys[0]]
                due = one / (9 * one + (value + EPS) ** ALPHA)
                assert len(rest) > 0
                assert torch.allclose(rest, torch.tensor(due), rtol=1e-5)
            before = after
        stream.close()


def test_when_its_process_is_killed_its_rows_are_lost_and_it_comes_back_empty(cluster, caplog):
    home, other = cluster.node_ids
    task = cluster.ray.remote(write)
    with ShardedReplay(SPEC, 1000, sampler=tr.Prioritized(), seed=1) as replay:
        write(replay, 0, 0, 100)
        cluster.ray.get(task.options(**cluster.on(1)).remote(replay, 1, 0, 100))
        run = cluster.ray.remote(write_until_stopped).options(**cluster.on(0)).remote(replay, 0, 1)
        stream = iter(tr.ReplayDataset(replay, BATCH, prefetch=3, timeout=120))
        batch = next(stream)
        assert shards_of(batch) == {0, 1}
        eventually(lambda: len(replay) > 250)
        with caplog.at_level(logging.ERROR, "torchreplay.ray"):
            os.kill(shard_on(cluster, 0), signal.SIGKILL)
            while 0 in shards_of(following := next(stream)):
                pass
        assert_intact({name: following[name] for name in SPEC})
        assert "shard 0 on node" in caplog.text
        before = replay.stats()
        replay.update_priorities(batch, torch.full((BATCH,), 3.0))
        gone = int((batch["key"] >> KEY_BITS == 0).sum())
        after = replay.stats()
        assert (after.lost_updates - before.lost_updates, after.updated - before.updated) == (gone, BATCH - gone)
        # Its explorers end although this learner had it attached, too.
        assert cluster.ray.get(run)[1] == ShardLost.__name__
        eventually(lambda: replay.stats().shards_missing == 0, timeout=120)
        assert {shard.node: shard.stats.size for shard in replay.stats().shards} == {home: 0, other: 100}
        assert set(np.array(write(replay, 0, 2, 50)) >> KEY_BITS) == {2}
        eventually(lambda: shards_of(next(stream)) == {1, 2}, timeout=120)
        stream.close()


def test_batches_go_on_when_the_node_of_those_under_way_dies(cluster):
    task = cluster.ray.remote(write)
    with cluster.one_more() as third:
        nodes = [cluster.node_ids[0], cluster.node_ids[third]]
        with ShardedReplay(SPEC, 1000, seed=1, nodes=nodes) as replay:
            write(replay, 0, 0, 40)
            cluster.ray.get(task.options(**cluster.on(third)).remote(replay, 2, 0, 400))
            stream = iter(tr.ReplayDataset(replay, BATCH, prefetch=3, timeout=240))
            assert shards_of(next(stream)) == {0, 1}
            cluster.kill(third)  # which holds most of three batches in its object store
            for _ in range(8):
                batch = next(stream)
                assert len(batch["key"]) == BATCH
                replay.update_priorities(batch, torch.ones(BATCH))
            assert_intact(batch)
            assert shards_of(batch) == {0}
            np.testing.assert_allclose(batch["probability"].numpy(), 1 / 40, rtol=1e-6)
            stream.close()
            assert (replay.stats().rows_lost, replay.stats().shards_missing) == (400, 1)


def test_the_limiter_holds_for_explorers_and_learners_of_one_node(cluster):
    limiter = tr.SamplesPerInsert(4.0, min_size=100, tolerance=0.5)
    with ShardedReplay(SPEC, 2000, limiter=limiter, seed=2, nodes=cluster.node_ids[:1]) as replay:
        task = cluster.ray.remote(write_until_stopped).options(**cluster.on(0))
        runs = [task.remote(replay, 0, e) for e in range(2)]
        _, _, low, high = limiter.bounds()
        with replay.expect_writers():
            for batch in tr.ReplayDataset(replay, 16, steps=100, timeout=120):
                assert len(batch["key"]) == 16
                found = replay.stats()
                # One row under way for each writer, and two batches, which are not counted as drawn yet.
                assert low <= found.inserted * 4.0 - found.sampled <= high + 2 * 4.0 + 2 * 16
            # They went on while nobody looked at the statistics, too.
            inserted = replay.stats().inserted
            for batch in tr.ReplayDataset(replay, 16, steps=200, timeout=120):
                assert len(batch["key"]) == 16
            assert replay.stats().inserted >= inserted + (200 * 16 - (high - low) - 2 * 4.0 - 2 * 16) / 4.0
        replay.stop()
        assert {end for _, end in cluster.ray.get(runs)} <= {"stopped", "Stopped"}
        with pytest.raises(tr.Stopped):
            replay.sample(16)


def test_one_that_cannot_be_attached_is_asked_like_the_others_and_lives_on(cluster, caplog, monkeypatch):
    class Refusing:
        def __init__(self, number, handle):
            raise tr.AttachError("it belongs to another user")

    monkeypatch.setattr("torchreplay.ray.sharded.local_shard.LocalShard", Refusing)
    with ShardedReplay(SPEC, 100, sampler=prioritized(), seed=1, nodes=cluster.node_ids[:1]) as replay:
        cluster.ray.get(cluster.ray.remote(write).options(**cluster.on(0)).remote(replay, 0, 0, 30))
        with caplog.at_level(logging.WARNING, "torchreplay.ray"):
            for batch in tr.ReplayDataset(replay, BATCH, steps=5, timeout=120):
                assert_intact(batch)
                replay.update_priorities(batch, torch.ones(BATCH))
        (record,) = caplog.records
        assert "it belongs to another user" in record.getMessage()
        with pytest.raises(tr.AttachError, match="another user"):
            replay.writer()
        assert (len(replay), replay.stats().updated, replay.stats().shards_missing) == (30, 5 * BATCH, 0)


def test_a_shard_that_could_not_be_made_anew_is_tried_again(cluster, monkeypatch, tmp_path):
    class Hungry(Shard):
        """Finds no memory for as long as there is a file."""

        def open(self):
            if (tmp_path / "full").exists():
                (tmp_path / "failed").touch()
                raise MemoryError("there is none left")
            return super().open()

    monkeypatch.setattr("torchreplay.ray.sharded.coordinator.Shard", Hungry)
    monkeypatch.setattr("torchreplay.ray.sharded.coordinator.RETRY", 0.1)
    coordinator = Coordinator(Config.of(SPEC, 100, None, None, None), [100], cluster.node_ids[:1], True, 0)
    (first,) = coordinator.open().entries
    (tmp_path / "full").touch()
    assert not coordinator.lost(first, 0, 0, "it was killed").entries

    def has_failed():
        return not coordinator.table().entries and (tmp_path / "failed").exists()

    eventually(has_failed, timeout=120)
    (tmp_path / "full").unlink()
    eventually(lambda: coordinator.table().entries, timeout=120)
    assert set(coordinator.table().entries) == {first + 1}  # attempts that failed have used up no number
