"""Batches that a native thread draws ahead: the same ones as without it, whatever ends the iteration or the process."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from stopped_holder import StoppedHolder

import torchreplay as tr
from torchreplay.stream import BatchStream
from torchreplay.waiting import Wait

ROWS, BATCH = 256, 8
SPEC = {"number": tr.Field((), torch.int64), "obs": tr.Field((4,))}


def filled_buffer(rows=ROWS, capacity=1024, **arguments):
    """Rows whose key, number and observation say the same."""
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=tr.Prioritized(alpha=1.0), seed=7, **arguments)
    if rows:
        extend(buffer, 0, rows)
    return buffer


def extend(buffer, first, n):
    numbers = np.arange(first, first + n)
    buffer.extend(number=numbers, obs=np.repeat(numbers[:, None], 4, axis=1).astype(np.float32))


def threads():
    return len(os.listdir("/proc/self/task"))


def td_of(k):
    """TD errors for batch k, that differ much: whoever misses them draws others."""
    return np.random.default_rng(k).exponential(size=BATCH) ** 4


class Delayed:
    """What prefetching means, without a thread: batch k is drawn when batch k - prefetch is asked for."""

    def __init__(self, buffer, prefetch):
        self.buffer, self.prefetch, self.drawn = buffer, prefetch, deque()

    def __iter__(self):
        return self

    def __next__(self):
        while len(self.drawn) <= self.prefetch:
            self.drawn.append(self.buffer.sample(BATCH))
        return self.drawn.popleft()


def learn(buffer, batches, n):
    """Feeds back and writes beside drawing; returns what was drawn."""
    seen = []
    for k, batch in enumerate(itertools.islice(batches, n)):
        seen.append({name: values.clone() for name, values in batch.items()})
        buffer.update_priorities(batch, td_of(k))
        if k % 3 == 0:
            extend(buffer, ROWS + 16 * k, 16)
    return seen


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_batches_are_those_of_draws_made_earlier_by_as_many_batches(prefetch):
    expected = learn(buffer := filled_buffer(), Delayed(buffer, prefetch), 200)
    ahead = learn(buffer := filled_buffer(), tr.ReplayDataset(buffer, BATCH, prefetch=prefetch), 200)
    assert_same(ahead, expected)


def test_a_schedule_of_the_exponent_counts_every_batch_once():
    def with_schedule():
        sampler = tr.Prioritized(alpha=1.0, beta=tr.Linear(0.0, 1.0, 50))
        buffer = tr.ReplayBuffer(SPEC, 1024, sampler=sampler, seed=7)
        extend(buffer, 0, ROWS)
        buffer.update_priorities(np.arange(ROWS), np.random.default_rng(0).exponential(size=ROWS))
        return buffer

    expected = list(itertools.islice(Delayed(with_schedule(), 0), 60))
    assert_same(list(tr.ReplayDataset(with_schedule(), BATCH, steps=60, prefetch=3)), expected)


def test_an_iteration_goes_on_where_its_state_was_taken(tmp_path):
    buffer = filled_buffer()
    dataset = tr.ReplayDataset(buffer, BATCH, prefetch=3)
    iterator = iter(dataset)
    learn(buffer, iterator, 10)
    buffer.save(tmp_path / "buffer")
    torch.save(dataset.state_dict(), tmp_path / "state")
    expected = learn(buffer, iterator, 30)
    loaded = tr.ReplayBuffer.load(tmp_path / "buffer")
    resumed = tr.ReplayDataset(loaded, BATCH, prefetch=3)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert_same(learn(loaded, resumed, 30), expected)


def test_relabelled_goals_come_back_with_the_batches_drawn_ahead(tmp_path):
    goals = {"achieved_goal": tr.Field((1,)), "desired_goal": tr.Field((1,))}
    spec = {"obs": goals, "reward": tr.Field()} | {end: tr.Field((), torch.bool) for end in ("terminated", "truncated")}
    view = tr.Hindsight(lambda achieved, desired: -(achieved != desired).float().squeeze(1))
    buffer = tr.ReplayBuffer(spec, 512, view=view, sampler=tr.Prioritized(), seed=3)
    with buffer.writer() as writer:
        for episode in range(10):
            writer.reset(obs={"achieved_goal": np.array([100.0 * episode]), "desired_goal": np.array([-1.0])})
            for step in range(1, 21):
                obs = {"achieved_goal": np.array([100.0 * episode + step]), "desired_goal": np.array([-1.0])}
                writer.step(obs=obs, reward=-1.0, terminated=False, truncated=step == 20)
    dataset = tr.ReplayDataset(buffer, 64, prefetch=2)
    iterator = iter(dataset)
    next(iterator)
    buffer.save(tmp_path)
    state = dataset.state_dict()
    expected = list(itertools.islice(iterator, 4))
    loaded = tr.ReplayBuffer.load(tmp_path, view=view)
    resumed = tr.ReplayDataset(loaded, 64, prefetch=2)
    resumed.load_state_dict(state)
    given = list(itertools.islice(resumed, 4))
    assert any(batch["relabelled"].any() for batch in given)
    assert_same(given, expected)


def test_a_batch_drawn_ahead_that_the_buffer_does_not_hold_any_more_is_left_out():
    buffer = filled_buffer(capacity=ROWS)
    dataset = tr.ReplayDataset(buffer, BATCH, prefetch=2)
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    iterator.close()
    extend(buffer, ROWS, ROWS)
    dataset.load_state_dict(state)
    assert all((batch["key"] >= ROWS).all() for batch in itertools.islice(dataset, 5))


def test_the_staleness_is_what_was_fed_back_between_draw_and_turn():
    buffer, prefetch, n = filled_buffer(), 3, 50
    for k, batch in enumerate(tr.ReplayDataset(buffer, BATCH, steps=n, prefetch=prefetch)):
        buffer.update_priorities(batch, td_of(k))
    assert buffer.stats().staleness == sum(BATCH * min(k, prefetch) for k in range(n)) / n


def test_without_prefetching_nothing_is_stale():
    buffer = filled_buffer()
    for k, batch in enumerate(tr.ReplayDataset(buffer, BATCH, steps=5, prefetch=0)):
        buffer.update_priorities(batch, td_of(k))
    assert buffer.stats().staleness == 0


def test_no_thread_is_left_behind_however_an_iteration_ends():
    buffer, before = filled_buffer(), threads()
    dataset = tr.ReplayDataset(buffer, BATCH, steps=3)
    list(dataset)
    assert threads() == before
    for _ in dataset:
        assert threads() == before + 1
        break
    assert threads() == before
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in dataset]
    assert threads() == before
    iterator = iter(dataset)
    next(iterator)
    del iterator
    assert threads() == before
    for _ in dataset:
        buffer.stop()
    assert threads() == before


def test_a_batch_keeps_its_memory_whatever_is_drawn_after_it():
    kept = []
    for batch in tr.ReplayDataset(filled_buffer(), BATCH, steps=300, prefetch=4):
        kept.append((batch["obs"], batch["number"].clone()))
    for obs, number in kept:
        assert torch.equal(obs, number[:, None].expand(-1, 4).float())


def test_an_error_of_the_thread_reaches_the_consumer_and_the_next_iteration_works():
    view = tr.Transitions(n_step=8, observation="obs")
    spec = SPEC | {name: tr.Field((), torch.bool) for name in ("terminated", "truncated")} | {"reward": tr.Field()}
    buffer = tr.ReplayBuffer(spec, 4096, view=view)
    step = {"number": 0, "obs": np.zeros(4), "reward": 0.0, "terminated": False, "truncated": False}
    with buffer.writer(lanes=512) as many, buffer.writer() as one:
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
        start = time.monotonic()
        with pytest.raises(tr.ReplayTimeout, match=f"process {holder.pid} holds it and is stopped"):
            next(iter(dataset))
        assert time.monotonic() - start < 5
        holder.go_on()
        assert len(next(iter(dataset))["key"]) == BATCH


def test_a_wait_that_nobody_can_end_is_an_error_at_once():
    start = time.monotonic()
    with pytest.raises(tr.WouldBlockForever):
        next(iter(tr.ReplayDataset(filled_buffer(0), BATCH)))
    assert time.monotonic() - start < 5


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


def test_a_position_set_under_an_iteration_is_where_the_next_one_goes_on():
    buffer = filled_buffer()
    dataset = tr.ReplayDataset(buffer, BATCH, prefetch=2)
    iterator = iter(dataset)
    next(iterator)
    buffer.draws = 1000
    next(iterator)
    iterator.close()
    assert buffer.draws == 1001


def test_a_state_loaded_under_an_iteration_is_where_the_next_one_starts():
    buffer, twin = filled_buffer(), filled_buffer()
    dataset = tr.ReplayDataset(buffer, BATCH, steps=10, prefetch=2)
    iterator = iter(dataset)
    next(iterator)
    dataset.load_state_dict({"draws": 100, "position": 4, "drawn": []})
    assert dataset.state_dict() == {"draws": 100, "position": 4, "drawn": []}
    twin.draws = 100
    assert_same(list(dataset), [twin.sample(BATCH) for _ in range(6)])
    assert buffer.draws == 106


def test_an_iteration_is_for_one_thread():
    buffer = filled_buffer(0)
    dataset = tr.ReplayDataset(buffer, BATCH)
    failures = []

    def end():
        eventually(lambda: buffer.stats().sample_wait > 0)
        try:
            dataset._stream = stream
            dataset.end()
        except RuntimeError as error:
            failures.append(str(error))
        extend(buffer, 0, ROWS)

    stream = BatchStream(buffer, BATCH, 1, 2, None, Wait, deque())
    with buffer.expect_writers():
        other = threading.Thread(target=end)
        other.start()
        assert len(next(stream)["key"]) == BATCH
        other.join()
    stream.close()
    assert failures == ["another thread waits for a batch of this iteration: it is for one thread"]


def test_a_batch_too_large_is_refused_as_a_draw_of_one_is():
    with pytest.raises(ValueError, match="batch_size"):
        next(iter(tr.ReplayDataset(filled_buffer(), 1 << 30)))


def append_one(buffer, out):
    iterator = iter(tr.ReplayDataset(buffer, BATCH, prefetch=1))
    next(iterator)
    buffer.sample(1)
    out[0] = 1
    eventually(lambda: out[0] == 2)  # another learner holds the lock now, and is stopped
    next(iterator)  # was drawn; orders another, which cannot be
    start = time.monotonic()
    with buffer.writer() as writer:
        writer.append(number=0, obs=np.zeros(4))
    out[1] = int(1000 * (time.monotonic() - start))
    out[0] = 3


def test_a_stopped_lock_holder_keeps_no_writer_that_draws_ahead_too():
    buffer, out = filled_buffer(8), shared_counters(2)
    with Forked(append_one, buffer, out):
        eventually(lambda: out[0] == 1)
        with StoppedHolder(buffer) as holder:
            out[0] = 2
            eventually(lambda: out[0] == 3, timeout=30)
            holder.go_on()
    assert out[1] < 5000


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


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        ({"step": 0}, "is no batch drawn ahead"),
        ("keys", "is no batch drawn ahead"),
        (
            {"step": 0, "key": torch.zeros(2), "weight": torch.zeros(2), "probability": torch.zeros(2)},
            r"'key' of a batch drawn ahead is torch.float32 of shape \(2,\), expected torch.int64 of shape \(2,\)",
        ),
        (
            {"step": 0, "key": torch.arange(2), "weight": torch.zeros(3), "probability": torch.zeros(2)},
            r"'weight' of a batch drawn ahead is torch.float32 of shape \(3,\)",
        ),
        (
            {"step": -1, "key": torch.arange(2), "weight": torch.zeros(2), "probability": torch.zeros(2)},
            "step is -1",
        ),
    ],
)
def test_a_state_with_something_else_than_batches_drawn_ahead_is_refused(drawn, message):
    with pytest.raises(ValueError, match=message):
        tr.ReplayDataset(filled_buffer()).load_state_dict({"draws": 1, "position": 1, "drawn": [drawn]})
