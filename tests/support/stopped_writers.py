"""A writer of a queue is stopped within a row. The others go on meanwhile.

Everything here runs in an interpreter whose native module has fault points (`fault_build.py`).
"""

import os
import signal
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from faulty_lives import DIED, Fault, await_stop, faulty
from forked import Forked, eventually, shared_counters
from watched_buffers import after, look_at

import torchreplay as tr
from torchreplay.monitoring.advice import advise

CAPACITY, TURNS, GROUP = 16, 20, 4
FLAG = tr.Field((), torch.bool)
ROWS = {"obs": tr.Field((), "int64")}
STEPS = {**ROWS, "reward": tr.Field(), "terminated": FLAG, "truncated": FLAG}


def queue(linked, **given):
    view = tr.Transitions() if linked else tr.Rows()
    return tr.ReplayBuffer(STEPS if linked else ROWS, CAPACITY, view=view, **{"sampler": tr.Fifo(), **given})


def write(buffer, numbers):
    """Writes items with these numbers: rows, or an episode."""
    with buffer.writer() as writer:
        if buffer.view == tr.Rows():
            for number in numbers:
                writer.append(obs=number)
            return
        writer.reset(obs=numbers[0])
        for number in numbers:
            writer.step(obs=number + 1, reward=0.0, terminated=number == numbers[-1], truncated=False)


def stopped(buffer, numbers, *faults):
    """A process that is stopped when it has copied its second row, and not said so."""
    process = faulty(write, buffer, numbers, faults=[Fault("append.copied", nth=2, stop=True), *faults])
    assert await_stop(process)
    return process


def draw_all(buffer):
    got = []
    while buffer.num_items:
        got += buffer.sample(GROUP, at_least=1)["obs"].tolist()
    buffer.commit()
    return got


