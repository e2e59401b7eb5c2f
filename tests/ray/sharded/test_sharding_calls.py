"""When a shard counts as lost, and when only an answer of it is; what its writers' keys are."""

import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from forked import eventually

import torchreplay as tr
from torchreplay.schema.config import Config

pytest.importorskip("ray")
from ray import exceptions

from torchreplay.ray.sharded import reply_collector
from torchreplay.ray.sharded.local_shard import Gone, ShardWriter
from torchreplay.ray.sharded.reply_collector import ReplyCollector
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.ray.sharded.shard_keys import KEY_BITS, pack

UNREACHABLE = exceptions.ActorUnavailableError("connection reset", b"0" * 16)
DEAD = exceptions.ActorDiedError()
LOST_ANSWER = exceptions.ObjectLostError("0" * 56, None, "")
TIMED_OUT = exceptions.ObjectFetchTimedOutError("0" * 56, None, "")
PROBE = object()  # the answer to come of a shard that is asked whether it is there
FAILED = exceptions.RayTaskError("stats", "Traceback", ValueError("closed"))


@pytest.fixture
def calls(monkeypatch):
    """Calls whose answers are what they are, or raise it; `calls.lost` are the lost shards, `calls.now` is the time.

    A shard that is asked whether it is there answers with `calls.probed`; `calls.asked` are those that were, and
    `calls.looked` is for how long the answer was waited for.
    """

    def get(answer, timeout=None):
        if answer is PROBE:
            calls.looked.append(timeout)
            answer = calls.probed
        if isinstance(answer, Exception):
            raise answer
        return answer

    calls = ReplyCollector(
        lambda number, why: calls.lost.append(number),
        "shard {}".format,
        lambda number: calls.asked.append(number) or PROBE,
    )
    calls.lost, calls.now, calls.probed, calls.asked, calls.looked = [], 0.0, UNREACHABLE, [], []
    calls._ray = SimpleNamespace(get=get, exceptions=exceptions)
    monkeypatch.setattr(reply_collector, "time", SimpleNamespace(monotonic=lambda: calls.now))
    return calls


def test_a_shard_that_cannot_be_reached_for_a_while_is_not_lost(calls):
    for _ in range(3):
        for _ in range(3):
            assert calls.answer(1, UNREACHABLE) is None
            calls.now += reply_collector.UNREACHABLE_SECONDS / 4
        assert calls.answer(1, "here") == "here"
    assert calls.lost == []
    assert calls.answer(1, UNREACHABLE) is None
    calls.now += reply_collector.UNREACHABLE_SECONDS
    assert calls.answer(2, UNREACHABLE) is None
    assert calls.answer(1, UNREACHABLE) is None
    assert calls.lost == [1]


@pytest.mark.parametrize("answer", ["here", exceptions.GetTimeoutError(), FAILED])
def test_a_shard_that_answers_now_is_not_lost_by_what_was_lost_long_ago(calls, answer):
    calls.probed = answer
    for _ in range(4):
        assert calls.answer(1, UNREACHABLE) is None
        calls.now += reply_collector.UNREACHABLE_SECONDS
    assert calls.lost == []
    calls.probed = DEAD
    for _ in range(2):
        assert calls.answer(1, UNREACHABLE) is None
        calls.now += reply_collector.UNREACHABLE_SECONDS
    assert calls.lost == [1]


def test_a_shard_that_is_asked_whether_it_is_there_is_waited_for_a_second_and_counts_anew(calls):
    calls.probed = exceptions.GetTimeoutError()
    for _ in range(5):
        assert calls.answer(1, UNREACHABLE) is None
        calls.now += reply_collector.UNREACHABLE_SECONDS
    assert calls.asked == [1, 1]
    assert calls.looked == [reply_collector.PROBE_SECONDS] * 2
    assert calls.lost == []


def test_that_a_shard_cannot_be_reached_is_said_now_and_then(calls, caplog):
    for _ in range(1000):
        assert calls.answer(1, UNREACHABLE) is None
        calls.now += 0.02
    assert 2 <= caplog.text.count("shard 1 cannot be reached") <= 3


@pytest.mark.parametrize("error", [LOST_ANSWER, TIMED_OUT])
def test_an_answer_that_is_lost_on_its_way_costs_no_shard(calls, error):
    for _ in range(3):
        assert calls.answer(1, error) is None
        calls.now += reply_collector.UNREACHABLE_SECONDS
    assert calls.lost == []


def test_a_shard_that_is_known_to_be_dead_is_lost_at_once(calls):
    here = Future()
    here.set_exception(Gone("its process is gone"))
    assert calls.answer(1, DEAD) is None
    assert calls.answer(2, here) is None
    assert calls.lost == [1, 2]


def test_a_shard_that_is_asked_again_for_what_it_has_done_does_not_do_it_again(tmp_path):
    shard = Shard(0, Config.of({"x": tr.Field()}, 16, tr.Uniform(), None, None), 0, None)
    shard.open()
    shard._buffer.extend(x=np.arange(5.0))
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    eventually(lambda: shard.save(first))
    shutil.rmtree(first)
    assert shard.save(first)  # the answer before was lost
    assert not (tmp_path / "first").exists()
    eventually(lambda: shard.save(second))
    assert (tmp_path / "second").exists()
    for _ in range(2):  # what failed is tried again
        with pytest.raises(FileNotFoundError, match="does not see"):
            eventually(lambda: shard.save(str(tmp_path / "nowhere" / "third")))
    shard._buffer.close()


def test_keys_are_the_unions_but_for_lanes_that_wrote_nothing():
    flag = tr.Field((), "bool")
    spec = {"obs": tr.Field(), "reward": tr.Field(), "terminated": flag, "truncated": flag}
    zeros, no = np.zeros(3, np.float32), np.zeros(3, bool)
    first = np.array([True, False, False])
    with (
        tr.ReplayBuffer(spec, 100, view=tr.Transitions()) as plain,
        tr.ReplayBuffer(spec, 100, view=tr.Transitions()) as b,
    ):
        writers = plain.writer(3, "disabled"), ShardWriter(b._segment, b._config, pack(5), 3, "disabled")
        for call in (
            lambda writer: writer.reset(obs=zeros),
            lambda writer: writer.step(obs=zeros, reward=zeros, terminated=first, truncated=no),
            lambda writer: writer.reset(obs=zeros, mask=first),
            lambda writer: writer.step(obs=zeros, reward=zeros, terminated=no, truncated=first),
            lambda writer: writer.reset(obs=zeros, mask=no),
        ):
            own, of_union = (np.asarray(call(writer)) for writer in writers)
            assert of_union.tolist() == [key if key < 0 else key + (5 << KEY_BITS) for key in own.tolist()]
        for writer in writers:
            writer.close()
