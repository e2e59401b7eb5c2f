"""A mixture whose explorers write to several of its buffers: nobody waits for ever, and nobody else is let go on."""

import contextlib
import itertools
import logging
import threading

import pytest
from forked import Forked, eventually
from limited_buffers import buffer_with, writers_that_wait
from mixed_buffers import take

import torchreplay as tr
from torchreplay.loading import limiter_deadlock
from torchreplay.segment.waits import Wait

HELD_BACK_AT = 30
"""Items at which writers under `limiter()` wait for the first draw."""


def limiter():
    return tr.SamplesPerInsert(1.0, min_size=20, tolerance=0.5)


@pytest.fixture
def pair():
    buffers = buffer_with(limiter(), 8000), buffer_with(tr.MinSize(3000), 8000)
    yield buffers
    for buffer in buffers:
        buffer.close()


def write_in_turn(*buffers):
    """An explorer: one row to each of the buffers, and so on."""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(buffer.writer()) for buffer in buffers]
        for writer in itertools.cycle(writers):
            writer.append(x=1)


@contextlib.contextmanager
def stopped_at_the_end(*buffers):
    try:
        yield
    finally:
        for buffer in buffers:
            buffer.stop()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("form", ["shares", "names"])
def test_an_explorer_held_back_at_one_buffer_fills_the_other_that_the_learner_waits_for(pair, form, order, prefetch):
    named = {"shares": dict.fromkeys(pair[i] for i in order), "names": {str(i): pair[i] for i in order}}[form]
    given = named if form == "names" else dict.fromkeys(named, 1)
    dataset = tr.MixedDataset(given, 8, prefetch=prefetch, timeout=60)
    with Forked(write_in_turn, *pair):
        assert len(take(dataset, 5)) == 5
        # What comes after the wait is held back again.
        eventually(lambda: writers_that_wait(pair[0]) == 1)
        inserted = pair[0].stats().inserted
    assert 3000 <= inserted < 3000 + 2 * limiter_deadlock.ADMITTED


def test_two_limiters_that_contradict_each_other_let_the_learner_go_on():
    # The first one wants 16 rows for 16 draws, the second 160: an explorer that writes to both in turn writes 160.
    pair = buffer_with(limiter(), 8000), buffer_with(tr.SamplesPerInsert(0.1, min_size=20, tolerance=0.5), 8000)
    with Forked(write_in_turn, *pair):
        assert len(take(tr.MixedDataset(dict.fromkeys(pair, 1), 32, timeout=60), 5)) == 5


def test_explorers_of_their_own_are_held_back_however_long_the_learner_waits_for_others(pair):
    pair[1].handle()  # somebody may write to it
    dataset = tr.MixedDataset(dict.fromkeys(pair, 1), 8, timeout=0.5)
    with Forked(write_in_turn, pair[0]), Forked(write_in_turn, pair[1], buffer_with(tr.MinSize(1))):
        pair[1].limiter = tr.MinSize(1 << 40)
        eventually(lambda: writers_that_wait(pair[0]) == 1)
        with pytest.raises(tr.ReplayTimeout, match="no batch within"):
            next(iter(dataset))
    assert pair[0].stats().inserted <= HELD_BACK_AT + 3 * 4 + 1  # and what the batches drawn ahead admit


def test_what_was_admitted_is_withdrawn_when_the_wait_ends(pair, monkeypatch):
    monkeypatch.setattr(limiter_deadlock, "ADMITTED", 1 << 40)
    pair[1].limiter = tr.MinSize(1 << 40)
    dataset = tr.MixedDataset(dict.fromkeys(pair, 1), 8, timeout=0.5, prefetch=0)
    with Forked(write_in_turn, *pair):
        with pytest.raises(tr.ReplayTimeout):
            next(iter(dataset))
        assert pair[0].stats().inserted > 2 * HELD_BACK_AT
        eventually(lambda: writers_that_wait(pair[0]) == 1)


def test_writers_of_two_threads_are_held_back_and_a_long_wait_beside_them_is_logged(pair, monkeypatch, caplog):
    monkeypatch.setattr(limiter_deadlock, "LOG_EVERY", 0.2)
    dataset = tr.MixedDataset({"a": pair[0], "b": pair[1]}, 8, timeout=1.0)

    def explore(buffer, rows):
        with buffer.writer() as writer, contextlib.suppress(tr.Stopped):
            for _ in range(rows):
                writer.append(x=1)
            over.wait()

    over = threading.Event()
    threads = [threading.Thread(target=explore, args=args) for args in ((pair[0], 1000), (pair[1], 10))]
    with stopped_at_the_end(*pair):
        for thread in threads:
            thread.start()
        eventually(lambda: writers_that_wait(pair[0]) == 1)
        with caplog.at_level(logging.WARNING, "torchreplay"), pytest.raises(tr.ReplayTimeout):
            next(iter(dataset))
    over.set()
    for thread in threads:
        thread.join()
    assert any(
        "waiting for buffer 'b'" in message and "1 writers wait at buffer 'a'" in message for message in caplog.messages
    )


def test_a_buffer_that_is_closed_beside_the_awaited_one_does_not_end_the_wait(pair, monkeypatch):
    monkeypatch.setattr(limiter_deadlock, "GRACE", 0.0)
    with limiter_deadlock.LimiterDeadlockGuard("b", pair[1], [("a", pair[0])]), Forked(write_in_turn, *pair):
        eventually(lambda: writers_that_wait(pair[0]) == 1)
        wait = Wait(pair[1]._segment, None)
        wait.slice_ns()  # which admits items that are to be withdrawn
        pair[0].close()
        wait.slice_ns()
