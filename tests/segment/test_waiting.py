"""Waits: for how long, what they say, and how every one of them ends."""

import contextlib
import multiprocessing as mp
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from forked import Forked, eventually
from limited_buffers import SPEC, buffer_with, extend, has_waited

import torchreplay as tr
from torchreplay.segment import waits

FLAGS = dict.fromkeys(("terminated", "truncated"), tr.Field((), bool))
EPISODE_SPEC = SPEC | FLAGS | {"reward": tr.Field()}
EPISODE_VIEW = tr.Transitions(observation="x")


@pytest.fixture
def alone(monkeypatch):
    """As in a program of one thread, also if other tests have left threads."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def test_a_draw_that_nobody_can_help_says_so_at_once_with_numbers_and_advice(alone):
    buffer = buffer_with(tr.MinSize(3))
    extend(buffer, 2)
    with pytest.raises(tr.WouldBlockForever) as error:
        buffer.sample(1)
    for part in (
        "2 items were inserted",
        "3 are needed",
        "2 can be drawn",
        "writers alive: 1",
        "s ago",
        "size: 2 rows",
        "Write more",
    ):
        assert part in str(error.value)
    assert buffer.stats().sampled == 0


def test_a_minimum_beyond_the_capacity_is_reached_by_what_was_looked_at_and_the_error_says_so(alone):
    buffer = buffer_with(tr.MinSize(300), capacity=100)
    extend(buffer, 1000)
    unseen = "100 items were inserted, 300 are needed .*; min_size is more than the 100 rows that fit, .* unseen do not"
    with pytest.raises(tr.WouldBlockForever, match=unseen):
        buffer.sample(1)
    buffer.handle()  # somebody else could write
    with Forked(append_in_vain, buffer):
        assert len(buffer.sample(4, timeout=30)["key"]) == 4
    assert buffer.stats().inserted >= 300


def test_rows_that_came_after_the_look_that_led_to_a_wait_end_it_whoever_has_looked_since():
    buffer = buffer_with(tr.MinSize(3))
    segment = buffer._segment
    why, *_, seen = segment.sample(1, 0.4, waits.NEVER, None)
    assert why == "wait"
    extend(buffer, 3)
    other = threading.Thread(target=buffer.sample, args=(1,))
    other.start()
    other.join()
    start = time.monotonic()
    segment.wait_rows(seen, 20_000_000_000)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("timeout", [0, 0.01, 0.2])
def test_a_timeout_ends_a_wait_with_the_numbers(timeout):
    buffer = buffer_with(tr.MinSize(3))
    buffer.handle()  # somebody else could write
    with pytest.raises(tr.ReplayTimeout, match=re.escape(f"no batch within {timeout} s: 0 items were inserted, 3 are")):
        buffer.sample(1, timeout=timeout)
    assert isinstance(tr.ReplayTimeout("x"), TimeoutError)


def test_a_draw_waits_for_a_writer_of_another_thread():
    buffer = buffer_with(tr.MinSize(3))
    holds_a_writer, go_on = threading.Event(), threading.Event()

    def explore():
        with buffer.writer() as writer:
            writer.append(x=1)
            holds_a_writer.set()
            go_on.wait(30)
            writer.append(x=1)
            writer.append(x=1)

    explorer = threading.Thread(target=explore)
    explorer.start()
    holds_a_writer.wait(30)
    opener = threading.Thread(target=lambda: (eventually(lambda: buffer.stats().sample_wait > 0), go_on.set()))
    opener.start()
    assert buffer.sample(2, timeout=30)["x"].tolist() == [1, 1]
    explorer.join()
    opener.join()


def test_a_draw_gives_up_when_all_explorers_of_other_processes_are_gone_for_good(monkeypatch):
    monkeypatch.setattr(waits, "RETURN_GRACE", 0.2)
    buffer = buffer_with(tr.MinSize(100))
    for end in ("leave", "die"):
        with Forked(extend, buffer, 3) as explorer:
            if end == "leave":
                assert explorer.wait() == 0
            else:
                eventually(lambda: len(buffer) > 3)
        with pytest.raises(tr.WouldBlockForever, match="left 0 s ago"):
            buffer.sample(1, timeout=30)


@pytest.mark.parametrize("since_departure", [-1.0, 100.0, 30.0])
def test_a_wait_that_goes_on_with_another_believes_in_writers_no_longer_unless_one_has_come_and_gone(since_departure):
    """The other wait began 60 s ago: a writer that left 30 s ago has been there since."""
    census = {"writers": 0, "others_writing": 0, "supervisors": 0, "shared": True, "since_write": 100.0}
    segment = SimpleNamespace(
        census=lambda _: census | {"since_departure": since_departure}, stopped=False, called=waits.UNNAMED
    )
    began = time.monotonic() - 2 * waits.STARTUP_GRACE if since_departure < 0 else time.monotonic() - 60

    def look(wait):
        wait.check_rows(5, 6, 5, 5, "")

    look(waits.Wait(segment, None))  # it has only begun
    after = waits.Wait(segment, None, began)
    if since_departure == 30.0:
        look(after)
        return
    look(after)
    with pytest.raises(tr.WouldBlockForever) as caught:
        look(after)
    assert caught.value.alone_since == began


def before(call, once, monkeypatch):
    """Has `once()` happen just before a wait looks around for the first time by that call."""
    look = getattr(waits.Wait, call)

    def look_late(*args, **rest):
        monkeypatch.setattr(waits.Wait, call, look)
        once()
        look(*args, **rest)

    monkeypatch.setattr(waits.Wait, call, look_late)


@pytest.mark.parametrize("timeout", [0, None])
@pytest.mark.parametrize("prefetch", [None, 0, 2])
@pytest.mark.parametrize("sampler", [tr.Uniform(), tr.Fifo()])
def test_rows_of_a_writer_that_has_left_since_the_draw_end_a_wait(timeout, prefetch, sampler, alone, monkeypatch):
    buffer = tr.ReplayBuffer(SPEC, 10, sampler=sampler, limiter=tr.MinSize(3) if sampler == tr.Uniform() else None)
    extend(buffer, 2)
    before("check_rows", lambda: extend(buffer, 1), monkeypatch)
    if prefetch is None:
        batch = buffer.sample(3, timeout=timeout)
    else:
        with contextlib.closing(iter(tr.ReplayDataset(buffer, 3, prefetch=prefetch, timeout=timeout))) as batches:
            batch = next(batches)
    assert len(batch["x"]) == 3


def test_room_that_a_learner_made_that_has_left_since_ends_a_wait(alone, monkeypatch):
    buffer = tr.ReplayBuffer(SPEC, 4, sampler=tr.Fifo())
    extend(buffer, 4)

    def draw():
        buffer.release(buffer.sample(1))
        buffer.commit(buffer.sample(2))

    before("check_room", draw, monkeypatch)
    with buffer.writer() as writer:
        writer.append(x=4)
    assert buffer.stats().rows_written == 5


def test_an_announced_supervisor_is_waited_for_until_it_closes(monkeypatch):
    monkeypatch.setattr(waits, "RETURN_GRACE", 0.05)
    buffer = buffer_with(tr.MinSize(100))
    with Forked(extend, buffer, 3) as explorer:
        assert explorer.wait() == 0
    with buffer.expect_writers(), pytest.raises(tr.ReplayTimeout):
        buffer.sample(1, timeout=0.3)
    with pytest.raises(tr.WouldBlockForever):
        buffer.sample(1, timeout=30)


# Ends of waits: stop, Ctrl-C


def sample_in_vain(buffer):
    with buffer.expect_writers():
        buffer.sample(1)


def append_in_vain(buffer):
    with buffer.writer() as writer:
        while True:
            writer.append(x=1)


@pytest.mark.parametrize("wait", [sample_in_vain, append_in_vain])
def test_stop_ends_a_wait_in_another_process(wait):
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    with Forked(expect_exception, tr.Stopped, wait, buffer) as child:
        eventually(lambda: has_waited(buffer))
        buffer.stop()
        assert child.wait() == 0


@pytest.mark.parametrize("wait", [sample_in_vain, append_in_vain])
def test_stop_ends_a_wait_in_another_thread(wait):
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    ended = []
    thread = threading.Thread(target=lambda: ended.append(expect_exception(tr.Stopped, wait, buffer)))
    thread.start()
    eventually(lambda: has_waited(buffer))
    buffer.stop()
    thread.join(30)
    assert ended == [True]


@pytest.mark.parametrize("wait", [lambda buffer: buffer.sample(1), append_in_vain])
def test_a_wait_that_is_left_alone_by_whoever_stopped_the_buffer_ends_with_stopped(wait, monkeypatch):
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    monkeypatch.setattr(threading, "active_count", lambda: buffer.stop() or 1)  # another thread did so, and ended
    with pytest.raises(tr.Stopped):
        wait(buffer)


def expect_exception(kind, wait, buffer):
    signal_from_here = threading.current_thread() is threading.main_thread()
    if signal_from_here:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        wait(buffer)
    except kind:
        return True
    raise AssertionError(f"{kind.__name__} was not raised")


def iterate_in_vain(buffer):
    with buffer.expect_writers():
        next(iter(tr.ReplayDataset(buffer, batch_size=4)))


def extend_in_vain(buffer):
    while True:
        extend(buffer, 50)


def step_in_vain(buffer):
    writer = buffer.writer()
    writer.reset(x=0)
    while True:
        writer.step(x=1, reward=0.0, terminated=False, truncated=False)


def extend_episodes_in_vain(buffer, *lanes):
    ends = np.zeros((40, *lanes), bool)
    while True:
        buffer.extend(x=np.zeros((41, *lanes), int), reward=0.0 * ends, terminated=ends, truncated=ends)


def extend_lanes_in_vain(buffer):
    extend_episodes_in_vain(buffer, 3)


ROWS = (sample_in_vain, iterate_in_vain, append_in_vain, extend_in_vain)
EPISODES = (sample_in_vain, step_in_vain, extend_episodes_in_vain, extend_lanes_in_vain)


@pytest.mark.parametrize(
    ("wait", "view"), [(wait, tr.Rows()) for wait in ROWS] + [(wait, EPISODE_VIEW) for wait in EPISODES]
)
def test_ctrl_c_gets_through_a_wait(wait, view):
    limiter = tr.SamplesPerInsert(1.0, min_size=10)
    buffer = tr.ReplayBuffer(SPEC if view == tr.Rows() else EPISODE_SPEC, 1000, view=view, limiter=limiter, seed=0)
    with Forked(expect_exception, KeyboardInterrupt, wait, buffer) as child:
        eventually(lambda: has_waited(buffer))
        child.signal(signal.SIGINT)
        assert child.wait() == 0
    assert not buffer.stopped
    assert buffer.stats().writers == 0


def test_after_stop_every_call_that_writes_or_draws_raises_and_looking_still_works():
    buffer = buffer_with(tr.MinSize(1))
    extend(buffer, 3)
    batch = buffer.sample(2)
    writer = buffer.writer()
    buffer.stop()
    buffer.stop()
    assert buffer.stopped
    assert tr.ReplayBuffer.attach(buffer.handle()).stopped
    for call in (lambda: buffer.sample(1), lambda: writer.append(x=1), lambda: extend(buffer, 2)):
        with pytest.raises(tr.Stopped):
            call()
    buffer.update_priorities(batch, np.ones(2))
    assert (len(buffer), buffer.stats().stopped) == (3, True)
    assert "stopped" in repr(buffer)


def test_an_append_that_no_learner_can_help_says_so_at_once_with_numbers_and_advice(alone):
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    with pytest.raises(tr.WouldBlockForever) as error:
        append_in_vain(buffer)
    for part in (
        "1,034 items were inserted and 0 drawn",
        str(buffer.limiter),
        f"size: {len(buffer):,} rows",
        "writers alive: 1",
        "s ago",
        "Draw more batches between appends",
    ):
        assert part in str(error.value)
    assert buffer.stats().inserted == 10 + 1024  # min_size * ratio, and a tolerance of 1024 draws


def test_an_append_that_nobody_can_help_says_so_at_once_although_writers_are_expected(alone):
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    with buffer.expect_writers(), pytest.raises(tr.WouldBlockForever, match="no other thread and no other process"):
        append_in_vain(buffer)


def test_an_append_for_which_no_learner_comes_ends_although_one_could_come_from_elsewhere(alone, monkeypatch):
    monkeypatch.setattr(waits, "STARTUP_GRACE", 0.3)
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    buffer.handle()
    with pytest.raises(tr.WouldBlockForever, match=r"no learner has come in 0 s.*Draw more batches"):
        append_in_vain(buffer)
    assert buffer.stats().insert_wait >= 0.3


def test_an_append_waits_for_the_process_that_made_the_buffer_as_long_as_it_takes(alone, monkeypatch):
    monkeypatch.setattr(waits, "STARTUP_GRACE", 0.0)
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    with Forked(append_until_stopped, buffer.handle()) as explorer:
        eventually(lambda: insert_wait(buffer) > 0.5)
        assert explorer.is_running()
        buffer.stop()
        assert explorer.wait() == 0


def append_until_stopped(handle):
    expect_exception(tr.Stopped, append_in_vain, tr.ReplayBuffer.attach(handle))


def pause_and_draw(buffer):
    buffer.sample(1)
    time.sleep(0.5)
    learn_for_ever(buffer)


def test_an_append_waits_for_a_learner_that_pauses(alone, monkeypatch):
    monkeypatch.setattr(waits, "STARTUP_GRACE", 0.0)
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10))
    extend(buffer, 10)
    with Forked(pause_and_draw, buffer):
        eventually(lambda: buffer.stats().sampled == 1)
        with buffer.writer() as writer:
            for x in range(2000):
                writer.append(x=x)
    assert insert_wait(buffer) > 0.2


def own_until_killed(pipe):
    """Makes a buffer whose learner is soon behind, and draws a batch on each request."""
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5))
    pipe.send(buffer.handle())
    while pipe.recv():
        buffer.sample(5)


def learn_for_ever(buffer):
    while True:
        buffer.sample(5)


def append_until_told_that_nobody_draws(handle):
    expect_exception(tr.Stopped, append_in_vain, tr.ReplayBuffer.attach(handle))


def insert_wait(buffer):
    return buffer.stats().insert_wait


@pytest.mark.parametrize("explorers", [1, 3])
def test_writers_that_wait_for_a_learner_give_up_when_it_dies(explorers, monkeypatch):
    monkeypatch.setattr(waits, "RETURN_GRACE", 0.2)
    mine, theirs = mp.Pipe()
    with contextlib.ExitStack() as started:
        owner = started.enter_context(Forked(own_until_killed, theirs))
        handle = mine.recv()
        buffer = tr.ReplayBuffer.attach(handle)  # to look at it: who never draws is no learner
        waiting_ones = [
            started.enter_context(Forked(append_until_told_that_nobody_draws, handle)) for _ in range(explorers)
        ]
        mine.send(True)
        eventually(lambda: insert_wait(buffer) > 0.2)
        assert all(explorer.is_running() for explorer in waiting_ones)
        owner.kill()
        assert [explorer.wait() for explorer in waiting_ones] == [0] * explorers
        assert buffer.stats().writers == 0


def test_writers_go_on_without_their_owner_for_as_long_as_another_process_draws(monkeypatch):
    monkeypatch.setattr(waits, "RETURN_GRACE", 0.2)
    mine, theirs = mp.Pipe()
    with Forked(own_until_killed, theirs) as owner:
        handle = mine.recv()
        buffer = tr.ReplayBuffer.attach(handle)
        with (
            Forked(append_until_told_that_nobody_draws, handle) as explorer,
            Forked(learn_for_ever, buffer) as learner,
        ):
            eventually(lambda: buffer.stats().sampled > 100)
            owner.kill()
            before = buffer.stats().inserted
            eventually(lambda: buffer.stats().inserted > before + 1000)
            learner.kill()
            assert explorer.wait() == 0


def test_a_learner_that_gave_up_does_not_leave_writers_running_ahead_for_it():
    # While it waits for 300, 300 are admitted; afterwards only what the ratio allows: (10 + 5) - 0 draws.
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5))
    buffer.handle()
    with buffer.writer() as writer:
        for kind, timeout in ((tr.ReplayTimeout, 0), (tr.ReplayTimeout, 0.05)):
            with pytest.raises(kind):
                buffer.sample(300, timeout=timeout)
        while writer._admitted():
            writer.append(x=1)
            len(buffer)  # lets the limiter see what came
    assert buffer.stats().inserted == 15


def test_a_learner_interrupted_in_its_wait_does_not_leave_writers_running_ahead_for_it():
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5))
    with Forked(expect_exception, KeyboardInterrupt, sample_in_vain, buffer) as child:
        eventually(lambda: has_waited(buffer))
        child.signal(signal.SIGINT)
        assert child.wait() == 0
    with buffer.writer() as writer:
        while writer._admitted():
            writer.append(x=1)
            len(buffer)
    assert buffer.stats().inserted == 15


def test_waiting_costs_next_to_no_processor_time():
    buffer = buffer_with(tr.MinSize(10))
    buffer.handle()
    before = os.times()
    with pytest.raises(tr.ReplayTimeout):
        buffer.sample(1, timeout=1.0)
    after = os.times()
    assert (after.user + after.system) - (before.user + before.system) < 0.3


def test_explorers_that_never_start_end_the_wait_instead_of_hanging_it(monkeypatch):
    monkeypatch.setattr("torchreplay.segment.waits.STARTUP_GRACE", 0.2)
    buffer = buffer_with(tr.MinSize(3))
    buffer.handle()
    with pytest.raises(tr.WouldBlockForever, match="did the explorers fail to start"):
        buffer.sample(1, timeout=30)


def test_a_supervisor_keeps_the_wait_for_a_first_writer_open(monkeypatch):
    monkeypatch.setattr("torchreplay.segment.waits.STARTUP_GRACE", 0.0)
    buffer = buffer_with(tr.MinSize(3))
    buffer.handle()
    with buffer.expect_writers(), pytest.raises(tr.ReplayTimeout):
        buffer.sample(1, timeout=0.2)


def test_a_long_wait_is_logged_with_its_numbers(monkeypatch, caplog):
    monkeypatch.setattr("torchreplay.segment.waits.LOG_EVERY", 0.1)
    buffer = buffer_with(tr.MinSize(3))
    buffer.handle()
    with pytest.raises(tr.ReplayTimeout):
        buffer.sample(1, timeout=0.3)
    assert any("0 items were inserted, 3 are needed" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("learner", ["this thread", "another process"])
def test_a_writer_that_waits_for_a_learner_says_when_that_is_itself(learner, monkeypatch, caplog):
    monkeypatch.setattr("torchreplay.segment.waits.LOG_EVERY", 0.1)
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5))
    buffer.handle()
    extend(buffer, 10)
    with contextlib.ExitStack() as others:
        if learner == "this thread":
            buffer.sample(1)
        else:
            others.enter_context(Forked(lambda: (buffer.sample(1), signal.pause())))
            eventually(lambda: buffer.stats().learners == 1)
        stopper = threading.Thread(
            target=lambda: (eventually(lambda: "learners alive: 1" in caplog.text), buffer.stop())
        )
        stopper.start()
        with pytest.raises(tr.Stopped):
            append_in_vain(buffer)
        stopper.join()
    assert ("which is this thread itself" in caplog.text) == (learner == "this thread")


def own_without_limit(pipe):
    buffer = buffer_with(tr.MinSize())
    pipe.send(buffer.handle())
    pipe.recv()


def append_for_ever(writer):
    while True:
        writer.append(x=1)


@pytest.mark.slow
def test_a_writer_that_never_waits_ends_with_stopped_when_nobody_is_left_to_draw():
    mine, theirs = mp.Pipe()
    with Forked(own_without_limit, theirs) as owner:
        buffer = tr.ReplayBuffer.attach(mine.recv())
        with buffer.writer() as writer:
            writer.append(x=1)
            owner.kill()
            with pytest.raises(tr.Stopped, match="nobody draws what this writer writes"):
                append_for_ever(writer)
            assert writer.rows > 1000
