"""Interruptions of a draw or of feedback in the same thread: a signal handler that saves or draws, as with SLURM;
Ctrl-C; another limiter."""

import gc
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from forked import eventually
from local_shards import LocalShards

import torchreplay as tr
from torchreplay import _C
from torchreplay.buffer.base import StreamSpec
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config
from torchreplay.segment.waits import Wait

pytest.importorskip("ray")
from torchreplay.ray.sharded import (
    rate_limiter,
    sample_request,
    sample_request_stream,
    sampling_rounds,
    sharded_sampler,
)
from torchreplay.ray.sharded.local_shard import Gone
from torchreplay.ray.sharded.rate_limiter import LearnerLimiter, Rule, Totals
from torchreplay.ray.sharded.reply_collector import ReplyCollector
from torchreplay.ray.sharded.sample_request_stream import SampleRequestStream
from torchreplay.ray.sharded.shard_feedback import ShardFeedback
from torchreplay.ray.sharded.shard_wire import ShardLink, ShardServer
from torchreplay.ray.sharded.sharded_sampler import ShardedSampler

DRAWING = {
    module.__file__
    for module in (rate_limiter, sample_request, sample_request_stream, sampling_rounds, sharded_sampler)
}
KEYS, ERRORS = np.arange(3), np.ones(3)
FEEDBACK = SimpleNamespace(apply_arrived=lambda: None)


@contextmanager
def handler(function):
    """Has SIGUSR1 call a function."""
    before = signal.signal(signal.SIGUSR1, lambda *_: function())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class SlowShard:
    """A shard on the process's own node, and all that `ShardFeedback` knows of it, whose answer comes when it may.

    Attributes:
        waiting: Set when someone waits for the answer.
        dropped: TD errors that were counted as lost.
    """

    def __init__(self, answer):
        self._executor, self._answer = ThreadPoolExecutor(1), answer
        self._calls = ReplyCollector(lambda number, why: None, str)
        self.calls = self.coordinator = self
        self.local = SimpleNamespace(shard=None)
        self.waiting, self.dropped = threading.Event(), []

    def update(self, number, keys, td):
        return self._executor.submit(self._answer)

    def collect(self, calls):
        self.waiting.set()
        return self._calls.collect(calls)

    def tell(self, what, count):
        self.dropped.append(count)

    def close(self):
        self._executor.shutdown()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("lost", [False, True], ids=["an answer", "a lost shard"])
def test_a_handler_that_flushes_waits_for_what_its_own_thread_waits_for(lost):
    handled, answered, seen = threading.Event(), threading.Event(), []

    def answer():
        shard.waiting.wait()
        os.kill(os.getpid(), signal.SIGUSR1)
        handled.wait()
        answered.set()
        if lost:
            raise Gone("its process is gone")
        return len(KEYS)

    def handle():
        handled.set()
        feedback.flush()
        seen.append(answered.is_set())

    shard = SlowShard(answer)
    feedback = ShardFeedback(shard, 1)
    with handler(handle):
        feedback._send(KEYS, ERRORS)
        feedback.flush()
    assert seen == [True]
    assert shard.dropped == [3] * lost  # once
    shard.close()


@pytest.mark.timeout(60)
def test_what_a_shard_raises_is_said_once():
    def fail():
        raise ValueError("the shard says no")

    shard = SlowShard(fail)
    feedback = ShardFeedback(shard, 1)
    feedback._send(KEYS, ERRORS)
    with pytest.raises(ValueError, match="says no"):
        feedback.flush()
    feedback.flush()
    shard.close()


class InterruptedShards(LocalShards):
    """Shards whose learner a signal interrupts: what it knows of all of them."""

    stopped, closed = False, False

    def __init__(self, sizes, sampler):
        super().__init__(sizes, sampler)
        self.limiter = LearnerLimiter(Rule(tr.MinSize()), 0)
        self.limiter.count_inserted(dict(enumerate(sizes)))
        self.hear(self.order(dict.fromkeys(range(len(sizes)), 0)), None)

    def refresh(self):
        pass

    local = SimpleNamespace(try_attach=lambda wait: False, shard=None)


