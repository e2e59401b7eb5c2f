"""Where processes write and explorers run, as shards of a `ShardedReplay` come, go and are made anew. On a cluster in
this process."""

import logging
import threading
from types import SimpleNamespace

import pytest
from forked import eventually
from three_shards import NODES, die, write

import torchreplay as tr
from torchreplay.ray import ReplayLost
from torchreplay.ray.sharded.writing import buffer_to_write_to, nodes_to_write_from
from torchreplay.ray.workers.placement import OverShards

# Shards that are to come back.


def waiting_for_a_shard(coordinator):
    table = coordinator.table()
    return sorted(set(table.nodes) - {entry.node for entry in table.entries.values()})


def test_a_node_whose_shard_is_tried_again_later_gets_one(local_cluster, union, caplog):
    coordinator, view = union()
    shards = view("a")
    assert nodes_to_write_from(shards) == NODES
    local_cluster.failures["b"] = MemoryError("too little memory is left")
    with caplog.at_level(logging.ERROR, "torchreplay.ray"):
        coordinator.lost(1, 0, 0, "killed")
        assert "no shard can be made on node b" not in caplog.text
        coordinator.table()
        assert "no shard can be made on node b" in caplog.text
    for _ in range(3):
        assert waiting_for_a_shard(coordinator) == ["b"]
        assert nodes_to_write_from(shards) == NODES  # so that explorer k of a pool goes where it was
    del local_cluster.alive["b"]
    assert waiting_for_a_shard(coordinator) == []
    assert nodes_to_write_from(shards) == ["a", "c"]


def test_a_node_that_comes_in_the_place_of_a_lost_one_is_written_from(local_cluster, union):
    coordinator, view = union()
    shards = view("a")
    del local_cluster.alive["b"]
    coordinator.lost(1, 0, 0, "its node is gone")
    assert nodes_to_write_from(shards) == ["a", "c"]
    local_cluster.alive["d"] = {"CPU": 2.0}
    assert nodes_to_write_from(shards) == ["a", "d", "c"]


def test_a_writer_waits_for_the_shard_of_its_node_to_be_made_anew_and_learners_wait_for_it(
    local_cluster, union, monkeypatch
):
    monkeypatch.setattr("torchreplay.ray.sharded.coordinator.RETRY", 0.01)
    monkeypatch.setattr("torchreplay.ray.sharded.coordinator.BELIEF", 5.0)
    coordinator, view = union()
    shards, learner = view("b"), view("a")
    local_cluster.failures["b"] = MemoryError("too little memory is left")
    die(coordinator, 1)
    shards.lose(1, "killed")
    coordinator._expecting.clear()  # as long after the loss
    written = threading.Thread(target=write, args=(shards, 7))
    written.start()
    eventually(lambda: coordinator._slots[1].failures > 1)
    learner.look()
    assert learner.census(False)["supervisors"] == 1
    assert written.is_alive()
    local_cluster.failures.clear()
    written.join(60)
    assert not written.is_alive()
    learner.exchange()
    assert sum(figures.stats.size for figures in learner.figures.values()) == 7
    assert learner.census(False)["supervisors"] == 0


def test_a_writer_whose_shard_is_not_made_anew_for_long_says_so(local_cluster, union, monkeypatch):
    monkeypatch.setattr("torchreplay.ray.sharded.writing.REMAKE_SECONDS", 0.2)
    coordinator, view = union()
    shards = view("b")
    local_cluster.failures["b"] = MemoryError("too little memory is left")
    coordinator.lost(1, 0, 0, "killed")
    with pytest.raises(RuntimeError, match="shard of node b was lost, and could not be made anew for 0 s"):
        buffer_to_write_to(shards)


class Elsewhere:
    """A shard of another node, as a process is about to write to it."""

    def __init__(self, entry):
        self.number, self.ending = entry.number, None

    def connect(self):
        """Finds it."""


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setattr("torchreplay.ray.sharded.remote_shard.RemoteShard", Elsewhere)
    return Elsewhere


