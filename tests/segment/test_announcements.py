"""Announcements that writers will come to a sharded buffer: they last as long as who made them."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from forked import eventually

import torchreplay as tr
from torchreplay.ray import ShardedReplay
from torchreplay.ray.sharded import coordinator as coordinator_module
from torchreplay.ray.sharded import writing
from torchreplay.ray.sharded.coordinator import BELIEF, Coordinator
from torchreplay.ray.sharded.writing import Expectation
from torchreplay.schema.config import Config

STARTUP = 150.0  # seconds: processes that import torch on a machine that is busy with other things
SHARED = {name: tr.Field((), torch.int64) for name in ("explorer", "seed", "count")}


@pytest.mark.soak
def test_an_announcement_of_writers_ends_with_the_process_that_made_it(cluster):
    class Announcer:
        def __init__(self, replay):
            self.expectation = replay.expect_writers()

        def pid(self):
            return os.getpid()

    with ShardedReplay(SHARED, 100, nodes=cluster.node_ids[:1]) as replay:
        announcer = cluster.ray.remote(Announcer).options(**cluster.on(1)).remote(replay)
        pid = cluster.ray.get(announcer.pid.remote())
        with pytest.raises(tr.ReplayTimeout):
            replay.sample(1, timeout=BELIEF * 1.5)  # it is repeated
        assert replay._shards.look().expected
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not replay._shards.look().expected)
        kept = replay.expect_writers()
        assert replay._shards.look().expected
        kept.close()
        kept.close()
        assert not replay._shards.look().expected


def test_announcements_are_believed_for_a_while_and_each_by_itself(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(coordinator_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    coordinator = Coordinator(Config.of(SHARED, 10, None, None, None), [], [], False, 0)
    assert not coordinator.table().expected
    coordinator.expect("one", True)
    clock.now += BELIEF / 2
    coordinator.expect("two", True)
    clock.now += BELIEF / 2 + 1
    assert coordinator.table().expected  # the second one
    coordinator.expect("two", False)
    assert not coordinator.table().expected
    coordinator.expect("one", True)
    assert coordinator.table().expected
    clock.now += BELIEF + 1
    assert not coordinator.table().expected


def test_an_announcement_is_repeated_until_it_is_closed(monkeypatch):
    monkeypatch.setattr(writing, "REPEAT", 0.001)
    said = []

    def ask(what, token, expecting):
        said.append((token, expecting))

    shards = SimpleNamespace(connected=True, ask=ask, ask_once=ask)
    with Expectation(shards):
        eventually(lambda: len(said) > 5)
    assert [expecting for _, expecting in said[-3:]] == [True, True, False]
    assert len({token for token, _ in said}) == 1
    count = len(said)
    eventually(lambda: not any(thread.name == "torchreplay-expectation" for thread in threading.enumerate()))
    assert len(said) == count
