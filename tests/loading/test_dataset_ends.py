"""Iterations that draw ahead end, wait and go on as others do, at every end of the iteration or the process."""

import itertools
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from belongings import threads
from delayed_draws import BATCH, ROWS, SPEC, Delayed, extend, filled_buffer, td_of
from forked import Forked, eventually, shared_counters
from stopped_holder import StoppedHolder

import torchreplay as tr
from torchreplay.buffer.base import StreamSpec
from torchreplay.buffer.prefetch import PrefetchIterator
from torchreplay.segment.waits import Wait


def await_threads_beyond(before, number):
    """Waits until the process has that many more: one that has ended and been joined may be listed a moment longer."""
    eventually(lambda: len(threads() - before) == number)


def test_no_thread_is_left_behind_however_an_iteration_ends():
    buffer, before = filled_buffer(), threads()
    dataset = tr.ReplayDataset(buffer, BATCH, steps=3)
    list(dataset)
    await_threads_beyond(before, 0)
    for _ in dataset:
        await_threads_beyond(before, 1)
        break
    await_threads_beyond(before, 0)
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in dataset]
    await_threads_beyond(before, 0)
    iterator = iter(dataset)
    next(iterator)
    del iterator
    await_threads_beyond(before, 0)
    for _ in dataset:
        buffer.stop()
    await_threads_beyond(before, 0)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_whoever_waits_for_rows_ends_in_order_when_the_buffer_is_stopped_and_then_closed(prefetch):
    for _ in range(10):
        buffer, errors = tr.ReplayBuffer(SPEC, ROWS), []

        def learn(buffer=buffer, errors=errors):
            try:
                list(tr.ReplayDataset(buffer, BATCH, prefetch=prefetch))
            except BaseException as error:
                errors.append(error)

        with buffer.expect_writers():
            learner = threading.Thread(target=learn)
            learner.start()
            eventually(lambda: buffer._segment.census(False)["learners"] > 0)  # noqa: B023
            buffer.stop()
            learner.join(0.001)
            buffer.close()
            learner.join()
        assert errors == []


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("stopped", [False, True])
def test_who_is_about_to_draw_from_a_buffer_that_was_closed_ends_in_order_if_it_was_stopped(
    monkeypatch, prefetch, stopped
):
    buffer = filled_buffer()
    batches = iter(tr.ReplayDataset(buffer, BATCH, prefetch=prefetch))
    next(batches)
    place = PrefetchIterator._place

    def close_and_place(iterator):
        if stopped:
            buffer.stop()
        buffer.close()
        return place(iterator)

    monkeypatch.setattr(PrefetchIterator, "_place", close_and_place)
    if stopped:
        assert list(batches) == []
    else:
        with pytest.raises(RuntimeError, match="is closed"):
            list(batches)


def test_an_error_of_the_thread_reaches_the_consumer_and_the_next_iteration_works():
    view = tr.Transitions(n_step=8, observation="obs")
    spec = SPEC | {name: tr.Field((), torch.bool) for name in ("terminated", "truncated")} | {"reward": tr.Field()}
    buffer = tr.ReplayBuffer(spec, 4096, view=view)
    step = {"number": 0, "obs": np.zeros(4), "reward": 0.0, "terminated": False, "truncated": False}
    with buffer.writer(num_envs=512) as many, buffer.writer() as one:
        for _ in range(20):
            many.reset(obs=np.zeros((512, 4)))  # a ring of first observations, of which none has eight successors
        dataset = tr.ReplayDataset(buffer, BATCH)
        with pytest.raises(RuntimeError, match="turned without completing an item"):
            next(iter(dataset))
        one.reset(obs=np.zeros(4))
        for _ in range(8):
            one.step(**step)
        assert len(next(iter(dataset))["key"]) == BATCH


def test_a_timeout_against_a_stopped_lock_holder_names_it():
    buffer = filled_buffer(8)
    with StoppedHolder(buffer) as holder:
        dataset = tr.ReplayDataset(buffer, BATCH, timeout=0.3)
        with pytest.raises(tr.ReplayTimeout, match=f"process {holder.pid} holds it and is stopped"):
            next(iter(dataset))
        holder.go_on()
        assert len(next(iter(dataset))["key"]) == BATCH


def test_a_wait_that_nobody_can_end_is_an_error_at_once():
    with pytest.raises(tr.WouldBlockForever, match="never handed to another process"):  # which no time will change
        next(iter(tr.ReplayDataset(filled_buffer(0), BATCH)))


