"""Waits of a queue end in words: what is waited for, in numbers, and by whose doing, by process."""

import signal
import threading

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr
from torchreplay.segment.process_state import state_of

SPEC = {"x": tr.Field((), "int64")}
FLAG = tr.Field((), torch.bool)
STEPS = {"obs": tr.Field((), "int64"), "reward": tr.Field(), "terminated": FLAG, "truncated": FLAG}


def queue(capacity=20, items=0, **fifo):
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=tr.Fifo(**fifo))
    if items:
        buffer.extend(x=np.arange(items))
    return buffer


def hold(buffer, number, holds):
    with buffer.claim(number):
        holds[0] = 1
        signal.pause()


def begin_episode(buffer, begun):
    writer = buffer.writer()
    writer.reset(obs=0)
    begun[0] = 1
    signal.pause()


def stop(process):
    process.signal(signal.SIGSTOP)
    eventually(lambda: state_of(process.pid) == "T")


def impatient(buffer, seconds=0.2):
    writer = buffer.writer()
    writer.timeout = seconds
    return writer


@pytest.mark.parametrize("stopped", [False, True])
def test_a_writer_without_room_names_who_holds_the_items_and_whether_that_one_is_stopped(stopped):
    holds = shared_counters(1)
    with queue(items=20) as buffer, Forked(hold, buffer, 12, holds) as holder:
        eventually(lambda: holds[0])
        if stopped:
            stop(holder)
        writer = impatient(buffer)
        with pytest.raises(tr.ReplayTimeout) as caught:
            writer.append(x=20)
        how = f", which is stopped (continue it with `kill -CONT {holder.pid}`)" if stopped else ""
        assert str(caught.value) == (
            f"append() found no room within 0.2 s: the queue is full: 8 items wait to be drawn; 12 are held: 12 by "
            f"process {holder.pid}{how}; capacity: 20 rows; learners alive: 1"
        )
        if stopped:
            holder.signal(signal.SIGCONT)
        holder.kill()
        assert len(buffer.sample(5)["x"]) == 5
        buffer.commit()
        assert writer.append(x=20) == 20  # the call can be repeated


def test_a_writer_without_room_says_how_many_items_wait_for_a_learner():
    with queue(items=20) as buffer:
        over = threading.Event()
        other = threading.Thread(target=over.wait)  # which could draw, for all that is known
        other.start()
        with pytest.raises(
            tr.ReplayTimeout, match=r"20 items wait to be drawn; 0 are held; capacity: 20 rows; learners"
        ):
            impatient(buffer).append(x=20)
        over.set()
        other.join()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_writer_behind_an_unfinished_episode_names_its_writer(stopped):
    begun = shared_counters(1)
    buffer = tr.ReplayBuffer(STEPS, 20, view=tr.Transitions(), sampler=tr.Fifo(commit="manual", window=1.0))
    with buffer, Forked(begin_episode, buffer, begun) as other:
        eventually(lambda: begun[0])
        if stopped:
            stop(other)
        writer = impatient(buffer)
        writer.reset(obs=0)
        for _ in range(18):
            writer.step(obs=0, reward=1.0, terminated=False, truncated=False)
        assert len(buffer.sample(18)["obs"]) == 18
        buffer.commit()
        how = rf", which is stopped \(continue it with `kill -CONT {other.pid}`\)" if stopped else ""
        kept = f"an unfinished episode of process {other.pid}{how} keeps the oldest row"
        with pytest.raises(tr.ReplayTimeout, match=f"0 items wait to be drawn; 0 are held; {kept}; capacity: 20"):
            writer.step(obs=0, reward=1.0, terminated=False, truncated=False)
        with pytest.raises(tr.ReplayTimeout, match=f"0 can be drawn.*; {kept}") as caught:
            buffer.sample(1, timeout=0.2)
        assert (f"of the writers: process {other.pid}, which is stopped" in str(caught.value)) == stopped


def test_a_long_wait_of_a_writer_is_logged_with_the_same_words(monkeypatch, caplog):
    monkeypatch.setattr("torchreplay.segment.waits.LOG_EVERY", 0.1)
    holds = shared_counters(1)
    with queue(items=20) as buffer, Forked(hold, buffer, 12, holds) as holder:
        eventually(lambda: holds[0])
        stop(holder)
        with pytest.raises(tr.ReplayTimeout):
            impatient(buffer, 0.5).append(x=20)
        assert "waiting for room in the queue since 0 s: the queue is full: 8 items wait to be drawn" in caplog.text
        assert f"12 by process {holder.pid}, which is stopped" in caplog.text


