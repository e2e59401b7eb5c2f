"""What is counted of learners, for as long as any shard or process knows of it, and of explorers. On a cluster in this
process."""

import dataclasses

import numpy as np
import pytest
from local_cluster import LocalActor, LocalCluster
from local_shards import SPEC

import torchreplay as tr
from torchreplay.ray import ShardedReplay
from torchreplay.ray.sharded.rate_limiter import Totals
from torchreplay.ray.sharded.shard_actor import Shard


@pytest.fixture
def cluster(monkeypatch):
    made = LocalCluster(monkeypatch, a=2, b=2)
    yield made
    made.close()


def copied(replay):
    """The buffer as another process has it."""
    attach, args = replay.__reduce__()
    return attach(*args)


def lose(replay, number):
    """Kills a shard's actor, which a process notices; the coordinator makes another one."""
    actor = replay._shards.table.entries[number].actor
    actor.dead = True
    actor.it._buffer.close()
    replay._shards.lose(number, "killed")


def drawn(replay):
    found = replay.stats()
    return found.sampled, found.draws, found.learners


def test_what_a_learner_that_is_gone_has_drawn_outlasts_the_shards_that_it_drew_from(cluster):
    limiter = tr.SamplesPerInsert(4.0, min_size=50)
    with ShardedReplay(SPEC, 200, limiter=limiter, seed=1) as replay:
        replay.extend(home=np.zeros(50, int), index=np.arange(50))
        gone = copied(replay)
        for _ in range(20):
            gone.sample(8)
        gone.close()
        assert drawn(replay) == (160, 20, 1)
        for number in (0, 1):  # of each that was made since, the other one or a process has told
            lose(replay, number)
            assert drawn(replay) == (160, 20, 1)
        latecomer = copied(replay)
        assert drawn(latecomer) == (160, 20, 1)
        needed = {process._shards.limiter.needed(8) for process in (replay, latecomer)}
        assert len(needed) == 1  # as many items as everyone else waits for
        latecomer.close()


@pytest.mark.parametrize("limiter", [tr.SamplesPerInsert(4.0, min_size=50), tr.MinSize(50)], ids=repr)
def test_the_first_batch_of_a_learner_is_told_though_it_has_just_told_that_it_waits(cluster, limiter):
    with ShardedReplay(SPEC, 200, limiter=limiter, seed=1) as replay:
        replay.extend(home=np.zeros(50, int), index=np.arange(50))
        learner = copied(replay)
        learner.sample(8)
        assert drawn(replay) == (8, 1, 1)
        learner.close()


@pytest.mark.parametrize("limiter", [tr.SamplesPerInsert(4.0, min_size=50), tr.MinSize(50)], ids=repr)
def test_a_draw_asks_each_shard_once_and_waits_for_no_answer_of_the_coordinator(cluster, monkeypatch, limiter):
    calls, call, wait = [], LocalActor._call, cluster.wait

    def watched(actor, name, args):
        calls.append(name)
        return call(actor, name, args)

    def never(asked, num_returns=1, timeout=None):
        """No answer to a report arrives."""
        answered = [one for one in asked if not (type(one.value) is tuple and isinstance(one.value[0], Totals))]
        return wait(answered, num_returns, timeout)[0], [one for one in asked if one not in answered]

    with ShardedReplay(SPEC, 200, limiter=limiter, seed=1) as replay:
        replay.extend(home=np.zeros(50, int), index=np.arange(50))
        for _ in range(6):  # a lease grows with what is drawn
            replay.sample(8)
        assert replay._shards.limiter.covers(10 * 8)
        with monkeypatch.context() as patched:
            patched.setattr(LocalActor, "_call", watched)
            patched.setattr(cluster, "wait", never)
            for _ in range(10):
                replay.sample(8, timeout=60)
        assert calls.count("draw") == 10  # of the other node's; this one's takes no message
        assert calls.count("report") <= 1
        assert drawn(replay) == (128, 16, 1)


def test_the_share_of_time_that_explorers_wait_is_that_of_those_that_there_are(cluster):
    with ShardedReplay(SPEC, 200, seed=1) as replay:
        cluster.here = "b"
        explorers = copied(replay)
        writers = [explorers.writer() for _ in range(3)]
        _, shard = [actor.it for actor in cluster.actors if isinstance(actor.it, Shard)]
        told, _ = shard.draw(0, 0.0)
        told = dataclasses.replace(told, stats=dataclasses.replace(told.stats, insert_wait_share=0.5))
        shard.draw = lambda candidates, largest: (told, None)
        found = replay.stats()
        assert (found.writers, found.insert_wait_share, found.bottleneck) == (3, 0.5, "learners")
        for writer in writers:
            writer.close()
        explorers.close()
