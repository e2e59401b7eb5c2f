"""Explorers as plain processes: no Ray, the ways in which they end, and what does not depend on what runs them."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from child_processes import children_of
from forked import eventually
from numbered_rows import is_running, make_buffer, row

import torchreplay as tr
from torchreplay.ray import ExplorerPool, ExplorersFailed
from torchreplay.workers.process_backend import ProcessBackend
from torchreplay.workers.worker_process import Launch
from torchreplay.workers.worker_table import WorkerTable

DRIVER = """
import os, signal, sys, torch, torchreplay as tr
sys.modules["ray"] = None  # importing it fails
from torchreplay.ray import ExplorerPool

LARGE = bytes(1 << 20)  # travels with the function: more than a pipe holds

def explore(ctx):
    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C in a terminal, for all its processes
    while len(LARGE):
        ctx.buffer.extend(x=torch.zeros(1))

if __name__ == "__main__":
    buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=100)
    with ExplorerPool(explore, 1, buffer, backend="process", max_restarts=0) as pool:
        buffer.sample(1)
        print(pool.stats()[0].pid, flush=True)
        sys.stdin.readline()
"""


@pytest.mark.slow
def test_the_explorers_of_a_program_without_ray_outlive_ctrl_c_and_die_with_it(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    with subprocess.Popen(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tr.__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        pid = int(driver.stdout.readline())
        assert is_running(pid)
        driver.send_signal(signal.SIGKILL)
        eventually(lambda: not is_running(pid))


@pytest.mark.slow
def test_a_child_of_multiprocessing_ends_with_its_explorers_running():
    def explore(ctx):
        with ctx.writer() as writer:
            while not ctx.stopped:
                writer.append(x=0.0)

    def start_and_return():
        buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=100)
        ExplorerPool(explore, 1, buffer, backend="process").start()
        buffer.sample(1)

    child = multiprocessing.get_context("fork").Process(target=start_and_return)
    child.start()
    try:
        child.join(timeout=60)
        assert child.exitcode == 0
    finally:
        child.kill()


def test_how_a_process_ended_is_reported():
    def end(ctx):
        if ctx.index == 0:
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    pool = ExplorerPool(end, 2, make_buffer(), max_restarts=0, backend="process")
    with pool, pytest.raises(ExplorersFailed, match="each of 2 workers"):
        pool.wait(150)
    by_code, by_signal = sorted(pool.errors, key=lambda failure: failure.index)
    assert by_code.died
    assert by_signal.died
    assert "exit code 3" in by_code.error
    assert "signal 9 (Killed)" in by_signal.error


def test_processes_that_an_explorer_started_end_with_it():
    def explore_with_a_simulator(ctx):
        simulator = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,), daemon=True)
        simulator.start()
        with ctx.writer() as writer:
            writer.append(**row(ctx.index, ctx.seed, simulator.pid))

    buffer = make_buffer()
    with ExplorerPool(explore_with_a_simulator, 1, buffer, backend="process") as pool:
        assert pool.wait(150)
        assert pool.stats()[0].state == "finished"
        pid = int(buffer.storage["count"][0])
        eventually(lambda: not is_running(pid))


@pytest.mark.slow
def test_a_program_that_collects_dead_children_itself_keeps_its_explorers():
    def die_once(ctx):
        ctx.record(episode_return=1.0, episode_length=1)
        while ctx.restarts == 0:
            time.sleep(0.01)

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects them
    try:
        with ExplorerPool(die_once, 1, make_buffer(), restart_delay=0.0, backend="process") as pool:
            eventually(lambda: pool.stats()[0].episodes, 150)
            os.kill(pool.stats()[0].pid, signal.SIGKILL)
            assert pool.wait(150)
            assert (pool.stats()[0].state, pool.stats()[0].episodes) == ("finished", 2)
    finally:
        signal.signal(signal.SIGCHLD, before)
    (failure,) = pool.errors
    assert failure.died
    assert "signal 9 (Killed)" in failure.error


def test_draining_lets_every_explorer_complete_its_episode():
    length = 100

    def play(ctx):
        writer = ctx.writer()
        while not ctx.stopped:
            for count in range(length):  # takes longer than a stop would wait for it
                writer.append(**row(ctx.index, ctx.seed, count))
                time.sleep(0.01)
            ctx.record(episode_return=1.0, episode_length=length)

    buffer = make_buffer()
    pool = ExplorerPool(play, 1, buffer, backend="process").start()
    eventually(lambda: len(buffer), 150)
    pid = pool.stats()[0].pid
    assert pool.drain()
    (stats,) = pool.stats()
    assert stats.state == "stopped"
    assert stats.rows == stats.steps == len(buffer) == stats.episodes * length
    assert not is_running(pid)
    assert pool.drain()  # again: nothing to do


def test_draining_ends_who_does_not_come_to_an_end():
    def sleep(ctx):
        ctx.record(episode_return=0.0, episode_length=1)
        time.sleep(3600)

    pool = ExplorerPool(sleep, 1, make_buffer(), backend="process").start()
    eventually(lambda: pool.stats()[0].episodes, 150)
    assert not pool.drain(timeout=0.1)
    assert not is_running(pool.stats()[0].pid)
    assert not pool.errors


@pytest.mark.slow
def test_an_explorers_heartbeat_tells_how_long_ago_it_was_last_heard_of():
    def explore_until_the_third_row(ctx):
        writer = ctx.writer()
        for count in range(3):
            writer.append(**row(ctx.index, ctx.seed, count))
        ctx.record(episode_return=0.0, episode_length=3)
        time.sleep(3600)

    pool = ExplorerPool(explore_until_the_third_row, 1, make_buffer(), backend="process")
    assert math.isnan(pool.stats()[0].heartbeat_age)
    with pool:
        began = time.monotonic()
        eventually(lambda: pool.stats()[0].episodes, 150)
        first = pool.stats()[0].heartbeat_age
        assert 0 <= first <= time.monotonic() - began
        eventually(lambda: pool.stats()[0].heartbeat_age > first + 0.2)
        assert pool.stats()[0].rows == 3


@pytest.mark.slow
def test_processes_whose_function_has_returned_are_waited_for_together_and_not_by_the_supervisor():
    def linger(ctx):
        threading.Thread(target=time.sleep, args=(3600,)).start()  # as a logger's or a loader's

    buffer, table = make_buffer(), WorkerTable(3)
    backend = ProcessBackend((ExplorerPool(linger, 3, buffer)._make_work(), table))
    launches = [Launch(index, 3, 0, 0) for index in range(3)]
    runs = [backend.launch(launch) for launch in launches]
    pids = [run.pid for run in runs]
    eventually(lambda: len(backend.wait(runs, 1.0)) == 3, 150)
    for run in runs:
        assert backend.outcome(run).kind == "ended"
        backend.release(run)
    assert [is_running(pid) for pid in pids] == [True] * 3
    assert not backend.is_free(1)  # no successor beside the one before
    eventually(lambda: backend.is_free(1))
    assert not is_running(pids[1])
    backend.await_exit([])
    assert not any(is_running(pid) for pid in pids)
    backend.close()


TRANSITIONS = {
    "obs": tr.Field(),
    "action": tr.Field(),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}


@pytest.mark.slow
def test_a_learner_does_not_wait_for_explorers_that_fail_after_each_reset(monkeypatch):
    monkeypatch.setattr("torchreplay.workers.worker_pool._LEAST_DELAY", 0.01)
    monkeypatch.setattr("torchreplay.segment.waits.RETURN_GRACE", 0.2)

    def explore(ctx):
        ctx.writer().reset(obs=0.0)
        raise KeyError("a mistake in the loop")

    buffer = tr.ReplayBuffer(TRANSITIONS, 100, view=tr.Transitions())
    pool = ExplorerPool(explore, 2, buffer, restart_delay=0.0, backend="process")
    with pytest.raises(tr.WouldBlockForever) as caught, pool:
        buffer.sample(1)
    (note,) = caught.value.__notes__
    assert note.startswith("explorer 0 of 2 and 1 others failed last with:")
    assert note.count("a mistake in the loop") == 2  # in the line of the source, and in the error
    assert buffer.stats().rows_written >= 10


@pytest.mark.slow
def test_explorers_whose_standard_streams_are_gone_finish_and_fail_as_others_do():
    def break_pipe(number):
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, number)

    def explore(ctx):
        if ctx.index % 4 == 0:
            sys.stdout = sys.stderr = None
        elif ctx.index % 4 == 1:
            sys.stdout.close()
            sys.stderr.close()
        elif ctx.index % 4 == 2:
            break_pipe(1)
            sys.stdout = os.fdopen(1, "w", closefd=False)  # buffered, whatever PYTHONUNBUFFERED says
            sys.stdout.write("lost")
        else:
            os.close(1)
            os.close(2)
        if ctx.index >= 4:
            raise ValueError(f"of explorer {ctx.index}")

    with ExplorerPool(explore, 8, make_buffer(), max_restarts=0, backend="process") as pool:
        eventually(lambda: {stats.state for stats in pool.stats()} <= {"finished", "failed"}, 150)
        stats = pool.stats()
    assert [one.state for one in stats[:4]] == ["finished"] * 4
    assert [one.last_error for one in stats[4:]] == [f"ValueError: of explorer {index}" for index in range(4, 8)]
    assert not any(failure.died for failure in pool.errors)


def every_process_of(pool):
    """The explorers of a pool and the process that starts them."""
    pids = [stats.pid for stats in pool.stats()]
    return [*pids, int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])]


def write_until_stopped(ctx):
    writer = ctx.writer()
    while not ctx.stopped:
        writer.append(**row(ctx.index, ctx.seed, 0))
        time.sleep(0.001)


@pytest.mark.slow
def test_signals_that_tell_the_program_something_do_not_end_its_explorers():
    with ExplorerPool(write_until_stopped, 2, make_buffer(), backend="process") as pool:
        told = 0
        while not all(stats.rows for stats in pool.stats()):  # while they start, too
            for child, command in children_of(os.getpid()).items():
                if "fork_server" in command:
                    os.kill(child, signal.SIGUSR1)
                    told += 1
            time.sleep(0.02)
        assert told > 10
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            before = [stats.rows for stats in pool.stats()]
            for pid in every_process_of(pool):
                os.kill(pid, number)
            eventually(lambda b=before: all(s.rows > r + 100 for s, r in zip(pool.stats(), b, strict=True)))
        assert [(stats.state, stats.restarts) for stats in pool.stats()] == [("running", 0)] * 2
        assert not pool.errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT, signal.SIGALRM], ids=lambda number: number.name)
def test_explorers_that_a_signal_ends_are_reported_and_restarted(number, caplog):
    with ExplorerPool(write_until_stopped, 2, make_buffer(), restart_delay=0.0, backend="process") as pool:
        eventually(lambda: all(stats.rows for stats in pool.stats()), 150)
        for pid in every_process_of(pool):
            os.kill(pid, number)
        eventually(lambda: all(stats.restarts and stats.state == "running" for stats in pool.stats()), 150)
    assert len([record for record in caplog.records if "failed (restart 1 in 0.1 s)" in record.getMessage()]) >= 1
    assert {failure.index for failure in pool.errors} == {0, 1}


@pytest.mark.slow
def test_an_explorer_that_hangs_is_ended_and_one_that_waits_for_the_limiter_is_not():
    def explore(ctx):
        writer = ctx.writer()
        if ctx.index == 1:
            eventually(lambda: len(buffer))  # what the other one writes still has room
            while not ctx.stopped:
                writer.append(**row(ctx.index, ctx.seed, 0))
        elif not ctx.restarts:
            writer.append(**row(ctx.index, ctx.seed, 0))
            time.sleep(3600)  # in its environment, say

    limiter = tr.SamplesPerInsert(1.0, min_size=10)
    buffer = make_buffer(limiter=limiter)
    with ExplorerPool(explore, 2, buffer, restart_delay=0.0, heartbeat_timeout=3.0, backend="process") as pool:
        eventually(lambda: pool.stats()[0].state == "finished", 150)
        waited = time.monotonic() + 4.0
        eventually(lambda: time.monotonic() > waited)
        assert pool.stats()[1].restarts == 0
        assert pool.stats()[1].heartbeat_age < 3.0
    (failure,) = pool.errors
    assert failure.died
    assert failure.error.startswith("hung: no heartbeat for ")
