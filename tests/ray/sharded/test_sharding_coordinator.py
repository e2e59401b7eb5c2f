"""What processes know of the shards of a `ShardedReplay`, and report to each other, when one is lost or slow to come
back, or when Ray cannot reach an actor. On a cluster in this process."""

import copy
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from forked import eventually
from local_shards import SPEC
from three_shards import NODES, die, hand_out, write

import torchreplay as tr
from torchreplay.errors import AttachError
from torchreplay.ray import ShardedReplay
from torchreplay.ray.sharded.local_shard import LocalShard
from torchreplay.ray.sharded.manifest import Counts, Manifest
from torchreplay.ray.sharded.reply_collector import ReplyCollector
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.ray.sharded.sharded_sampler import ShardedSampler
from torchreplay.ray.sharded.stats import merged_histograms
from torchreplay.ray.sharded.writing import Expectation, buffer_to_write_to
from torchreplay.schema.config import Config
from torchreplay.segment.waits import Wait

# What was lost.


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_lost_is_what_the_best_informed_process_knows(union, first):
    coordinator, view = union()
    reports = [(0, 0), (50, 900)]
    coordinator.lost(1, *reports[first], "killed")
    coordinator.lost(1, *reports[1 - first], "killed")
    (lost,) = coordinator.table().lost
    assert (lost.rows, lost.inserted, lost.node) == (50, 900, "b")
    assert view("c").limiter.inserted == 900


def test_a_learner_that_knows_more_of_a_lost_shard_tells_everyone(local_cluster, union):
    coordinator, view = union()
    learner, writer, stranger = view("a"), view("b"), view("c")
    write(writer, 40)
    learner.exchange()
    die(coordinator, 1)
    stranger.lose(1, "killed")
    assert [(lost.rows, lost.inserted) for lost in coordinator.table().lost] == [(0, 0)]
    learner.look()
    assert [(lost.rows, lost.inserted) for lost in coordinator.table().lost] == [(40, 40)]
    stranger.look()
    assert stranger.limiter.inserted == 40
    assert view("c").limiter.inserted == 40


def test_a_learner_that_has_not_said_yet_what_it_knows_of_a_lost_shard_says_it_when_it_hears_of_the_loss(union, caplog):
    coordinator, view = union()
    learner, writer, stranger = view("a"), view("b"), view("c")
    write(writer, 40)
    assert heard(learner) == {0, 1, 2}
    die(coordinator, 1)
    stranger.lose(1, "killed")
    assert [(lost.rows, lost.inserted) for lost in coordinator.table().lost] == [(0, 0)]
    with caplog.at_level(logging.ERROR, "torchreplay.ray"):
        learner.look()
    assert [(lost.rows, lost.inserted) for lost in coordinator.table().lost] == [(40, 40)]
    assert "with shard 1 40 rows are lost, not 0" in caplog.text
    assert stranger.look().lost[0].inserted == stranger.limiter.inserted == 40


def test_a_process_that_only_wrote_knows_what_is_lost(union):
    coordinator, view = union()
    writer = view("b")
    write(writer, 70)
    die(coordinator, 1)
    writer.lose(1, "killed")
    assert [(lost.rows, lost.inserted) for lost in coordinator.table().lost] == [(70, 70)]


# A shard that this process lets go of.


def test_a_shard_that_a_process_has_let_go_of_is_not_lost(local_cluster):
    shard = Shard(3, Config.of(SPEC, 100, tr.Uniform(), None, None), 1, None)
    shard.open()
    shard._buffer.extend(home=np.zeros(9, int), index=np.arange(9))
    lost = []
    calls = ReplyCollector(lambda number, why: lost.append(number), str)
    nearby = LocalShard(3, shard._buffer.handle())
    nearby.close()
    assert calls.collect({3: nearby.update(np.arange(3), np.ones(3))}) == {}
    assert lost == []
    again = LocalShard(3, shard._buffer.handle())
    assert len(again.buffer) == 9
    shard._buffer.close()
    assert calls.collect({3: again.update(np.arange(3), np.ones(3))}) == {}  # but this one is
    assert lost == [3]
    again.close()


def test_whether_it_was_stopped_is_told_while_another_thread_lets_go_of_the_shard(local_cluster):
    with ShardedReplay(SPEC, 300) as replay:
        replay.extend(home=np.zeros(3, int), index=np.arange(3))
        replay._shards.local.shard.buffer.close()  # it has, just after this one had looked which it is
        assert not replay.stopped
        replay._shards.local.release()


# Answers that one thread hears after another has heard later ones.


