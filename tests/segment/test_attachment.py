"""Attaching the shard on a process's own node, whose actor may be silent, gone or another by the time it answers."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import torchreplay as tr
from torchreplay.schema.config import Config

pytest.importorskip("ray")
from torchreplay.ray.sharded.coordinator import Place
from torchreplay.ray.sharded.local_shard import LocalAttachment
from torchreplay.ray.sharded.shard_actor import Shard


@contextmanager
def shards(*numbers):
    """Shards of this process, by number."""
    config = Config.of({"x": tr.Field()}, 16, tr.Uniform(), None, None)
    opened = {number: Shard(number, config, number, None) for number in numbers}
    for shard in opened.values():
        shard.open()
    try:
        yield opened
    finally:
        for shard in opened.values():
            shard._buffer.close()


class Node:
    """What an attachment knows of the node: the shard on it, whose handle comes when `answer` returns it.

    Attributes:
        number: Of the shard on the node; None: there is none.
        asked: Set when someone waits for a handle.
    """

    def __init__(self, number, answer):
        self.number, self.asked, self.lock = number, threading.Event(), threading.RLock()
        self._answer = answer
        self.attachment = LocalAttachment(self.lock, self._place, self._handle)

    def _place(self):
        return None if self.number is None else Place(self.number, "here", 16, None)  # each table has its own

    def _handle(self, place, wait):
        self.asked.set()
        return self._answer(place.number)


def locked(node):
    """Whether a thread that has nothing to do with the attachment gets the lock."""

    def try_it():
        got = node.lock.acquire(timeout=10)
        if got:
            node.lock.release()
        return got

    with ThreadPoolExecutor(1) as other:
        return not other.submit(try_it).result()


def test_nobody_waits_for_the_handle_but_who_asks_for_it():
    answered = threading.Event()
    with shards(3) as opened, ThreadPoolExecutor(1) as learner:
        node = Node(3, lambda number: answered.wait() and opened[number].handle())
        attached = learner.submit(node.attachment.attach, None)
        try:
            assert node.asked.wait(60)
            assert not locked(node)
            assert node.attachment.shard is None
        finally:
            answered.set()
        assert attached.result().number == 3
        node.attachment.release()


def test_of_two_threads_that_ask_at_a_time_one_attaches():
    both = threading.Barrier(2)
    with shards(0) as opened, ThreadPoolExecutor(2) as learners:
        node = Node(0, lambda number: both.wait(60) >= 0 and opened[number].handle())
        one, other = [future.result() for future in [learners.submit(node.attachment.attach, None) for _ in "12"]]
        assert one is other is node.attachment.shard
        assert node.attachment.attach(None) is one  # and asks nobody: the barrier would break
        node.attachment.release()


def test_a_shard_that_another_has_replaced_meanwhile_is_not_attached():
    with shards(0, 1) as opened:

        def answer(number):
            node.number = 1
            return opened[number].handle()

        node = Node(0, answer)
        assert node.attachment.attach(None).number == 1
        node.attachment.release()


@pytest.mark.parametrize("handle", [True, False])
def test_a_shard_that_is_lost_meanwhile_is_not_attached(handle):
    with shards(0) as opened:

        def answer(number):
            node.number = None
            return opened[number].handle() if handle else None

        node = Node(0, answer)
        assert node.attachment.attach(None) is None
        assert not node.attachment.draws(None)


def test_another_shard_takes_the_place_of_the_one_attached():
    with shards(0, 1) as opened:
        node = Node(0, lambda number: opened[number].handle())
        first = node.attachment.attach(None)
        node.number = 1
        assert node.attachment.attach(None).number == 1
        with pytest.raises(RuntimeError, match="closed"):
            len(first.buffer)
        node.attachment.release()


def test_one_that_cannot_be_attached_is_asked_twice_and_then_no_more(caplog):
    asked = []
    with shards(0) as opened:
        stale = opened[0].handle()

        def answer(number):
            asked.append(number)
            return stale

        opened[0]._buffer.close()
        node = Node(0, answer)
        with pytest.raises(tr.AttachError):
            node.attachment.attach(None)
        assert asked == [0, 0]
        with caplog.at_level(logging.WARNING, "torchreplay.ray"):
            assert [node.attachment.draws(None) for _ in range(3)] == [False] * 3
        assert asked == [0] * 4
        assert len(caplog.records) == 1
        assert "draws from it go through Ray" in caplog.text
