"""A learner that waits for rows of shards: whether a writer is left. On a cluster in this process."""

import contextlib
import threading
import time

import numpy as np
import pytest
from forked import eventually
from local_cluster import LocalCluster
from local_shards import SPEC

import torchreplay as tr
from torchreplay.ray import ShardedReplay


@pytest.fixture
def replay(monkeypatch):
    """A buffer of two shards that draws from 50 items on, and gives up on writers who are gone after half a second."""
    for grace in ("STARTUP_GRACE", "RETURN_GRACE"):
        monkeypatch.setattr(f"torchreplay.segment.waits.{grace}", 0.5)
    cluster = LocalCluster(monkeypatch, a=2, b=2)
    with ShardedReplay(SPEC, 200, limiter=tr.MinSize(50), seed=1) as replay:
        yield replay
        replay._shards.local.release()
    cluster.close()


def rows(n):
    return {"home": np.zeros(n, int), "index": np.arange(n)}


def test_a_learner_does_not_wait_for_rows_that_only_it_could_write(replay):
    replay.extend(**rows(5))
    with replay.writer() as writer:
        writer.append(home=0, index=5)
        with pytest.raises(tr.WouldBlockForever, match="6 items were inserted, 50 are needed"):
            replay.sample(8, timeout=60)


def test_a_learner_waits_for_a_writer_of_another_thread(replay):
    replay.extend(**rows(5))
    written, done = threading.Event(), threading.Event()

    def explore():
        with replay.writer() as writer:
            writer.append(home=0, index=5)
            written.set()
            done.wait(60)

    thread = threading.Thread(target=explore)
    thread.start()
    assert written.wait(60)
    with pytest.raises(tr.ReplayTimeout, match="6 items were inserted, 50 are needed"):
        replay.sample(8, timeout=1.5)
    done.set()
    thread.join()
    with pytest.raises(tr.WouldBlockForever):
        replay.sample(8, timeout=60)


def test_learners_tell_the_shards_how_long_they_wait_for_rows(replay):
    began = time.monotonic()
    with replay.writer() as writer:
        learner = threading.Thread(target=replay.sample, args=(8,))
        learner.start()
        eventually(lambda: replay.stats().sample_wait > 0.5)
        found = replay.stats()
        assert found.sample_wait <= time.monotonic() - began
        assert found.sample_wait_share == pytest.approx(found.sample_wait / (time.monotonic() - began), abs=0.2)
        assert found.bottleneck == "explorers"
        for k in range(50):
            writer.append(home=0, index=k)
        learner.join()
    waited = replay.stats().sample_wait
    assert found.sample_wait <= waited <= time.monotonic() - began
    for _ in range(20):
        replay.sample(8)
    assert replay.stats().sample_wait == waited
    assert [shard.stats.sample_wait for shard in replay.stats().shards] == [waited, waited]


def test_explorers_may_write_what_a_learner_drew_last_though_it_calls_nothing_more(monkeypatch):
    """The ratio lets an item in for each that is drawn."""
    cluster = LocalCluster(monkeypatch, a=2)
    written = [0]

    def explore():
        with contextlib.suppress(tr.Stopped), replay.writer() as writer:
            while True:
                writer.append(home=0, index=written[0])
                written[0] += 1

    with ShardedReplay(SPEC, 1000, limiter=tr.SamplesPerInsert(1.0, min_size=100), seed=1) as replay:
        explorer = threading.Thread(target=explore)
        explorer.start()
        eventually(lambda: replay.stats().insert_wait > 0)
        begun = written[0]
        try:
            for drawn in (20, 40, 60):
                replay.sample(20, timeout=60)
                eventually(lambda drawn=drawn: written[0] == begun + drawn)
        finally:
            replay.stop()
            explorer.join()
            replay._shards.local.release()
    cluster.close()
