"""The limiter of a `ShardedReplay` while explorers and learners of two nodes are at work, and another set meanwhile."""

import pytest
from forked import eventually
from sharded_rows import SPEC, rows_of, write_until_stopped

import torchreplay as tr
from torchreplay.ray import ShardedReplay

pytestmark = pytest.mark.slow


CHANGES = (tr.SamplesPerInsert(8.0, min_size=3), tr.MinSize(7), tr.SamplesPerInsert(0.5, min_size=9, tolerance=0.25))
HELD = tr.SamplesPerInsert(1.0, min_size=100, tolerance=0.5)
"""Without a learner it admits 150 items."""
BATCH = 128
MOVED = 75
"""Half of them, which a look at the statistics may move from one node to the other."""


def inserted(replay):
    return replay.stats().inserted


def inserted_before(replay):
    """Items that the present limiter does not count."""
    return replay._shards.table.rule.inserted_before


@pytest.mark.soak
def test_explorers_of_all_nodes_keep_to_one_that_is_set_later_without_a_learner(cluster):
    with ShardedReplay(SPEC, 2000, limiter=HELD, seed=1) as replay:
        task = cluster.ray.remote(write_until_stopped)
        runs = [task.options(**cluster.on(node)).remote(replay, node, 0) for node in (0, 1)]
        eventually(lambda: inserted(replay) >= 150, timeout=120)
        assert inserted(replay) <= 150 + MOVED + 2  # a row under way for each writer
        replay.limiter = tr.MinSize(5)
        eventually(lambda: inserted(replay) > 2000)
        replay.limiter = HELD
        came = inserted(replay)  # some while it was being set
        bound = inserted_before(replay) + 150
        assert 2000 - 100 < inserted_before(replay) <= came - 100
        eventually(lambda: inserted(replay) >= bound)
        for _ in range(20):
            assert inserted(replay) <= max(bound, came) + MOVED + 2
        replay.limiter = None  # as without an argument
        assert replay.limiter == tr.MinSize()
        eventually(lambda: inserted(replay) > came + 2000)
        replay.stop()
        assert {end for _, end in cluster.ray.get(runs)} <= {"stopped", "Stopped"}


def test_one_that_is_set_in_one_process_is_seen_in_every_other_and_frees_those_that_wait(cluster, tmp_path):
    def change(replay, limiter):
        replay.limiter = limiter
        return repr(replay)

    def learn(replay):
        with pytest.raises(tr.ReplayTimeout, match="20 items were inserted, 1,000 are needed"):
            replay.sample(8, timeout=5.0)
        (tmp_path / "waits").touch()
        replay.sample(8, timeout=600)
        return replay.limiter

    with ShardedReplay(SPEC, 2000, limiter=tr.MinSize(10), seed=1) as replay, replay.expect_writers():
        replay.extend(**rows_of(0, 20))
        there = cluster.ray.remote(change).options(**cluster.on(1))
        for limiter in CHANGES:
            assert str(limiter) in cluster.ray.get(there.remote(replay, limiter))
            assert replay.limiter == limiter
            assert str(limiter) in repr(replay)
        for wrong in (3, "none"):
            with pytest.raises(TypeError, match="limiter"):
                replay.limiter = wrong
        replay.limiter = tr.MinSize(1000)
        run = cluster.ray.remote(learn).options(**cluster.on(1)).remote(replay)
        eventually((tmp_path / "waits").exists, timeout=120)
        replay.limiter = tr.MinSize(20)
        assert cluster.ray.get(run) == tr.MinSize(20)


def test_a_ratio_set_while_explorers_and_a_learner_are_at_work_holds_from_there(cluster):
    limiter = tr.SamplesPerInsert(4.0, min_size=1000, tolerance=0.5)
    _, _, low, high = limiter.bounds()
    with ShardedReplay(SPEC, 4000, seed=2) as replay:
        task = cluster.ray.remote(write_until_stopped)
        runs = [task.options(**cluster.on(node)).remote(replay, node, 0) for node in (0, 1)]
        with replay.expect_writers():
            stream = iter(tr.ReplayDataset(replay, BATCH, prefetch=2, timeout=120))
            for _ in range(5):
                next(stream)
            sampled = replay.stats().sampled
            replay.limiter = limiter

            def balance():
                found = replay.stats()
                return (found.inserted - inserted_before(replay)) * 4.0 - (found.sampled - sampled)

            # One row under way for each writer; three batches that are not counted as drawn yet, and as many that were
            # under way when it was set.
            above = high + 2 * 4.0 + 2 * 3 * BATCH
            while balance() > above:  # what came while it was being set
                next(stream)
            for _ in range(40):
                assert len(next(stream)["key"]) == BATCH
                assert low - 3 * BATCH <= balance() <= above
            stream.close()
        replay.stop()
        assert {end for _, end in cluster.ray.get(runs)} <= {"stopped", "Stopped"}


@pytest.mark.soak
def test_the_limiter_holds_over_all_shards_and_waits_end(cluster):
    limiter = tr.SamplesPerInsert(4.0, min_size=100, tolerance=0.5)
    with ShardedReplay(SPEC, 2000, limiter=limiter, seed=2, nodes=cluster.node_ids) as replay:
        with pytest.raises(tr.ReplayTimeout, match="0 items were inserted, 100 are needed"):
            replay.sample(8, timeout=5.0)
        task = cluster.ray.remote(write_until_stopped)
        # Both on one node: what the other node does not use must not be in their way.
        runs = [task.options(**cluster.on(1)).remote(replay, 1, e) for e in range(2)]
        _, _, low, high = limiter.bounds()
        with replay.expect_writers():
            for batch in tr.ReplayDataset(replay, 16, steps=60, timeout=120):
                assert (batch["node"] == 1).all()
                found = replay.stats()
                balance = found.inserted * 4.0 - found.sampled
                # One row under way for each writer, and two batches, which are not counted as drawn yet.
                assert low <= balance <= high + 2 * 4.0 + 2 * 16
        eventually(lambda: replay.stats().insert_wait > 0)
        replay.stop()
        assert replay.stopped
        written, ends = zip(*cluster.ray.get(runs), strict=True)
        assert set(ends) <= {"stopped", "Stopped"}
        # One of them alone may have written all that was admitted, before the other's process was up.
        assert sum(written) == replay.stats().rows_written >= 100
        with pytest.raises(tr.Stopped):
            replay.sample(8)
        assert list(tr.ReplayDataset(replay, 8)) == []
    with pytest.raises(RuntimeError, match="closed"):
        replay.sample(8)
    eventually(lambda: len(cluster.actors("Coordinator")) <= 1)