def test_keys_of_a_batch_are_known_though_another_thread_hears_an_older_answer_afterwards(local_cluster, monkeypatch):
    with ShardedReplay(SPEC, 3000, sampler=tr.Prioritized()) as replay:
        replay.extend(home=np.zeros(3, int), index=np.arange(3))
        replay.sample(4)
        shards = replay._shards
        older = [shards.order(dict.fromkeys(range(3), 0)) for _ in range(3)]
        replay.extend(home=np.zeros(200, int), index=np.arange(200))
        batch = replay.sample(64)
        exchange = shards.exchange

        def overtaken():
            exchange()
            shards.hear(older.pop(), Wait(shards, 60))

        monkeypatch.setattr(shards, "exchange", overtaken)
        shards.hear(older.pop(), Wait(shards, 60))
        replay.update_priorities(batch, torch.full((64,), 2.0))
        assert set(replay.priorities(batch).tolist()) == {2.0}
        assert len(replay) == 203
        assert len(older) == 1


def test_a_stop_that_was_heard_is_not_forgotten_for_an_older_answer(union):
    coordinator, view = union()
    shards = view("a")
    older = shards.order(dict.fromkeys(range(3), 0))
    coordinator.table().entries[1].actor.it.ask("stop")
    with pytest.raises(tr.Stopped):
        heard(shards)
    shards._note(shards.calls.collect(older))
    assert shards.stopped


# The coordinator out of reach.


def test_a_process_on_no_node_cannot_write_and_is_told_why(local_cluster, union):
    _, view = union()
    with pytest.raises(RuntimeError, match=r"a Ray Client, is on no node of the cluster.*Have a task"):
        buffer_to_write_to(view(""))


class SilentDirectory:
    """The coordinator's actor while its process is stopped: no call of it is answered before `answers`."""

    def __init__(self, local_cluster):
        self._cluster, self.asked, self.answers = local_cluster, 0, 1 << 60
        self._get, self._wait = local_cluster.get, local_cluster.wait

    def get(self, call, timeout=None):
        self.asked += 1
        if timeout is not None and self.asked < self.answers:
            raise self._cluster.exceptions.GetTimeoutError("")
        return self._get(call)

    def wait(self, calls, num_returns=1, timeout=None):
        return ([], list(calls)) if timeout == 0 else self._wait(calls, num_returns, timeout)


def test_who_waits_for_a_coordinator_that_does_not_answer_is_told_its_name(local_cluster, union, monkeypatch, caplog):
    _, view = union(tr.SamplesPerInsert(1.0, min_size=1, tolerance=1.0))
    shards = view("a")
    shards.limiter.report()
    silent = SilentDirectory(local_cluster)
    silent.answers = 3
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "torchreplay.ray"):
        patch.setattr(local_cluster, "get", silent.get)
        assert set(shards.look().entries) == {0, 1, 2}
    assert caplog.text.count("waiting for an answer from the coordinator of the ShardedReplay (Ray's actor union)") == 2
    assert shards.silence == ""
    monkeypatch.setattr(local_cluster, "wait", silent.wait)
    monkeypatch.setattr("torchreplay.ray.sharded.coordinator_view.SILENT_AFTER", 0.2)
    draws = ShardedSampler(shards, Config.of(SPEC, 100, tr.Uniform(), None, None), 1, 1, None)
    with pytest.raises(tr.ReplayTimeout, match=r"0 items were inserted, .*the coordinator .*has not answered for"):
        draws.draw(8, None, Wait(shards, 1.0))


def test_a_coordinator_that_ray_cannot_reach_for_a_moment_is_asked_again(local_cluster, union, monkeypatch):
    _, view = union()
    shards = view("a")
    shards.exchange()
    actor = local_cluster.named["union"]
    actor.unreachable = 2
    assert set(shards.look().entries) == {0, 1, 2}
    actor.unreachable = 1
    shards.report(last=True)
    shards.refresh()
    assert actor.unreachable == 0
    assert not shards.stopped
    with monkeypatch.context() as impatient:
        impatient.setattr("torchreplay.ray.runtime.actor_client.ASK_AGAIN_SECONDS", 0.0)
        actor.unreachable = 1
        with pytest.raises(tr.AttachError, match=r"nothing reaches the shards of the ShardedReplay: .*network is down"):
            shards.look()
    actor.dead = True
    with pytest.raises(tr.Stopped):
        shards.look()


@contextmanager
def slow(coordinator, name):
    """The coordinator takes its time for one question; yields what is set when it is asked, and what lets it answer."""
    asked, leave, answer = threading.Event(), threading.Event(), getattr(coordinator, name)

    def late(*args):
        asked.set()
        leave.wait(60)
        return answer(*args)

    setattr(coordinator, name, late)
    try:
        yield asked, leave
    finally:
        leave.set()
        delattr(coordinator, name)