class WiredShards(InterruptedShards):
    """The same shards, all of them on other nodes: the native core asks them over connections.

    Attributes:
        answering: Until this is set, no shard answers, where the native core does not.
        begun: Draws so far, where the native core does not answer.
    """

    def __init__(self, sizes, sampler, is_native=True):
        super().__init__(sizes, sampler)
        self.answering, self.exchange, self.rounds = threading.Event(), _C.Exchange(), 0
        self.answering.set()
        self.begun = []
        self.servers = [
            ShardServer("127.0.0.1", self._drawing(shard), shard.update, shard._native if is_native else None)
            for shard in self.shards
        ]
        self.links = [ShardLink(server.address, self.exchange) for server in self.servers]
        links = [(number, link.native) for number, link in enumerate(self.links)]
        self.union_now = _C.UnionShards(self.exchange, links, None, 1.0, None)

    def _drawing(self, shard):
        def draw(n, largest):
            self.answering.wait()
            self.begun.append(n)
            return shard.draw(n, largest)

        return draw

    def union(self, layout):
        return self.union_now

    def take_in_union(self, union, draw):
        return union.take_in(draw)[0]

    def close(self):
        self.answering.set()
        for link in self.links:
            link.close()
        for server in self.servers:
            server.close()
        super().close()


def sampler_over(shards):
    config = Config.of({"index": tr.Field()}, 10, shards.sampler, None, None)
    sampler = ShardedSampler(shards, config, 7, 1, FEEDBACK)
    sampler._layout = shards.layout
    return sampler


def stream_of(sampler, timeout):
    """Batches of 8 items, with two rounds ahead."""
    return SampleRequestStream(sampler, FEEDBACK, StreamSpec(8, None, 2, timeout, Wait))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("streamed", [True, False])
def test_while_no_shard_answers_a_draw_keeps_to_its_timeout_and_asks_now_and_then(streamed):
    shards = InterruptedShards([50, 20], tr.Prioritized())
    sampler = sampler_over(shards)
    asked = []
    shards.order = lambda candidates, *_: asked.append(candidates) or {}
    with pytest.raises(tr.ReplayTimeout, match="no shard has answered with items for a batch of 8 in time"):
        next(stream_of(sampler, timeout=0.5)) if streamed else sampler.draw(8, None, Wait(shards, 0.5))
    assert 2 < len(asked) < 200
    assert (shards.limiter.tally.items, sampler.made) == (0, 0)
    shards.close()


def test_ctrl_c_while_rounds_ahead_are_fetched_leaves_none_counted_as_drawn():
    shards = InterruptedShards([50, 20], tr.Uniform())
    sampler = sampler_over(shards)
    fetched = []

    def fetch(calls):
        fetched.append(list(calls))
        if len(fetched) == 3:
            raise KeyboardInterrupt

    shards.calls.fetch = fetch
    stream = stream_of(sampler, timeout=10)
    for _ in range(2):
        assert len(next(stream)["key"]) == 8
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert len(next(stream)["key"]) == 8
    stream.close()
    limiter = shards.limiter
    assert (limiter.tally.items, limiter.sampled - limiter.tally.items, limiter.sampled) == (24, 0, 24)
    assert sampler.made == 3
    shards.close()


class Interruption:
    """Runs a signal's handler at one call, or return, of the modules that draw."""

    def __init__(self, at, handle):
        self.left, self.handle = at, handle

    def __call__(self, frame, event, argument):
        self.left -= frame.f_code.co_filename in DRAWING
        if not self.left:
            sys.setprofile(None)
            self.handle()


def interrupt():
    raise KeyboardInterrupt


def reaches(call, at, handle=interrupt):
    """Makes a call, amid which a handler runs at its event of that number; returns whether it has so many."""
    interruption = Interruption(at, handle)
    sys.setprofile(interruption)
    with suppress(KeyboardInterrupt):  # one that comes while something is freed is lost
        call()
    sys.setprofile(None)
    return interruption.left <= 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("made", [InterruptedShards, WiredShards], ids=["called", "wired"])
def test_a_handler_that_draws_in_the_midst_of_a_draw_gets_a_batch_and_no_step_is_used_twice(made):
    shards = made([50, 20], tr.Prioritized())
    sampler = sampler_over(shards)
    steps, begin = [], sampler.begin

    def watched(*given, **options):
        steps.append((ordered := begin(*given, **options)).round.step)
        return ordered

    sampler.begin = watched
    drawn, at = [], 1

    def draw():
        drawn.append(sampler.draw(8, None, Wait(shards, 10)))

    while reaches(draw, at, handle=draw):
        at += 1
    assert at > 30
    assert len(drawn) == 2 * at - 1
    assert all(isinstance(batch, ReplayBatch) and len(batch["key"]) == 8 for batch in drawn)
    assert sampler.made == shards.limiter.tally.batches == len(drawn)
    assert sorted(steps) == list(range(len(drawn)))
    assert (shards.limiter.tally.items, shards.limiter.sampled - shards.limiter.tally.items) == (8 * len(drawn), 0)
    shards.close()


