"""Attaching the shard on a process's own node, which may be gone, or another one by now."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import torchreplay as tr
from torchreplay.schema.config import Config

pytest.importorskip("ray")
from torchreplay.ray.sharded.local_shard import LocalAttachment
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.ray.sharded.shard_table import ShardEntry


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
    """What an attachment knows of the node: the shard on it, and whether that one's actor answers.

    Attributes:
        number: Of the shard on the node; None: there is none.
        alive: Whether its actor answers; to be changed.
        asked: The shards that were asked whether they do.
    """

    def __init__(self, number, opened):
        self.number, self.alive, self.asked, self.lock = number, True, [], threading.RLock()
        self._handles = {number: shard._buffer.handle() for number, shard in opened.items()}
        self.attachment = LocalAttachment(self.lock, self._place, self._answers)

    def _place(self):
        if self.number is None:
            return None
        return ShardEntry(self.number, "here", 16, None, self._handles[self.number])  # each table has its own

    def _answers(self, number, wait):
        assert not locked(self)  # nobody else waits for the answer
        self.asked.append(number)
        return self.alive


def locked(node):
    """Whether a thread that has nothing to do with the attachment is kept from the lock."""

    def try_it():
        got = node.lock.acquire(timeout=10)
        if got:
            node.lock.release()
        return got

    with ThreadPoolExecutor(1) as other:
        return not other.submit(try_it).result()


def test_of_two_threads_that_ask_at_a_time_one_attaches():
    both = threading.Barrier(2)
    with shards(0) as opened, ThreadPoolExecutor(2) as learners:
        node = Node(0, opened)

        def attach():
            both.wait(60)
            return node.attachment.attach()

        one, other = [future.result() for future in [learners.submit(attach) for _ in "12"]]
        assert one is other is node.attachment.shard
        assert node.attachment.attach() is one
        assert node.asked == []
        node.attachment.release()


def test_where_there_is_none_nothing_is_attached():
    node = Node(None, {})
    assert node.attachment.attach() is None
    assert not node.attachment.try_attach()


def test_another_shard_takes_the_place_of_the_one_attached():
    with shards(0, 1) as opened:
        node = Node(0, opened)
        first = node.attachment.attach()
        node.number = 1
        assert node.attachment.attach().number == 1
        with pytest.raises(RuntimeError, match="closed"):
            len(first.buffer)
        node.attachment.release()


def test_a_shard_that_is_gone_is_not_attached(caplog):
    with shards(0) as opened:
        node = Node(0, opened)
        opened[0]._buffer.close()
        node.alive = False
        assert node.attachment.attach() is None
        assert not node.attachment.try_attach()
        assert node.asked == [0, 0]
        assert not caplog.records


def test_one_that_is_there_and_cannot_be_attached_is_asked_once_for_draws(caplog):
    with shards(0) as opened:
        node = Node(0, opened)
        opened[0]._buffer.close()
        with pytest.raises(tr.AttachError):
            node.attachment.attach()
        assert node.asked == [0]
        with caplog.at_level(logging.WARNING, "torchreplay.ray"):
            assert [node.attachment.try_attach() for _ in range(3)] == [False] * 3
        assert node.asked == [0] * 2
        assert len(caplog.records) == 1
        assert "draws from it go through Ray" in caplog.text