def heard(shards):
    """The shards that answer an order."""
    return set(shards.hear(shards.order(dict.fromkeys(shards.table.entries, 0)), Wait(shards, 60)))


def test_a_learner_does_not_wait_for_what_another_thread_asks_the_coordinator(union):
    coordinator, view = union()
    shards = view("a")
    heard(shards)
    with ThreadPoolExecutor(1) as other, slow(coordinator, "table") as (asked, leave):
        table = other.submit(shards.look)
        assert asked.wait(60)
        assert heard(shards) == {0, 1, 2}
        assert not table.done()
        leave.set()
        assert set(table.result(60).entries) == {0, 1, 2}


def test_while_one_thread_reports_a_loss_the_others_draw_from_what_is_left(union):
    coordinator, view = union()
    shards = view("a")
    write(view("b"), 30)
    shards.exchange()
    die(coordinator, 1)
    with ThreadPoolExecutor(1) as other, slow(coordinator, "lost") as (asked, leave):
        report = other.submit(shards.lose, 1, "killed")
        assert asked.wait(60)
        assert heard(shards) == {0, 2}
        assert shards.limiter.inserted == 30
        assert [(lost.number, lost.rows) for lost in shards.table.lost] == [(1, 30)]
        leave.set()
        report.result(60)
    assert [(lost.number, lost.rows, lost.inserted) for lost in shards.look().lost] == [(1, 30, 30)]


def test_an_answer_of_the_coordinator_that_comes_late_does_not_bring_back_what_is_lost(union):
    coordinator, view = union()
    shards = view("a")
    before = coordinator.table()
    die(coordinator, 1)
    shards.lose(1, "killed")
    assert 1 not in shards._adopt(before).entries
    assert 1 not in shards.table.entries


def test_an_announcement_is_repeated_after_ray_could_not_reach_the_coordinator(local_cluster, union, monkeypatch):
    monkeypatch.setattr("torchreplay.ray.sharded.writing.REPEAT", 0.01)
    coordinator, view = union()
    shards, actor = view("a"), local_cluster.named["union"]
    with Expectation(shards.coordinator):
        actor.unreachable = 3
        eventually(lambda: actor.unreachable == 0)
        coordinator._expecting.clear()  # as after a while
        eventually(lambda: shards.look().expected)


def test_what_is_said_twice_of_a_checkpoint_counts_once(union):
    coordinator, _ = union()
    counts = Counts(born=7, streams=2, items=100, batches=10, sampled=100, inserted_before=0, cleared=0, lost_updates=1)
    manifest = Manifest(Config.of(SPEC, 100, None, None, tr.MinSize()), 5, 0, 0, "shards-0", (), counts, ())
    first, second = (coordinator.restored(manifest, {0: 1, 1: 0}, 7, {0: 60}) for _ in "12")
    assert [entry.node for entry in second.entries.values()] == NODES
    assert list(first.entries) == list(second.entries) == [1, 0, 2]
    assert second.rule == first.rule


# Who says how many items are admitted.


def test_those_who_look_around_do_not_change_how_many_items_are_admitted(union):
    limiter = tr.SamplesPerInsert(2.0, min_size=60, tolerance=0.5)
    coordinator, view = union(limiter)
    held = [entry.actor.it for entry in coordinator.table().entries.values()]

    def admitted():
        return sum(shard._limit for shard in held)

    assert [shard._limit for shard in held] == [30, 30, 30]  # 2 x 90 - 0 draws = 2 x 60 x (1 + 0.5)
    write(view("b"), 10)
    learner, observer = view("a"), view("c")
    learner.exchange()
    assert admitted() == 90
    hand_out(learner.limiter, 40)
    learner.report()
    assert admitted() == 110
    for _ in range(2):
        observer.exchange()  # it has not asked before, and has drawn nothing
        assert admitted() == 110
    observer.set_limiter(tr.SamplesPerInsert(2.0, min_size=30, tolerance=0.5))  # which it hears all shards for
    assert admitted() == 45


def test_a_learner_that_comes_later_counts_what_others_have_drawn_before_its_own_first_draw(union):
    _, view = union(tr.SamplesPerInsert(2.0, min_size=10, tolerance=0.5))
    write(view("a"), 10)
    learner = view("b")
    hand_out(learner.limiter, 14)
    learner.report()
    latecomer = view("c")
    assert latecomer.limiter.sampled == 14
    assert latecomer.limiter.needed(8) == learner.limiter.needed(8) == 16  # 2 x 16 - 14 - 8 = 2 x 10 x (1 - 0.5)


