"""Saves and loads that Ctrl-C interrupts at any moment leave no thread behind."""

import gc
import os

import pytest
import torch
from belongings import our_threads, threads
from forked import Forked, eventually
from interrupts import assert_interrupted_calls_leave_no_thread
from saved_rows import assert_rows_are_those_of_their_keys, filled

import torchreplay as tr
from torchreplay.segment.thread_pool import ThreadPool

TIMES = 300


def in_a_process_of_its_own(body, *args):
    """Whose only thread is the one that gets the signals."""
    with Forked(body, *args) as child:
        assert child.wait(300) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("small_files")
@pytest.mark.timeout(300)
def test_interrupted_loads_leave_no_thread(tmp_path):
    filled(500, 500).save(tmp_path)
    in_a_process_of_its_own(
        assert_interrupted_calls_leave_no_thread, lambda: tr.ReplayBuffer.load(tmp_path).close(), TIMES
    )


@pytest.mark.slow
@pytest.mark.usefixtures("small_files")
@pytest.mark.timeout(300)
def test_interrupted_saves_leave_no_thread_and_a_checkpoint_that_loads(tmp_path):
    buffer = filled(500, 500)
    buffer.save(tmp_path)
    in_a_process_of_its_own(assert_interrupted_calls_leave_no_thread, lambda: buffer.save(tmp_path), TIMES)
    batch = tr.ReplayBuffer.load(tmp_path).gather(torch.arange(500))
    assert_rows_are_those_of_their_keys(batch)
    assert len(batch["key"]) == 500


def use_pool():
    with ThreadPool(3) as pool:
        futures = [pool.submit(os.getpid) for _ in range(3)]
        assert {pool.result(future) for future in futures} == {os.getpid()}


@pytest.mark.timeout(300)
def test_threads_end_wherever_the_call_that_started_them_was_interrupted():
    in_a_process_of_its_own(assert_interrupted_calls_leave_no_thread, use_pool, 5000)


def test_threads_end_when_nobody_has_their_owner_any_more():
    in_a_process_of_its_own(assert_threads_end_with_their_pool)  # here threads of other tests may end meanwhile


def assert_threads_end_with_their_pool():
    before = threads()
    pool = ThreadPool(3)
    assert len(threads() - before) == 3
    del pool
    gc.collect()
    eventually(lambda: threads() <= before)


def test_calls_that_have_not_begun_when_another_fails_are_not_made():
    def call_twice():
        with ThreadPool(0) as pool:
            future = pool.submit(lambda: 1 // 0)
            pool.submit(made.append, 1)
            pool.result(future)

    made = []
    with pytest.raises(ZeroDivisionError):
        call_twice()
    assert made == []


def pool_in_a_forked_child():
    with ThreadPool(2) as pool:
        pool.result(pool.submit(int))
        if os.fork() == 0:
            raise SystemExit  # ends the context, without the threads
    assert os.wait()[1] == 0


def test_a_child_that_was_forked_beside_threads_waits_for_none_of_them():
    def body():
        try:
            pool_in_a_forked_child()
        except SystemExit:
            os._exit(0)

    with Forked(body) as child:
        assert child.wait(30) == 0


def test_the_look_after_each_test_finds_threads_of_python_and_native_ones():
    before = our_threads()
    with ThreadPool(1) as pool, filled(50, 50) as buffer:
        pool.result(pool.submit(int))
        batches = iter(tr.ReplayDataset(buffer, 8, prefetch=2))
        next(batches)
        found = sorted(thread.split(" ", 2)[2] for thread in our_threads() - before)
        assert found == ["in _work", "that draws ahead"]
        batches.close()
    eventually(lambda: our_threads() <= before)
