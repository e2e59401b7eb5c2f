"""Threads that end with their writers open, and forks in the middle of other threads' calls."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from forked import Forked, eventually, shared_counters
from limited_buffers import buffer_with, has_waited

import torchreplay as tr

PLACES = 4095
WIDE = 100_000  # bytes: a copy for which the interpreter lock is released
SPEC = {"x": tr.Field((WIDE,), np.uint8)}


def run_threads(n, body):
    threads = [threading.Thread(target=body, args=(k,)) for k in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_end_without_closing_their_writers_give_their_places_back():
    buffer = buffer_with(tr.MinSize(), capacity=16)

    def explore(k):
        if k % 2:
            buffer.extend(x=np.full(2, k))  # by the thread's own writer, which nobody ever sees
        else:
            writer = buffer.writer()
            writer.append(x=k)
            writer.append(x=k)

    rounds = PLACES // 10 + 1  # more threads than there are places
    for _ in range(rounds):
        run_threads(10, explore)
    stats = buffer.stats()
    assert (stats.writers, stats.rows_written) == (0, 20 * rounds)


def test_a_thread_that_dies_of_an_exception_in_an_append_loses_neither_its_place_nor_a_slot(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # pytest's keeps the exception, and so the writer
    buffer = buffer_with(tr.MinSize(), capacity=4)

    class Deadly:
        def __float__(self):
            raise ArithmeticError("in the middle of an append")

    def explore(k):
        writer = buffer.writer()
        writer.append(x=k)
        writer.append(x=k, priority=Deadly())

    for _ in range(5):
        run_threads(4, explore)
    assert buffer.stats().writers == 0
    with buffer.writer() as writer:
        assert [writer.append(x=k) for k in range(4)] == [20, 21, 22, 23]
    assert sorted(buffer.storage["x"].tolist()) == [0, 1, 2, 3]


def is_one_number(rows):
    return (rows == rows[:, :1]).all()


def write_in_child(inherited, buffer, k):
    with buffer.writer() as own:
        for writer in (own, inherited):
            for value in range(6):
                writer.append(x=np.full(WIDE, (k + value) % 256, np.uint8))
    batch = buffer.sample(8, timeout=30)
    assert is_one_number(batch["x"])


def test_children_forked_while_another_thread_is_in_an_append_write_and_draw_beside_it():
    buffer = tr.ReplayBuffer(SPEC, 16, seed=0)
    writer = buffer.writer()
    over, rounds = threading.Event(), [0]

    def explore():
        chunks = [np.repeat(np.full((3, 1), k, np.uint8), WIDE, axis=1) for k in range(5)]
        while not over.is_set():
            writer.extend(x=chunks[rounds[0] % 5])
            rounds[0] += 1

    explorer = threading.Thread(target=explore)
    explorer.start()
    try:
        for k in range(10):
            before = rounds[0]
            with Forked(write_in_child, writer, buffer, k) as child:
                eventually(lambda seen=before: rounds[0] > seen, interval=0)  # the parent goes on meanwhile
                assert child.wait() == 0
            assert is_one_number(buffer.sample(8, timeout=30)["x"])
    finally:
        over.set()
        explorer.join()
    assert buffer.stats().writers == 1
    assert writer.append(x=np.zeros(WIDE, np.uint8)) == buffer.stats().rows_written - 1


def test_a_child_forked_while_another_thread_waits_in_an_append_can_use_that_writer():
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5))
    writer = buffer.writer()
    ended = []

    def explore():
        try:
            while True:
                writer.append(x=1)
        except tr.Stopped:
            ended.append(True)

    explorer = threading.Thread(target=explore, daemon=True)
    explorer.start()
    eventually(lambda: has_waited(buffer))

    def write_two():
        buffer.limiter = tr.MinSize()
        assert writer.append(x=2) < writer.append(x=2)

    with Forked(write_two) as child:
        assert child.wait() == 0
    buffer.stop()
    explorer.join(60)
    assert ended == [True]


def test_a_child_forked_out_of_a_waiting_append_does_not_go_on_with_its_parents_call():
    # A signal handler forks while the call waits: both processes return into it.
    buffer = buffer_with(tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5))
    outcome = shared_counters(2)  # of parent and child

    def explore():
        parent = os.getpid()
        signal.signal(signal.SIGUSR1, lambda *_: os.fork())
        writer = buffer.writer()
        try:
            while True:
                writer.append(x=1)
        except tr.Stopped:
            outcome[0] = 1
        except RuntimeError as error:
            assert os.getpid() != parent
            outcome[1] = 1 + ("forked out of a waiting call" in str(error))
            os._exit(0)
        os.wait()

    with Forked(explore) as explorer:
        eventually(lambda: has_waited(buffer))
        explorer.signal(signal.SIGUSR1)
        eventually(lambda: outcome[1])
        buffer.limiter = tr.MinSize()
        eventually(lambda: buffer.stats().inserted > 100)
        buffer.stop()
        assert explorer.wait() == 0
    assert list(outcome) == [1, 2]


@pytest.mark.slow
def test_a_fork_tells_every_open_buffer_though_other_threads_open_and_close_some(monkeypatch):
    ignored, over = [], threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)

    def open_and_close():
        while not over.is_set():
            buffer_with(tr.MinSize(), capacity=4).close()

    threads = [threading.Thread(target=open_and_close) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(100):
            kept = buffer_with(tr.MinSize(), capacity=4)
            with Forked(os.getpid) as child:
                assert child.wait() == 0
            assert kept._segment.census(False)["shared"]
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not ignored


@pytest.mark.slow
def test_a_process_ends_in_order_whatever_its_daemon_threads_are_at():
    program = """
import threading, warnings
import numpy as np
import torchreplay as tr

warnings.simplefilter("ignore")  # batches that hold copies take long

def new(limiter):
    return tr.ReplayBuffer({"x": tr.Field(20_000)}, 200, limiter=limiter, sampler=tr.Prioritized())

limiters = tr.MinSize(), tr.MinSize(500), tr.SamplesPerInsert(1.0, 50)
buffers = free, learner_waits, explorer_waits = [new(limiter) for limiter in limiters]
x = np.zeros((50, 20_000), np.float32)
free.extend(x=x)

def write(buffer):
    while True:
        buffer.extend(x=x)

def draw(buffer):
    while True:
        buffer.sample(1000)

def iterate(buffer):
    for batch in tr.ReplayDataset(buffer, 10):
        buffer.update_priorities(batch, np.ones(10))

def look(buffer):
    batch = buffer.sample(10)
    while True:
        batch["x"][0]  # torch releases the interpreter lock to drop it

for buffer in buffers:
    buffer.handle()  # others might come
for work, buffer in (
    (write, free), (draw, free), (iterate, free), (look, free), (look, free),
    (draw, learner_waits), (write, explorer_waits),
):
    threading.Thread(target=work, args=(buffer,), daemon=True).start()
stats = [buffer.stats() for buffer in buffers]
while not (stats[0].draws > 9 and stats[0].rows_written > 99 and stats[1].sample_wait and stats[2].insert_wait):
    stats = [buffer.stats() for buffer in buffers]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr.decode()) == (0, "")