def test_an_exception_of_a_handler_leaves_no_lease_without_its_end():
    at, is_left = 1, True
    while is_left:
        limiter = LearnerLimiter(Rule(tr.MinSize()), 0)
        limiter.count_inserted({0: 100})
        assert limiter.admits(8)  # for as long as this limiter is kept to
        limiter.change(limiter.rule.followed_by(tr.SamplesPerInsert(2.0, 10), 100))
        late = Totals(1, limiter.rule.number, lease=64, until=time.monotonic() - 1)
        is_left = reaches(lambda: limiter.hear(late), at)  # noqa: B023 - it is called at once
        assert not limiter.covers(1)
        at += 1
    assert at > 4


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("prefetch", [None, 0, 2])
@pytest.mark.parametrize(
    "made", [InterruptedShards, WiredShards, lambda sizes, sampler: WiredShards(sizes[:1], sampler)],
    ids=["called", "wired", "the only one, wired"],
)  # fmt: skip
def test_an_exception_of_a_handler_at_any_call_leaves_no_round_under_way(prefetch, made):
    shards = made([50, 20], tr.Uniform())
    sampler = sampler_over(shards)
    at = 1

    def call():
        if prefetch is None:
            sampler.draw(8, None, Wait(shards, 10))
        else:
            stream = SampleRequestStream(sampler, FEEDBACK, StreamSpec(8, None, prefetch, 10, Wait))
            next(stream)
            stream.close()

    while reaches(call, at):
        at += 1
        gc.collect()
        assert (sampler._steps.under_way, shards.limiter.sampled - shards.limiter.tally.items) == (0, 0)
    assert at > 30
    assert sampler.made == shards.limiter.tally.batches
    shards.close()


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("sizes", [[50], [50, 20]])
def test_a_stream_goes_on_after_an_exception_of_a_handler_at_any_call(sizes):
    shards = WiredShards(sizes, tr.Uniform())
    sampler = sampler_over(shards)
    stream, at = stream_of(sampler, timeout=10), 1
    while reaches(lambda: next(stream), at):
        at += 1
        batch = next(stream)
        assert (batch["key"] == (batch["home"] << 48) + batch["index"]).all()
        assert len(batch["key"]) == 8
    assert at > 30
    stream.close()
    gc.collect()
    assert (sampler._steps.under_way, shards.limiter.sampled - shards.limiter.tally.items) == (0, 0)
    assert sampler.made == shards.limiter.tally.batches
    shards.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sizes", [[50], [50, 20]])
def test_a_round_that_is_late_stays_under_way_and_a_stream_that_a_handler_closes_asks_anew(sizes):
    shards = WiredShards(sizes, tr.Uniform(), is_native=False)
    sampler = sampler_over(shards)
    sampler.draw(8, None, Wait(shards, 60))  # the first one takes long
    stream = stream_of(sampler, timeout=2)
    assert len(next(stream)["key"]) == 8
    eventually(lambda: len(shards.begun) == 4 * len(sizes))  # those two that are under way, too
    shards.answering.clear()
    for _ in range(2):
        next(stream)
    for _ in range(2):
        with pytest.raises(tr.ReplayTimeout):
            next(stream)
        assert sampler._steps.under_way == 3
    shards.answering.set()
    assert len(next(stream)["key"]) == 8
    assert sampler.made == 5
    shards.answering.clear()

    def close():
        stream.close()
        shards.answering.set()

    stream = stream_of(sampler, timeout=None)
    with handler(close):
        late = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        late.start()
        assert len(next(stream)["key"]) == 8
        late.join()
    stream.close()
    assert sampler._steps.under_way == 0
    shards.close()


def test_a_batch_that_is_under_way_comes_though_the_limiter_admits_no_more():
    shards = InterruptedShards([50, 20], tr.Uniform())
    sampler = sampler_over(shards)
    looks = []

    def refresh():
        looks.append(None)
        if len(looks) == 3:  # the first round is ordered
            shards.limiter.change(Rule(tr.MinSize(1000), 1))

    shards.refresh = refresh
    stream = stream_of(sampler, timeout=0.0)
    assert len(next(stream)["key"]) == 8
    assert len(looks) == 3
    stream.close()
    shards.close()