def test_a_process_without_a_shard_writes_to_one_with_the_fewest_writers_and_keeps_to_it(union, elsewhere):
    _, view = union()
    with buffer_to_write_to(view("a")).writer(), buffer_to_write_to(view("b")).writer():
        first = view("d")
        assert [buffer_to_write_to(first).number for _ in range(3)] == [2, 2, 2]
    assert buffer_to_write_to(first).number == 2  # where there are as many by now
    # Of those that have as few they take one in turn: the shards get as many each, wherever the turns stand.
    each = [buffer_to_write_to(view(f"node {process}")).number for process in range(9)]
    assert sorted(each) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_process_without_a_shard_goes_to_another_one_when_its_own_is_lost(local_cluster, union, elsewhere):
    coordinator, view = union()
    shards = view("d")
    first = buffer_to_write_to(shards)
    die(coordinator, first.number)
    first.ending = ReplayLost("nobody draws what this writer writes")
    local_cluster.failures = dict.fromkeys(NODES, MemoryError("too little memory is left"))
    others = {0, 1, 2} - {first.number}
    assert buffer_to_write_to(shards).number in others
    assert set(coordinator.table().entries) == others  # everyone has heard of it


def test_a_shard_that_goes_before_it_is_reached_is_left_out(union, elsewhere, monkeypatch):
    coordinator, view = union()
    tried = []

    def connect(shard):
        tried.append(shard.number)
        if len(tried) == 1:
            die(coordinator, shard.number)
            raise tr.AttachError("the node is gone, and its memory with it")

    monkeypatch.setattr(elsewhere, "connect", connect)
    assert buffer_to_write_to(view("d")).number == tried[1] != tried[0]
    assert tried[0] not in coordinator.table().entries


def test_a_shard_that_cannot_be_reached_and_answers_is_an_error(union, elsewhere, monkeypatch):
    def connect(shard):
        raise tr.AttachError("the node is gone, and its memory with it")

    monkeypatch.setattr(elsewhere, "connect", connect)
    _, view = union(nodes=["a"])
    with pytest.raises(tr.AttachError, match="the node is gone"):
        buffer_to_write_to(view("d"))


def test_a_stopped_buffer_is_told_from_a_lost_shard_by_who_writes_to_another_node(union, elsewhere):
    coordinator, view = union()
    shards = view("d")
    shard = buffer_to_write_to(shards)
    assert not shards.stopped
    shard.ending = ReplayLost("its node is gone")
    assert not shards.stopped
    shard.ending = tr.Stopped("the replay buffer was stopped")
    assert shards.stopped
    coordinator.stop()
    with pytest.raises(tr.Stopped):
        buffer_to_write_to(shards)


def test_where_no_node_is_left_nobody_can_write(local_cluster, union, elsewhere):
    coordinator, view = union()
    shards = view("d")
    for number, node in enumerate(NODES):
        del local_cluster.alive[node]
        coordinator.lost(number, 0, 0, "its node is gone")
    with pytest.raises(RuntimeError, match="no node of the ShardedReplay is alive"):
        buffer_to_write_to(shards)


def test_after_a_loss_writers_are_expected_for_a_while(union):
    coordinator, view = union()
    assert not view("a").table.expected
    coordinator.lost(1, 0, 0, "killed")
    assert view("a").table.expected


# Where explorers run.


@pytest.mark.parametrize(("reserves", "expected"), [({}, [3, 3, 3]), ({"CPU": 0}, [3, 3, 3]), ({"CPU": 1}, [1, 6, 2])])
def test_explorers_go_where_there_is_room_for_what_they_reserve(local_cluster, union, caplog, reserves, expected):
    local_cluster.alive = {"a": {"CPU": 1.0}, "b": {"CPU": 14.0}, "c": {"CPU": 2.0}}
    _, view = union()
    place = OverShards([SimpleNamespace(_shards=view("a"))], reserves)
    nodes = [place(index) for index in range(9)]
    assert [nodes.count(node) for node in NODES] == expected
    assert nodes[:3] == NODES
    assert [place(index) for index in range(9)] == nodes
    assert not caplog.text


def test_explorers_of_buffers_that_share_no_node_go_where_the_first_one_has_shards(union):
    _, view = union(nodes=["a", "b"])
    first = SimpleNamespace(_shards=view("a"))
    _, view = union(nodes=["c"])
    second = SimpleNamespace(_shards=view("a"))
    place = OverShards([first, second])
    assert [place(index) for index in range(4)] == ["a", "b", "a", "b"]


def test_explorers_that_find_no_room_are_told_of(local_cluster, union, caplog):
    _, view = union()
    place = OverShards([SimpleNamespace(_shards=view("a"))], {"CPU": 0.5, "GPU": 0})
    assert [place(index) for index in range(12)].count("a") == 4
    assert not caplog.text
    assert place(12) in NODES
    assert "room for 12 explorers" in caplog.text
    with pytest.raises(RuntimeError, match=r"has what each explorer reserves, \{'CPU': 0.5, 'GPU': 1\}"):
        OverShards(place.replays, {"CPU": 0.5, "GPU": 1})(0)