@pytest.mark.parametrize("prefetch", [None, 0, 2])
def test_a_learner_without_items_names_who_holds_them_and_who_is_stopped(prefetch):
    holds, written = shared_counters(1), shared_counters(1)

    def write():
        with buffer.writer() as writer:
            writer.append(x=10)
            written[0] = 1
            signal.pause()

    def draw():
        if prefetch is None:
            buffer.sample(5, timeout=0.3)
        else:
            next(iter(tr.ReplayDataset(buffer, 5, prefetch=prefetch, timeout=0.3)))

    with queue(items=10) as buffer, Forked(hold, buffer, 8, holds) as holder, Forked(write) as writer:
        eventually(lambda: holds[0] and written[0])
        stop(holder)
        stop(writer)
        with pytest.raises(tr.ReplayTimeout) as caught:
            draw()
        text = str(caught.value)
        assert "11 items were inserted" in text
        assert "3 can be drawn; writers alive: 2" in text
        assert (
            f"; held: 8 by process {holder.pid}, which is stopped (continue it with `kill -CONT {holder.pid}`)" in text
        )
        assert f"; of the writers: process {writer.pid}, which is stopped (continue it with" in text


def test_what_this_process_holds_itself_is_called_so():
    held = pytest.raises(tr.ReplayTimeout, match=r"; held: 6 by this process$")
    with queue(items=10) as buffer, buffer.expect_writers(), buffer.claim(6), held:
        buffer.sample(5, timeout=0.1)


def test_a_learner_that_waits_within_its_own_claim_is_told_that_nobody_else_could_make_room():
    with queue(20, items=20) as buffer:

        def write():
            with buffer.writer() as writer:
                while True:
                    writer.append(x=1)

        def learn():  # in a process of one thread: where there are others, they may be done with a batch
            with buffer.claim(15):
                eventually(lambda: buffer._segment.queue_state(False)["waiting"] == 1)
                with pytest.raises(tr.WouldBlockForever, match=r"10 items are asked for, 5 can be drawn.*holds 15"):
                    buffer.sample(10)

        with Forked(write) as writer, Forked(learn) as learner:
            assert learner.wait() == 0
            writer.kill()


def test_a_timeout_is_a_number_or_none_as_soon_as_it_is_given():
    with queue() as buffer, buffer.writer() as writer:
        for bad in (-1, float("nan"), True, "soon"):
            with pytest.raises(ValueError, match="timeout"):
                writer.timeout = bad
        assert writer.timeout is None


def steps_of(writer, number):
    for _ in range(number):
        writer.step(obs=0, reward=1.0, terminated=False, truncated=False)


@pytest.mark.parametrize("first", ["its own", "another's"])
def test_a_reset_does_not_wait_for_the_unfinished_episode_that_it_drops(first):
    """Sequences of five steps: none is complete when two writers have filled the queue."""
    buffer = tr.ReplayBuffer(STEPS, 8, view=tr.Sequences(5), sampler=tr.Fifo())
    with buffer, impatient(buffer) as writer, impatient(buffer) as other:
        for each in (writer, other) if first == "its own" else (other, writer):
            each.reset(obs=0)
            steps_of(each, 3)
        writer.reset(obs=1)
        steps_of(writer, 3)
        with pytest.raises(tr.WouldBlockForever, match="unfinished episodes of 2 environments"):
            steps_of(writer, 1)


def test_a_reset_that_fails_for_want_of_room_has_dropped_its_episode():
    buffer = tr.ReplayBuffer(STEPS, 8, view=tr.Transitions(), sampler=tr.Fifo(commit="manual"))
    with buffer, impatient(buffer) as writer:
        writer.reset(obs=0)
        steps_of(writer, 7)
        buffer.sample(6)
        with pytest.raises(tr.WouldBlockForever, match="1 items wait to be drawn; 6 are held"):
            writer.reset(obs=1)
        with pytest.raises(ValueError, match=r"it had dropped the episode: call writer.reset\(obs=obs\) before"):
            steps_of(writer, 1)
        buffer.commit()
        writer.reset(obs=1)
        steps_of(writer, 1)
        assert buffer.sample(2)["obs"].tolist() == [0, 1]