@pytest.mark.parametrize("limiter", [tr.SamplesPerInsert(2.0, min_size=30, tolerance=0.5), tr.MinSize()])
def test_a_limit_that_ray_has_lost_on_its_way_is_sent_again_when_a_learner_looks_at_the_table(
    union, monkeypatch, limiter
):
    coordinator, view = union(tr.SamplesPerInsert(2.0, min_size=60, tolerance=0.5))
    learner = view("a")
    learner.exchange()
    actor = coordinator.table().entries[1].actor
    assert actor.it._limit == 30
    actor.unreachable = 99
    coordinator.change_limiter(limiter)
    learner.look()
    learner.report(8)
    actor.unreachable = 0
    assert actor.it._limit == 30
    monkeypatch.setattr("torchreplay.ray.sharded.coordinator.RESEND", 0.0)
    learner.look()
    assert actor.it._limit == (None if limiter == tr.MinSize() else 15)


# Histograms.


def test_without_a_shard_histograms_are_those_of_an_empty_buffer():
    with tr.ReplayBuffer(SPEC, 10) as buffer:
        empty = buffer.histograms(16)
    merged = merged_histograms([], 16)
    assert merged.keys() == empty.keys()
    for name, values in empty.items():
        assert merged[name].dtype == values.dtype
        assert torch.equal(merged[name], values)


def test_a_closed_buffer_has_no_histograms():
    replay = ShardedReplay.__new__(ShardedReplay)
    replay._shards = ShardClient.__new__(ShardClient)
    replay._shards.closed = True
    with pytest.raises(RuntimeError, match="the ShardedReplay is closed"):
        replay.histograms()


def test_threads_that_come_first_at_the_same_time_are_one_learner(union, monkeypatch):
    coordinator, view = union()
    shards, join = view("a"), coordinator.join
    both = threading.Barrier(2)

    def join_slowly():
        number = join()
        both.wait(10)
        return number

    monkeypatch.setattr(coordinator, "join", join_slowly)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: (shards.limiter, shards.limiter.stream), range(2))
    assert first == second


@pytest.mark.parametrize(("limit", "admitted"), [(1, 1), (5, 5), (40, 40)])
def test_a_shard_that_is_empty_admits_no_more_than_it_may(limit, admitted):
    shard = Shard(0, Config.of(SPEC, 100, tr.Uniform(), None, None), 1, limit)
    shard.open()
    with shard._buffer.writer() as writer:
        while len(shard._buffer) < 100 and writer._admitted():
            writer.append(home=0, index=0)
    assert len(shard._buffer) == admitted
    shard._buffer.close()


# What a learner has drawn is said, though it may call nothing more.


@pytest.mark.parametrize("nodes", [["a"], NODES])
@pytest.mark.parametrize("prefetch", [None, 0, 2])
def test_what_a_learner_drew_last_is_known_to_others(local_cluster, nodes, prefetch):
    with ShardedReplay(SPEC, 300, nodes=nodes) as replay, copy.copy(replay) as other:
        replay.extend(home=np.zeros(50, int), index=np.arange(50))
        batches = None if prefetch is None else iter(tr.ReplayDataset(replay, 8, prefetch=prefetch))
        for drawn in (1, 2, 30):  # the last of them while a report is waited for
            for _ in range(drawn):
                replay.sample(8) if batches is None else next(batches)
        eventually(lambda: other.stats().sampled == 8 * 33)
        if batches is not None:
            batches.close()


def test_a_learner_whose_process_has_left_ray_is_told_so_and_starts_no_other(local_cluster):
    with ShardedReplay(SPEC, 300) as replay:
        replay.extend(home=np.zeros(50, int), index=np.arange(50))
        batch = replay.sample(8)
        elsewhere = torch.arange(8) + (1 << 48)
        local_cluster.is_initialized = lambda: False
        for call in (
            lambda: replay.sample(8),
            lambda: replay.gather(batch),
            lambda: replay.update_priorities(elsewhere, torch.ones(8)),
        ):
            with pytest.raises(AttachError, match="Ray was shut down in this process"):
                call()
        del local_cluster.is_initialized


def test_batches_of_a_closed_buffer_are_refused(local_cluster):
    for prefetch in (0, 2):
        with ShardedReplay(SPEC, 300) as replay:
            replay.extend(home=np.zeros(50, int), index=np.arange(50))
            batches = iter(tr.ReplayDataset(replay, 8, prefetch=prefetch))
            next(batches)
            replay.close()
            with pytest.raises(RuntimeError, match="the ShardedReplay is closed"):
                next(batches)