def test_waiting_for_rows_counts_as_such():
    buffer = filled_buffer(0)

    def write():
        eventually(lambda: buffer.stats().sample_wait > 0.2)
        extend(buffer, 0, ROWS)

    with buffer.expect_writers():
        writer = threading.Thread(target=write)
        writer.start()
        assert len(next(iter(tr.ReplayDataset(buffer, BATCH)))["key"]) == BATCH
        writer.join()


def test_an_iteration_is_for_one_thread():
    buffer = filled_buffer(0)
    dataset = tr.ReplayDataset(buffer, BATCH)
    failures = []

    def end():
        eventually(lambda: buffer.stats().sample_wait > 0)
        try:
            dataset._iteration.stream = stream
            dataset.end()
        except RuntimeError as error:
            failures.append(str(error))
        extend(buffer, 0, ROWS)

    stream = PrefetchIterator(buffer._sampler, StreamSpec(BATCH, 1, 2, None, Wait))
    with buffer.expect_writers():
        other = threading.Thread(target=end)
        other.start()
        assert len(next(stream)["key"]) == BATCH
        other.join()
    stream.close()
    assert failures == ["another thread waits for a batch of this iteration: it is for one thread"]


def append_one(buffer, out):
    iterator = iter(tr.ReplayDataset(buffer, BATCH, prefetch=1))
    next(iterator)
    buffer.sample(1)
    out[0] = 1
    eventually(lambda: out[0] == 2)  # another learner holds the lock now, and is stopped
    next(iterator)  # was drawn; orders another, which cannot be
    with buffer.writer() as writer:
        writer.append(number=0, obs=np.zeros(4))
    out[0] = 3


def test_a_stopped_lock_holder_keeps_no_writer_that_draws_ahead_too():
    buffer, out = filled_buffer(8), shared_counters(1)
    with Forked(append_one, buffer, out):
        eventually(lambda: out[0] == 1)
        with StoppedHolder(buffer):
            out[0] = 2
            eventually(lambda: out[0] == 3)  # while the holder is stopped


def draw_on(buffer, iterator, parents, rows):
    mine = [tuple(batch["key"].tolist()) for batch in itertools.islice(iterator, 10)]
    assert not set(mine) & set(parents), "a forked child draws from a stream of its own"
    extend(buffer, ROWS, ROWS)
    rows[0] = len(mine)


def test_a_forked_child_goes_on_with_draws_of_its_own():
    buffer, rows = filled_buffer(), shared_counters(1)
    expected = [tuple(batch["key"].tolist()) for batch in itertools.islice(Delayed(filled_buffer(), 0), 20)]
    iterator = iter(tr.ReplayDataset(buffer, BATCH, prefetch=4))
    mine = [tuple(next(iterator)["key"].tolist())]
    with Forked(draw_on, buffer, iterator, expected, rows) as child:
        mine += [tuple(next(iterator)["key"].tolist()) for _ in range(3)]
        assert child.wait() == 0
    assert mine == expected[:4]
    assert rows[0] == 10


def draw_for_ever(buffer, drawn):
    for k, batch in enumerate(tr.ReplayDataset(buffer, BATCH, prefetch=4)):
        assert torch.equal(batch["number"], batch["key"]), "torn row"
        buffer.update_priorities(batch, td_of(k % 100))
        drawn[0] += 1


def test_sigkill_of_prefetching_learners_lets_the_others_draw_on(tally):
    buffer, chance = filled_buffer(), np.random.default_rng(0)
    for _ in range(30):
        drawn = shared_counters(1)
        with Forked(draw_for_ever, buffer, drawn) as learner:
            enough = chance.integers(1, 50)
            eventually(lambda drawn=drawn, enough=enough: drawn[0] >= enough, interval=0.0005)
            learner.kill()
        tally("learners killed")
        batch = buffer.sample(BATCH, timeout=20)
        assert torch.equal(batch["number"], batch["key"]), "torn row"
        assert buffer.stats().drawable == ROWS


WAITING = """
import signal
import torchreplay as tr
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job's parent may have ignored
buffer = tr.ReplayBuffer({"x": tr.Field()}, 100)
with buffer.expect_writers():
    print("waiting", flush=True)
    next(iter(tr.ReplayDataset(buffer, 8)))
"""


ENDING = """
import torch
import torchreplay as tr
buffer = tr.ReplayBuffer({"x": tr.Field()}, 100)
buffer.extend(x=torch.ones(50))
iterator = iter(tr.ReplayDataset(buffer, 8, prefetch=4))
next(iterator)
"""


@contextmanager
def running(text):
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_gets_through():
    with running(WAITING) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0


def test_a_program_ends_with_an_iteration_under_way():
    with running(ENDING) as process:
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
