"""Memory that is reserved while a checkpoint is loaded into it: no row goes where there is none yet."""

import errno
import gc
import os
import threading
import time

import numpy as np
import pytest
import torch
from belongings import descriptors, threads
from forked import eventually

import torchreplay as tr
from torchreplay import _C
from torchreplay.checkpoint import buffer_checkpoint
from torchreplay.segment import reservation as memory
from torchreplay.segment.thread_pool import ThreadPool

PIECE = 2 << 20
ROWS, ROW_BYTES = 2048, 4096
SPEC = {name: tr.Field((ROW_BYTES,), np.uint8) for name in ("a", "b")} | {"small": tr.Field((), torch.int64)}
SIZE, ARRAYS = 14 * PIECE - 4096, [(PIECE - 4096, 3000), (7 * PIECE, ROW_BYTES)]
"""Memory with two arrays of 2048 slots: one that begins and ends within pieces, one that does neither."""


def in_a_thread():
    return threading.get_ident() != threading.main_thread().ident


class Taken:
    """The pieces that reservations have taken, those of their threads as slowly as this says."""

    def __init__(self, monkeypatch):
        self.pieces = []
        self.before_each = lambda: time.sleep(0.003)
        take = memory.Reservation._take

        def watched(reservation, fd, at):
            if in_a_thread():
                self.before_each()
            take(reservation, fd, at)
            self.pieces.append(at)

        monkeypatch.setattr(memory, "PIECE", PIECE)
        monkeypatch.setattr(memory.Reservation, "_take", watched)

    def covers(self, begin, end):
        return {*range(begin // PIECE * PIECE, end, PIECE)} <= {*self.pieces}


@pytest.fixture
def taken(monkeypatch):
    return Taken(monkeypatch)


def test_whoever_waited_for_slots_finds_them_and_all_but_the_arrays_reserved(taken):
    with memory.begin_reservation(SIZE, "test", ARRAYS, ROWS) as reservation:
        ends = [begin + ROWS * stride for begin, stride in ARRAYS]
        assert taken.covers(0, ARRAYS[0][0])
        assert taken.covers(ends[0], ARRAYS[1][0])
        assert taken.covers(ends[1], SIZE)
        assert not taken.covers(0, SIZE)
        for slots in (*range(1, ROWS, 100), ROWS):
            reservation.wait(slots)
            assert all(taken.covers(begin, begin + slots * stride) for begin, stride in ARRAYS)
        assert sorted(taken.pieces) == [*range(0, SIZE, PIECE)]


def test_nobody_waits_for_more_than_the_slots_asked_for(taken):
    may_take = threading.Semaphore(0)
    taken.before_each = lambda: may_take.acquire(timeout=30)
    with memory.begin_reservation(SIZE, "test", ARRAYS, ROWS) as reservation:
        at_first = len(taken.pieces)
        reservation.wait(0)
        may_take.release()  # the first piece of the second array: the first one's is there, with what precedes it
        reservation.wait(1)
        assert taken.pieces[at_first:] == [ARRAYS[1][0]]
        may_take.release(100)


def test_what_is_reserved_all_at_once_needs_no_thread(taken):
    before = threads()
    fd = memory.reserve(SIZE, "test")
    try:
        assert threads() <= before
        assert taken.pieces == [*range(0, SIZE, PIECE)]
        assert os.fstat(fd).st_size == SIZE
        assert os.fstat(fd).st_blocks * 512 >= SIZE
    finally:
        os.close(fd)


def test_closing_ends_what_is_not_reserved_yet(taken):
    before = descriptors(), threads()
    memory.begin_reservation(SIZE, "test", ARRAYS, ROWS).close()
    eventually(lambda: descriptors() <= before[0] and threads() <= before[1])
    assert not taken.covers(0, SIZE)


@pytest.fixture
def saved(taken, tmp_path, monkeypatch):
    """Returns a checkpoint of many files: of rows whose values tell their keys."""
    monkeypatch.setattr(buffer_checkpoint, "SHARD_BYTES", 100 * 2 * ROW_BYTES)
    with tr.ReplayBuffer(SPEC, ROWS, sampler=tr.Prioritized(), seed=0) as buffer:
        for key in range(0, ROWS + 300, 100):
            keys = torch.arange(key, key + 100)
            buffer.extend(small=keys, a=_bytes_of(keys, 1), b=_bytes_of(keys, 3))
        buffer.save(tmp_path / "saved")
    taken.pieces.clear()
    return tmp_path / "saved"


def _bytes_of(keys, factor):
    return (keys[:, None] * factor + torch.arange(ROW_BYTES)).to(torch.uint8)


@pytest.mark.parametrize("capacity", [ROWS, ROWS // 2 + 7, 2 * ROWS + 7])
def test_rows_are_placed_in_reserved_memory_only(taken, saved, monkeypatch, capacity):
    native, layout, waited, arrays = _C.Import, _C.segment_layout, [], []
    waiting, wait = threading.Event(), memory.Reservation.wait

    def announced_wait(reservation, slots):
        if reservation._left and reservation._left[0][0] < slots:
            waiting.set()
        wait(reservation, slots)
        waiting.clear()

    monkeypatch.setattr(memory.Reservation, "wait", announced_wait)
    taken.before_each = lambda: waiting.wait(30)  # nothing is taken ahead

    def told(*args):
        size, found = layout(*args)
        arrays.extend(found)
        return size, found

    class Import:
        def __init__(self, *args):
            self._native = native(*args)

        def place(self, columns):
            slots = int((columns[len(SPEC)] % capacity).max()) + 1
            waited.append(all(taken.covers(begin, begin + slots * stride) for begin, stride in arrays))
            self._native.place(columns)

        def __getattr__(self, name):
            return getattr(self._native, name)

    monkeypatch.setattr(_C, "segment_layout", told)
    monkeypatch.setattr(_C, "Import", Import)
    with tr.ReplayBuffer.load(saved, capacity) as buffer:
        assert len(arrays) == 2
        assert len(waited) > 10
        assert all(waited)
        batch = buffer.sample(512)
        assert torch.equal(batch["small"], batch["key"])
        assert torch.equal(batch["a"], _bytes_of(batch["key"], 1))
        assert torch.equal(batch["b"], _bytes_of(batch["key"], 3))


def test_memory_that_gives_out_meanwhile_is_an_error_and_free_at_once(taken, saved, monkeypatch):
    def give_out(*_):
        if in_a_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(memory.os, "posix_fallocate", give_out)
    gc.collect()
    before = descriptors(), threads()
    gc.disable()
    try:
        with pytest.raises(MemoryError, match=r"replay buffer needs 16\.36 MiB of memory: No space left") as raised:
            tr.ReplayBuffer.load(saved)
        del raised
        eventually(lambda: descriptors() <= before[0] and threads() <= before[1])
    finally:
        gc.enable()


def test_where_no_thread_can_be_started_whoever_waits_reserves(taken, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("torchreplay.segment.thread_pool.start_new_thread", refuse)
    before = descriptors()
    with memory.begin_reservation(SIZE, "test", ARRAYS, ROWS) as reservation:
        reservation.wait(ROWS)
        assert reservation.complete
        assert taken.covers(0, SIZE)
    assert descriptors() <= before


def test_ctrl_c_while_a_reservation_is_closed_leaves_nothing(taken, monkeypatch):
    def interrupted(pool):
        raise KeyboardInterrupt

    before = descriptors(), threads()
    reservation = memory.begin_reservation(SIZE, "test", ARRAYS, ROWS)
    monkeypatch.setattr(ThreadPool, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reservation.close()
    del reservation
    eventually(lambda: descriptors() <= before[0] and threads() <= before[1])
    assert not taken.covers(0, SIZE)


@pytest.mark.parametrize(("seconds", "huge"), [(0.2, 14), (0.5, 4), (1.0, 2), (5.0, 1)])
def test_huge_pages_are_taken_until_they_are_slow_on_average(taken, monkeypatch, seconds, huge):
    now, asked = [0.0], []

    def take_huge_pages(fd, at, size):
        asked.append(at)
        now[0] += seconds
        return True

    monkeypatch.setattr(_C, "take_huge_pages", take_huge_pages)
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    os.close(memory.reserve(SIZE, "test"))
    assert len(asked) == huge


def test_one_slow_piece_does_not_end_huge_pages(taken, monkeypatch):
    now, asked = [0.0], []

    def take_huge_pages(fd, at, size):
        asked.append(at)
        now[0] += 0.9 if len(asked) in (1, 10) else 0.05
        return True

    monkeypatch.setattr(_C, "take_huge_pages", take_huge_pages)
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    os.close(memory.reserve(SIZE, "test"))
    assert len(asked) == 14


def test_no_huge_pages_are_asked_for_once_there_are_none(taken, monkeypatch):
    asked = []
    monkeypatch.setattr(_C, "take_huge_pages", lambda fd, at, size: asked.append(at))
    os.close(memory.reserve(SIZE, "test"))
    assert len(asked) == 1