def turn(buffer, first):
    """Turns the ring many times. Returns the next number."""
    for _ in range(TURNS * CAPACITY // GROUP):
        write(buffer, range(first, first + GROUP))
        assert draw_all(buffer) == [*range(first, first + GROUP)]
        first += GROUP
    return first


def turn_beside_a_stopped_writer(linked, killed):
    """One process writes and draws. In the end the stopped one goes on, or is killed."""
    with queue(linked) as buffer, stopped(buffer, range(1000, 1003), Fault("append.ticket", nth=3, stop=True)) as late:
        assert draw_all(buffer) == ([] if linked else [1000])
        group = range(turn(buffer, 0), 1000)[:GROUP]
        write(buffer, group)
        if killed:
            late.kill()
            assert draw_all(buffer) == [*group]
        else:
            late.signal(signal.SIGCONT)
            assert await_stop(late)  # in the next row
            assert draw_all(buffer) == [1000 if linked else 1001, *group]
            late.signal(signal.SIGCONT)
            assert late.wait() == 0
            assert draw_all(buffer) == ([1001, 1002] if linked else [1002])
        items = range(turn(buffer, 500), 1000)[: CAPACITY - linked]  # nothing keeps room any more
        write(buffer, items)
        assert draw_all(buffer) == [*items]


def turn_in_many_processes(linked, killed):
    """Two writers and two learners turn the ring. Returns how often each item came."""
    items = TURNS * CAPACITY // 2
    late_numbers = range(2 * items, 2 * items + 3)
    later = range(late_numbers.stop, late_numbers.stop + 2 * CAPACITY)
    came = [shared_counters(later.stop) for _ in range(2)]

    def learn(counts):
        while True:
            for number in buffer.sample(GROUP, at_least=1)["obs"].tolist():
                counts[number] += 1

    def write_groups(numbers):
        for first in numbers[::GROUP]:
            write(buffer, range(first, first + GROUP))

    def all_came(numbers):
        return all(came[0][number] + came[1][number] for number in numbers)

    with (
        queue(linked) as buffer,
        stopped(buffer, late_numbers) as late,
        Forked(learn, came[0]) as one,
        Forked(learn, came[1]) as two,
    ):
        with Forked(write_groups, range(items)) as three, Forked(write_groups, range(items, 2 * items)) as four:
            assert three.wait() == four.wait() == 0
        eventually(lambda: all_came(range(2 * items)))
        if killed:
            late.kill()
        else:
            late.signal(signal.SIGCONT)
            assert late.wait() == 0
            eventually(lambda: all_came(late_numbers))
        write_groups(later)
        eventually(lambda: all_came(later))
        buffer.stop()
        assert one.wait() == two.wait() == 0
    counts = [a + b for a, b in zip(*came, strict=True)]
    late_counts = [counts.pop(late_numbers.start) for _ in late_numbers]
    return sorted(set(counts)), late_counts


def reopen_what_a_stopped_writer_wrote_last(path):
    """A row is written after many turns of the ring. Then all die before anybody looks. Returns what is found later."""

    def run():
        buffer = queue(False, path=path)
        with stopped(buffer, range(1000, 1003), Fault("append.done", nth=2)) as late:
            assert draw_all(buffer) == [1000]
            write(buffer, range(turn(buffer, 0), 1000)[:GROUP])
            late.signal(signal.SIGCONT)
            assert late.wait() == DIED
            os.kill(os.getpid(), signal.SIGKILL)

    with Forked(run) as process:
        assert process.wait() == -signal.SIGKILL
    with tr.ReplayBuffer.open(path) as buffer:
        came = draw_all(buffer)
        turn(buffer, 0)
        return came


def name_a_stopped_writer():
    """With a window the others wait for it. Their error and the advice to who looks at the queue name it."""
    name = f"test {os.getpid()} stopped"
    with queue(False, sampler=tr.Fifo(window=1.0), name=name) as buffer, stopped(buffer, range(2)) as late:
        assert draw_all(buffer) == [0]
        writer = buffer.writer()
        writer.timeout = 0.2
        for _ in range(CAPACITY - 1):  # up to the row that is being written
            writer.append(obs=0)
            draw_all(buffer)
        with pytest.raises(tr.ReplayTimeout) as caught:
            writer.append(obs=0)
        with look_at(buffer) as live:
            (told,) = (advice.text for advice in advise(after(live, lambda: None)) if advice.topic == "silent")
        assert told == (
            f"Process {late.pid}, a writer, is stopped, and the row that it is writing leaves the other writers no "
            f"room: continue it with `kill -CONT {late.pid}`."
        )
        how = f"which is stopped (continue it with `kill -CONT {late.pid}`)"
        assert f"the oldest row is being written by process {late.pid}, {how}" in str(caught.value)
        late.signal(signal.SIGCONT)
        assert late.wait() == 0
        assert draw_all(buffer)[0] == 1
        writer.append(obs=0)


def write_value(buffer, length):
    with buffer.writer() as writer:
        writer.append(x=bytes(length))


def name_pages_of_stopped_writers():
    """One page of each four of a ring is busy. A row of four finds no place, and its writer says what is missing."""
    with tr.ReplayBuffer({"x": tr.Ragged(torch.uint8)}, 100, ragged_bytes=1024) as buffer, ExitStack() as ends:
        writer, late = buffer.writer(), []
        for _ in range(4):
            writer.append(x=bytes(3 * 64))
            fault = Fault("pages.busy", stop=True)
            late.append(ends.enter_context(faulty(write_value, buffer, 64, faults=[fault])))
            assert await_stop(late[-1])
        with (
            mock.patch("torchreplay.buffer.writer.STALL_LIMIT", 0.2),
            pytest.raises(tr.ReplayTimeout, match=r"no run of pages came free for .* all over the 1,024 ragged_bytes"),
        ):
            writer.append(x=bytes(4 * 64))
        for process in late:
            process.signal(signal.SIGCONT)
            assert process.wait() == 0
        writer.append(x=bytes(4 * 64))
