"""Batches that a thread makes while the learner computes: the same ones, in the same order, with the same errors."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import Forked, eventually
from local_shards import LocalShards

import torchreplay as tr
from torchreplay.buffer.base import StreamSpec
from torchreplay.schema.config import Config
from torchreplay.segment.waits import MEANWHILE, Wait

pytest.importorskip("ray")
from torchreplay.ray.runtime.errands import Errands
from torchreplay.ray.sharded import sharded_sampler
from torchreplay.ray.sharded.rate_limiter import LearnerLimiter, Rule
from torchreplay.ray.sharded.reply_collector import ReplyCollector
from torchreplay.ray.sharded.sharded_sampler import SampleRequestStream, ShardedSampler

SECONDS = 60
THREAD = "torchreplay-batches"
pytestmark = pytest.mark.timeout(120)


class Shards(LocalShards):
    """Two shards in this process. `go_on`, once cleared, holds their answers back."""

    stopped, called = False, "the buffer"

    def __init__(self):
        super().__init__([50, 20], tr.Prioritized())
        self.limiter = LearnerLimiter(Rule(tr.MinSize()), 0)
        self.limiter.count_inserted({0: 50, 1: 20})
        names = ReplyCollector(lambda number, why: None, lambda number: f"shard {number}")
        self.calls = SimpleNamespace(
            fetch=list, collect=self.collect, silence=names.silence, are_there=lambda calls: self.go_on.is_set()
        )
        self.local = SimpleNamespace(try_attach=lambda wait: False)
        self.threads, self.go_on = [], threading.Event()
        self.go_on.set()
        self.hear(self.order(dict.fromkeys(range(2), 0)), None)

    def collect(self, calls, wait):
        self.threads.append(threading.current_thread().name)
        while not self.go_on.wait(0.01):
            if wait.expired:
                raise tr.ReplayTimeout("it was closed")
        return calls

    def refresh(self):
        pass


@pytest.fixture
def shards():
    made = Shards()
    yield made
    made.go_on.set()
    made.close()


def stream_of(shards, timeout=SECONDS, n=8, **options):
    config = Config.of({"home": tr.Field((), "int64"), "index": tr.Field((), "int64")}, 10, shards.sampler, None, None)
    sampler = ShardedSampler(shards, config, 7, 1, SimpleNamespace(apply_arrived=lambda: None))
    return SampleRequestStream(sampler, StreamSpec(n, None, 2, timeout, Wait, **options))


@pytest.fixture
def handed_over(monkeypatch):
    monkeypatch.setattr(sharded_sampler, "HAND_OVER", -np.inf)


def threads():
    return [thread.name for thread in threading.enumerate()]


def batches(monkeypatch, hand_over):
    """Forty batches, as soon as the thread has made what it was given; and who heard of their candidates."""
    monkeypatch.setattr(sharded_sampler, "HAND_OVER", hand_over)
    shards = Shards()
    stream, drawn = stream_of(shards, n=64), []
    for k in range(40):
        drawn.append(next(stream))
        if hand_over < 0:
            eventually(lambda: stream.answered == 2)
        keys = shards.keys[k % 2]  # totals that change: now and then a shard has to be asked again
        shards.buffer(k % 2).update_priorities(keys, torch.full((len(keys),), 4.0**k))
    stream.close()
    shards.close()
    return drawn, shards.threads[1:], shards.orders


def test_a_thread_makes_the_batches_that_the_learner_would(monkeypatch):
    here, by, orders = batches(monkeypatch, np.inf)
    assert set(by) == {"MainThread"}
    ahead, by, orders_ahead = batches(monkeypatch, -np.inf)
    assert by.count(THREAD) >= 39
    assert orders == orders_ahead > 2 * 43
    for one, other in zip(here, ahead, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_does_so_for_a_learner_that_takes_its_time(shards):
    stream = stream_of(shards)
    next(stream)
    assert stream.answered == 0
    for _ in range(4):
        time.sleep(2 * sharded_sampler.HAND_OVER)  # as if it computed
        next(stream)
        eventually(lambda: stream.answered == 2)
    stream.close()
    eventually(lambda: THREAD not in threads())


def test_a_learner_makes_what_the_thread_has_not_begun(shards, handed_over):
    stream, go_on = stream_of(shards), threading.Event()
    stream._errands.add(go_on.wait)
    for _ in range(5):
        assert len(next(stream)["key"]) == 8
    assert THREAD not in shards.threads
    assert stream.answered == 0
    go_on.set()
    eventually(lambda: stream.answered == 2)
    stream.close()


def test_no_thread_holds_the_stream_up_once_it_is_closed(shards, handed_over):
    stream = stream_of(shards, timeout=0.2)
    next(stream)
    eventually(lambda: stream.answered == 2)
    shards.go_on.clear()
    for _ in range(2):
        next(stream)  # which were made
    eventually(lambda: shards.threads.count(THREAD) == 3)  # it waits for the fourth one's answers
    with pytest.raises(tr.ReplayTimeout, match=r"no answer from shard 0, shard 1 for 0\.2 s"):
        next(stream)
    stream.close()
    eventually(lambda: THREAD not in threads())
    assert (shards.limiter.items, shards.limiter.sampled) == (24, 24)
    shards.go_on.set()
    for _ in range(3):  # it is used again
        next(stream)
        eventually(lambda: stream.answered == 2)
    stream.close()


def test_nothing_is_written_to_the_place_of_a_batch_that_was_given_up(shards, handed_over):
    places = []

    def place():
        places.append(shards.layout.new_batch(8))
        places[-1]["key"].fill_(-1)
        return places[-1]

    stream = stream_of(shards, staging=SimpleNamespace(place=place))
    next(stream)
    eventually(lambda: stream.answered == 2)
    shards.go_on.clear()
    next(stream)
    next(stream)  # the thread waits for the answers of the fourth one
    fourth = stream._ahead[0]
    fourth.give_up()
    shards.go_on.set()
    eventually(lambda: fourth.is_made)
    assert [batch["key"].eq(-1).all().item() for batch in places[:4]] == [False, False, False, True]
    stream.close()


def test_a_stopped_buffer_hands_out_no_more(shards, handed_over):
    stream = stream_of(shards)
    next(stream)
    eventually(lambda: stream.answered == 2)
    take_in = shards.take_in

    def stopped(answers):
        take_in(answers)
        raise tr.Stopped("the buffer was stopped")

    shards.take_in = stopped
    with pytest.raises(tr.Stopped):
        next(stream)
    stream.close()
    assert shards.limiter.items == 8


def test_what_comes_in_the_way_of_an_answer_is_raised_with_its_batch(shards, handed_over):
    stream = stream_of(shards)
    next(stream)
    eventually(lambda: stream.answered == 2)
    collect, shards.calls.collect = shards.calls.collect, lambda calls, wait: 1 / 0
    next(stream)
    eventually(lambda: stream.answered == 2)
    shards.calls.collect = collect
    next(stream)
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert len(next(stream)["key"]) == 8
    stream.close()


def test_what_the_learner_does_while_it_waits_is_not_the_threads(shards, handed_over):
    called = []
    token = MEANWHILE.set(lambda: called.append(threading.current_thread().name))
    try:
        stream = stream_of(shards)
        shards.collect = lambda calls, wait: calls if wait.slice_ns() else None
        shards.calls.collect = shards.collect
        for _ in range(3):
            next(stream)
            eventually(lambda: stream.answered == 2)
    finally:
        MEANWHILE.reset(token)
    assert THREAD not in called
    stream.close()


def test_errands_are_made_in_their_order_by_a_thread_that_ends():
    errands, made = Errands("errands"), []
    for k in range(200):
        errands.add(lambda k=k: made.append((k, threading.current_thread().name)))
    eventually(lambda: made == [(k, "errands") for k in range(200)])
    eventually(lambda: "errands" not in threads())
    errands.add(lambda: made.append(None))
    eventually(lambda: len(made) == 201)


def test_errands_of_many_threads_are_each_made_once():
    errands, made = Errands("errands"), []
    adding = [
        threading.Thread(target=lambda k=k: [errands.add(lambda i=i: made.append((k, i))) for i in range(500)])
        for k in range(4)
    ]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    eventually(lambda: sorted(made) == [(k, i) for k in range(4) for i in range(500)])
    assert all([i for j, i in made if j == k] == list(range(500)) for k in range(4))


def test_a_forked_child_has_none_of_its_parents_errands():
    errands, made, go_on = Errands("errands"), [], threading.Event()
    errands.add(go_on.wait)
    errands.add(lambda: made.append("parent"))

    def child():
        errands.add(lambda: made.append("child"))
        eventually(lambda: made == ["child"])

    with Forked(child) as forked:
        assert forked.wait(SECONDS) == 0
    go_on.set()
    eventually(lambda: made == ["parent"])
