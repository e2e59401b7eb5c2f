"""What a loaded `ShardedReplay` goes on with, and saves and loads of one checkpoint at a time. On a cluster in this
process."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import LocalCluster

import torchreplay as tr
from torchreplay.checkpoint.joined_rows import divided
from torchreplay.ray import ShardedReplay
from torchreplay.ray.sharded import save_restore
from torchreplay.ray.sharded.shard_keys import KEY_BITS

SPEC = {"x": tr.Field()}


@pytest.fixture(autouse=True)
def cluster(monkeypatch):
    """Of two nodes; buffers give their shards back at the end."""
    made = LocalCluster(monkeypatch, a=2, b=2)
    yield made
    made.close()


def beta(draws):
    return 0.4 + draws / 100


def copied(cluster, replay, node):
    """The buffer as a process of a node has it."""
    cluster.here = node
    attach, args = replay.__reduce__()
    return attach(*args)


def filled(**options):
    replay = ShardedReplay(SPEC, 20, seed=1, **options)
    replay.extend(x=torch.arange(4.0), priority=torch.arange(4.0) + 1)
    return replay


def beta_of(replay):
    """By the weights of a draw, (p / p_min)^-beta (Schaul et al. 2016, section 3.4)."""
    batch = replay.sample(8)
    share = batch["probability"] / replay.gather(torch.arange(4))["probability"].min()
    return float(-batch["weight"].log().sum() / share.log().sum())


def test_a_beta_that_is_a_function_goes_on_where_it_is_given_again_and_is_missed_where_it_is_not(tmp_path, caplog):
    with filled(sampler=tr.Prioritized(beta=beta)) as replay:
        for step in range(5):
            assert beta_of(replay) == pytest.approx(beta(step), rel=1e-4)
        replay.save(tmp_path)
    with ShardedReplay.load(tmp_path, sampler=tr.Prioritized(beta=beta)) as replay:
        assert beta_of(replay) == pytest.approx(beta(5), rel=1e-4)
        replay.save(tmp_path / "with it")
    assert not caplog.records
    for directory in ("with it", "without it"):
        with ShardedReplay.load(tmp_path / directory) as replay:
            assert "beta was a function, which is not saved: it stays at 0.4; give sampler=" in caplog.text
            assert beta_of(replay) == pytest.approx(beta(0), rel=1e-4)
            replay.save(tmp_path / "without it")
        caplog.clear()
    with ShardedReplay.load(tmp_path, sampler=tr.Prioritized(alpha=0.5, beta=beta)) as replay:  # another one
        assert replay.sampler.alpha == 0.5
        assert beta_of(replay) == pytest.approx(beta(5), rel=1e-4)


@pytest.mark.parametrize("after", ["_require_parts", "assigned"])
def test_a_load_that_a_save_takes_the_parts_from_begins_again(tmp_path, monkeypatch, caplog, after):
    with filled() as replay:
        replay.save(tmp_path)
        looks, look = [], getattr(save_restore, after)

        def looked_at(*args):
            looks.append(args)
            found = look(*args)
            if len(looks) == 1:  # and not in the save itself
                replay.extend(x=torch.arange(4.0))
                replay.save(tmp_path)
            return found

        monkeypatch.setattr(save_restore, after, looked_at)
        with caplog.at_level(logging.WARNING, "torchreplay.ray"), ShardedReplay.load(tmp_path) as loaded:
            assert "was saved to while it was read: it is read again" in caplog.text
            assert len(loaded) == 8


def test_draws_go_on_after_those_made_while_it_was_saved(tmp_path, monkeypatch):
    require = save_restore._require_parts

    def drawn_meanwhile(paths):
        replay.sample(8)  # in another thread
        require(paths)

    with filled() as replay:
        replay.sample(8)
        with monkeypatch.context() as patch:
            patch.setattr(save_restore, "_require_parts", drawn_meanwhile)
            replay.save(tmp_path)
    with ShardedReplay.load(tmp_path) as loaded:
        assert loaded.draws == loaded.stats().draws == 2


@pytest.fixture
def saved_elsewhere(cluster, tmp_path):
    """A checkpoint of two shards that change their numbers when they come back on nodes a and b."""
    with ShardedReplay(SPEC, 20, seed=1, nodes=["b", "a"]) as replay:
        for node in "ab":
            copied(cluster, replay, node).extend(x=torch.arange(4.0))
        replay.save(tmp_path)
    return tmp_path


def test_a_restore_that_would_change_the_keys_of_writers_is_refused(cluster, saved_elsewhere):
    with ShardedReplay(SPEC, 20, nodes=["a", "b"]) as replay:
        explorer = copied(cluster, replay, "b")
        with explorer.writer(), pytest.raises(tr.CheckpointError, match="have writers already"):
            replay.restore(saved_elsewhere)
        assert not replay.stopped
        explorer.close()
        replay.restore(saved_elsewhere)
        explorer = copied(cluster, replay, "b")
        with explorer.writer() as writer:
            key = writer.append(x=9.0)
        assert replay.gather([key])["x"].tolist() == [9.0]
        explorer.close()


def test_who_was_attached_before_a_restore_does_not_take_one_shard_for_another_when_its_own_is_lost(
    cluster, saved_elsewhere
):
    with ShardedReplay(SPEC, 20, nodes=["a", "b"]) as replay:
        explorer = copied(cluster, replay, "b")
        explorer.writer().close()
        replay.restore(saved_elsewhere)
        entries = {entry.node: entry for entry in replay._shards.look().entries.values()}
        actor = entries["b"].actor
        actor.dead = True
        actor.it._buffer.close()
        cluster.here = "b"
        explorer.writer().close()
        assert not entries["a"].actor.dead
        assert [lost.node for lost in replay._shards.look().lost] == ["b"]
        explorer.close()


def test_a_restore_says_whether_rows_or_a_shard_that_is_lost_keep_it_from_filling_the_buffer(cluster, tmp_path):
    with filled() as replay:
        replay.save(tmp_path)
        with pytest.raises(tr.CheckpointError, match="the buffer holds rows already"):
            replay.restore(tmp_path)
    with ShardedReplay(SPEC, 20) as replay:
        replay._shards.lose(1, "too little memory is left")
        with pytest.raises(tr.CheckpointError, match="the buffer has lost a shard already"):
            replay.restore(tmp_path)


def test_statistics_say_how_often_other_nodes_were_asked_for_a_batch_of_this_object(cluster, tmp_path):
    with ShardedReplay(SPEC, 20, seed=1, nodes=["a", "b"]) as replay:
        for node in "ab":
            copied(cluster, replay, node).extend(x=torch.arange(4.0))
        cluster.here = "a"
        for _ in range(5):
            replay.sample(8)
        replay.save(tmp_path)
    with ShardedReplay.load(tmp_path, nodes=["a", "b"]) as loaded:
        for _ in range(10):
            loaded.sample(8)
        stats = loaded.stats()
        assert (loaded.draws, stats.round_trips, stats.wire_bytes) == (15, 1.0, 0.0)  # here all calls are Ray's


# Which rows have room.


@pytest.mark.parametrize(
    ("capacity", "kept"),
    [(None, (14, 4)), (18, (14, 4)), (20, (14, 4)), (12, (8, 4)), (6, (3, 3)), (3, (1, 2)), (2, (1, 1))],
)
def test_a_smaller_capacity_keeps_as_many_rows_as_fit_in_all_and_of_each_shard_the_newest(
    cluster, tmp_path, capacity, kept
):
    with ShardedReplay(SPEC, 40, seed=1, nodes=["a", "b"]) as replay:
        for node, rows in (("a", 14), ("b", 4)):
            copied(cluster, replay, node).extend(x=torch.arange(float(rows)))
        replay.save(tmp_path)
    cluster.here = "a"
    with ShardedReplay.load(tmp_path, capacity) as loaded:
        assert loaded.capacity == (capacity or 40)
        assert sum(entry.capacity for entry in loaded._shards.table.entries.values()) == loaded.capacity
        newest = [(number << KEY_BITS) + row for number, n in enumerate(kept) for row in range((14, 4)[number])[-n:]]
        assert loaded.keys().tolist() == newest


@pytest.mark.parametrize(
    ("nodes", "capacity", "kept"),
    [
        ("ab", None, (14, 4, 9)),
        ("a", None, (14, 4, 9)),
        ("c", 27, (14, 4, 9)),
        ("bc", 14, (5, 4, 5)),
        ("a", 14, (5, 4, 5)),
    ],
)
def test_a_cluster_that_lost_nodes_goes_on_with_the_rows_of_all(cluster, tmp_path, nodes, capacity, kept):
    cluster.alive["c"] = {"CPU": 2.0}
    with ShardedReplay(SPEC, 60, seed=1, nodes=["a", "b", "c"], sampler=tr.Prioritized(alpha=1.0)) as replay:
        for node, rows in zip("abc", (14, 4, 9), strict=True):
            numbers = 100.0 * ord(node) + torch.arange(rows)
            copied(cluster, replay, node).extend(x=numbers, priority=numbers)
        cluster.here = "a"
        old = replay.gather(replay.keys())
        before = replay.stats()
        replay.save(tmp_path)
    for node in set("abc") - set(nodes):
        del cluster.alive[node]
    cluster.here = nodes[0]
    with ShardedReplay.load(tmp_path, capacity) as loaded:
        assert loaded.capacity == (capacity or 60)
        assert len(loaded._shards.table.entries) == len(nodes)
        items = loaded.gather(loaded.keys())
        due = [
            100 * ord(node) + row
            for node, n, has in zip("abc", kept, (14, 4, 9), strict=True)
            for row in range(has)[-n:]
        ]
        assert sorted(items["x"].tolist()) == due
        shares = items["x"].double() / sum(due)
        assert items["probability"].tolist() == pytest.approx(shares.tolist(), rel=1e-5)
        after = loaded.stats()
        assert (after.inserted, after.rows_lost, after.shards_missing) == (before.inserted, 0, 0)
        held = loaded.gather(old["key"])  # the keys of a shard that joined another name nothing
        stayed = [old["x"].tolist().index(x) for x in held["x"].tolist()]
        assert torch.equal(old["key"][stayed], held["key"])
        assert {int(x) // 100 for x in held["x"].tolist()} == {ord(node) for node in nodes}
        loaded.update_priorities(old["key"], torch.ones(27))
        loaded.flush()
        gone = sum(n for node, n in zip("abc", (14, 4, 9), strict=True) if node not in nodes)
        assert loaded.stats().lost_updates == gone
        loaded.save(tmp_path / "again")
        with ShardedReplay.load(tmp_path / "again") as again:
            assert sorted(again.gather(again.keys())["x"].tolist()) == due
            again.update_priorities(old["key"], torch.ones(27))  # they are still known to be gone


def test_rows_that_were_cleared_need_no_room(cluster, tmp_path):
    with ShardedReplay(SPEC, 40, seed=1, nodes=["a", "b"]) as replay:
        replay.extend(x=torch.arange(20.0))
        replay.clear()
        copied(cluster, replay, "b").extend(x=torch.arange(14.0))
        replay.save(tmp_path)
    cluster.here = "a"
    with ShardedReplay.load(tmp_path, 20) as loaded:
        assert len(loaded) == 14


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.lists(st.integers(1, 9), min_size=n, max_size=n), st.just(n))))
def test_a_capacity_is_divided_so_that_most_rows_fit_and_else_evenly(given):
    rows, nodes = given
    for capacity in range(nodes, 60):
        each = divided(capacity, rows)
        assert sum(each) == capacity
        assert sum(map(min, each, rows)) == min(capacity, sum(rows))
        assert min(each) > 0
        for share, has in zip(each, rows, strict=True):
            assert share <= max(has, min(each) + 1)  # nobody has more room to spare than others have in all
            assert share >= min(has, max(each) - 1)  # nobody loses rows while others keep more


# Nodes that are gone, which Ray has not noticed yet.


@pytest.mark.parametrize("name", ["ActorUnschedulableError", "ActorDiedError"])
def test_a_shard_that_cannot_be_made_is_an_error_that_says_where_and_what_to_do(cluster, tmp_path, name):
    with filled() as replay:
        replay.save(tmp_path)
    text = "The node specified via NodeAffinitySchedulingStrategy doesn't exist any more"
    kind = getattr(cluster.exceptions, name)
    cluster.failures["b"] = kind(text) if name == "ActorUnschedulableError" else kind()
    told = r"shard of the ShardedReplay on node b cannot be made: .*or give nodes=\[\.\.\.\] without it"
    with pytest.raises(RuntimeError, match=told):
        ShardedReplay.load(tmp_path)
    with pytest.raises(RuntimeError, match=told):
        ShardedReplay(SPEC, 20)
    del cluster.failures["b"]
    with ShardedReplay.load(tmp_path) as loaded:
        assert len(loaded) == 4
