"""The process that starts plain explorers: what they get of the program, and what happens when it dies."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path

import numpy as np
import pytest
from child_processes import children_of
from forked import eventually
from numbered_rows import is_running, make_buffer, row

import torchreplay as tr
from torchreplay.ray import ExplorerPool, ExplorersFailed
from torchreplay.workers import fork_server
from torchreplay.workers.process_backend import ProcessBackend
from torchreplay.workers.worker_process import Launch
from torchreplay.workers.worker_table import WorkerTable


def run_program(directory, text):
    (directory / "program.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": str(Path(tr.__file__).parents[1])}
    return subprocess.run([sys.executable, "program.py"], cwd=directory, env=env, capture_output=True, text=True)


def fork_server_of(pool):
    """The process that has started the explorers of a pool."""
    parents = {Path(f"/proc/{stats.pid}/stat").read_text().rpartition(")")[2].split()[1] for stats in pool.stats()}
    (parent,) = parents
    return int(parent)


PROGRAM = """
import atexit, os, random, sys
import mujoco
import numpy as np
import torch
import torchreplay as tr
from torchreplay.ray import ExplorerPool

WHERE = os.getcwd()

class OfMain:
    word = "main"

def explore(ctx):
    atexit.register(print, f"explorer {ctx.index} says goodbye\\n", end="")  # one write, also where none is buffered
    with open(f"seen-{ctx.index}", "w") as file:
        print(OfMain.word, sys.argv[0], os.environ["SET_BY_PROGRAM"], os.getcwd() == WHERE, file=file)
        print(np.random.rand(), torch.rand(()).item(), random.random(), file=file)
    with ctx.writer() as writer:
        writer.append(x=float(ctx.index))

if __name__ == "__main__":
    os.environ["SET_BY_PROGRAM"] = "set"
    buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=10)
    with ExplorerPool(explore, 3, buffer, backend="process", max_restarts=0) as pool:
        assert pool.wait(60)
    print("rows", sorted(buffer.storage["x"][:3].tolist()))
"""


def test_explorers_see_the_program_as_spawned_processes_do(tmp_path):
    # It stands for a package that the fork server imports, and that removes something shared at the end.
    (tmp_path / "mujoco.py").write_text("import atexit\natexit.register(print, 'a package removes what it has made')")
    done = run_program(tmp_path, PROGRAM)
    assert done.stderr == ""
    removed, *goodbyes, rows = sorted(done.stdout.splitlines())
    assert removed == "a package removes what it has made"  # the program alone does
    assert rows == "rows [0.0, 1.0, 2.0]"
    assert goodbyes == [f"explorer {index} says goodbye" for index in range(3)]
    seen = [(tmp_path / f"seen-{index}").read_text().split() for index in range(3)]
    assert [words[:4] for words in seen] == [["main", "program.py", "set", "True"]] * 3
    for drawn in (4, 5, 6):  # of NumPy, torch and Python: nobody has seeded them
        assert len({words[drawn] for words in seen}) == 3


SHARING = """
from multiprocessing import shared_memory
import torchreplay as tr
from torchreplay.ray import ExplorerPool

def explore(ctx, name="of-a-program"):
    memory = shared_memory.SharedMemory(name)
    memory.buf[ctx.index] = 1
    memory.close()

if __name__ == "__main__":
    memory = shared_memory.SharedMemory("of-a-program", create=True, size=4)
    buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=10)
    for _ in range(2):
        with ExplorerPool(explore, 2, buffer, backend="process", max_restarts=0) as pool:
            assert pool.wait(60)
            pool.check()
    again = shared_memory.SharedMemory("of-a-program")
    print(again.buf[:2].tolist())
    again.close()
    memory.unlink()
"""


@pytest.mark.slow
def test_shared_memory_of_the_program_outlives_explorers_that_have_used_it(tmp_path):
    done = run_program(tmp_path, SHARING.replace("of-a-program", f"torchreplay_{os.getpid()}_of-a-program"))
    assert (done.stdout, done.stderr) == ("[1, 1]\n", "")


@pytest.mark.slow
def test_a_program_without_descriptors_left_keeps_the_explorers_it_has():
    def wait_for_the_end(ctx):
        while not ctx.stopped:
            time.sleep(0.01)

    work, table = ExplorerPool(wait_for_the_end, 2, make_buffer())._make_work(), WorkerTable(2)
    backend = ProcessBackend((work, table))
    eventually(lambda: backend.is_free(0), 150)
    first = backend.launch(Launch(0, 2, 0, 0))
    refused, held = 0, []
    try:
        for left in range(10):  # each step of a launch finds none left
            with suppress(OSError):
                while True:
                    held.append(os.dup(0))
            for _ in range(min(left, len(held))):
                os.close(held.pop())
            run = None
            with suppress(OSError):
                run = backend.launch(Launch(1, 2, 0, 0))
            if run is None:
                refused += 1
            else:
                backend.kill(run)
                backend.outcome(run)
                backend.release(run)
            assert is_running(first.pid)
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert 2 <= refused <= 8
    backend.kill(first)
    backend.outcome(first)
    backend.release(first)
    backend.await_exit([])
    backend.close()


UNGUARDED = """
import torchreplay as tr
from torchreplay.ray import ExplorerPool

def explore(ctx):
    raise AssertionError("never called")

buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=10)
with ExplorerPool(explore, 1, buffer, backend="process", max_restarts=0) as pool:
    pool.wait(60)
    pool.check()
"""


@pytest.mark.slow
def test_a_program_without_a_guard_is_told_so(tmp_path):
    done = run_program(tmp_path, UNGUARDED)
    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr
    assert "ExplorersFailed" in done.stderr
    assert "never called" not in done.stderr


FROM_INPUT = """
import torchreplay as tr
from torchreplay.explorers import ExplorerPool

def explore(ctx):
    with ctx.writer() as writer:
        writer.append(x=1.0)

buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=10)
with ExplorerPool(explore, 1, buffer, max_restarts=0) as pool:
    pool.wait(60)
print("rows", len(buffer))
"""


@pytest.mark.slow
def test_a_program_from_the_standard_input_runs_or_says_how_it_would(tmp_path):
    def run(text):
        env = {**os.environ, "PYTHONPATH": str(Path(tr.__file__).parents[1])}
        return subprocess.run([sys.executable], input=text, cwd=tmp_path, env=env, capture_output=True, text=True)

    done = run(FROM_INPUT)
    assert (done.stdout, done.stderr) == ("rows 1\n", "")
    without = run("import sys; sys.modules['cloudpickle'] = None" + FROM_INPUT)
    assert without.returncode == 1
    assert "TypeError" in without.stderr
    assert "Run it as `python script.py`, or install cloudpickle" in without.stderr


BROKEN_MAIN = """
import os, sys
sys.dont_write_bytecode = True
import helper_of_the_program
import torchreplay as tr
from torchreplay.explorers import ExplorerPool

def explore(ctx):
    print("never called")

if __name__ == "__main__":
    os.remove("helper_of_the_program.py")
    buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=10)
    with ExplorerPool(explore, 2, buffer, max_restarts=0) as pool:
        pool.wait(60)
"""


@pytest.mark.slow
def test_a_main_module_that_explorers_cannot_import_is_named_with_its_error(tmp_path):
    (tmp_path / "helper_of_the_program.py").touch()
    done = run_program(tmp_path, BROKEN_MAIN)
    assert done.returncode == 1
    said = "ModuleNotFoundError: No module named 'helper_of_the_program'"
    assert f"{said}, when its process imported the program's main module" in done.stderr
    _, _, failed = done.stderr.partition("ExplorersFailed: ")
    assert said in failed
    assert "exit code" not in done.stderr
    assert "never called" not in done.stdout


WITHOUT_STREAMS = """
import contextlib, torchreplay as tr
from torchreplay.explorers import ExplorerPool, ExplorersFailed

def explore(ctx):
    print("to nowhere", flush=True)
    if ctx.index:
        raise ValueError("of the second explorer")

if __name__ == "__main__":
    buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=10)
    with ExplorerPool(explore, 2, buffer, max_restarts=0) as pool:
        with contextlib.suppress(ExplorersFailed):  # where both fail
            pool.wait(60)
        with open("seen", "w") as file:
            for stats in pool.stats():
                print(stats.state, stats.last_error, file=file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("closing", [">&-", "2>&-", "<&- >&- 2>&-", "| true"])
def test_a_program_without_standard_streams_hears_how_its_explorers_ended(closing, tmp_path):
    (tmp_path / "program.py").write_text(WITHOUT_STREAMS)
    env = {**os.environ, "PYTHONPATH": str(Path(tr.__file__).parents[1])}
    subprocess.run(f"{sys.executable} program.py {closing}", shell=True, cwd=tmp_path, env=env, capture_output=True)
    first, second = (tmp_path / "seen").read_text().splitlines()
    if closing == "| true":
        assert first == "failed BrokenPipeError: [Errno 32] Broken pipe"  # print itself has raised it
    else:
        assert first == "finished None"
        assert second == "failed ValueError: of the second explorer"


def test_the_death_of_the_fork_server_costs_one_restart_of_each_explorer():
    def explore(ctx):
        writer, count = ctx.writer(), 0
        while not ctx.stopped:
            writer.append(**row(ctx.index, ctx.seed, count))
            count += 1
            time.sleep(0.001)

    buffer = make_buffer()
    with ExplorerPool(explore, 3, buffer, backend="process", restart_delay=0.0) as pool:
        eventually(lambda: all(stats.rows for stats in pool.stats()), 150)
        before = [stats.pid for stats in pool.stats()]
        server = fork_server_of(pool)
        assert server in children_of(os.getpid())
        os.kill(server, signal.SIGKILL)
        eventually(lambda: not any(map(is_running, before)))
        eventually(lambda: all(stats.restarts == 1 and stats.state == "running" for stats in pool.stats()), 150)
        rows = [stats.rows for stats in pool.stats()]
        eventually(lambda: all(np.array([stats.rows for stats in pool.stats()]) > rows))
        assert fork_server_of(pool) != server
    assert len(pool.errors) == 3
    assert all(failure.died and "that starts workers died" in failure.error for failure in pool.errors)
    assert not any(is_running(stats.pid) for stats in pool.stats())


@pytest.mark.slow
def test_a_fork_server_that_does_not_answer_is_ended_and_another_takes_its_place(monkeypatch):
    def explore(ctx):
        ctx.record(episode_return=0.0, episode_length=1)
        while not ctx.stopped:
            time.sleep(0.01)

    with ExplorerPool(explore, 2, make_buffer(), backend="process", restart_delay=0.0) as pool:
        eventually(lambda: all(stats.episodes == 1 for stats in pool.stats()), 150)
        server = fork_server_of(pool)
        os.kill(server, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(fork_server, "_ANSWER_TIMEOUT", 0.2)
            os.kill(pool.stats()[0].pid, signal.SIGKILL)
            eventually(lambda: not is_running(server))
        eventually(lambda: all(stats.episodes == 2 for stats in pool.stats()), 150)
        assert fork_server_of(pool) != server
    assert {failure.index for failure in pool.errors} == {0, 1}
    assert all("that starts workers died" in failure.error for failure in pool.errors if failure.index)


@pytest.mark.parametrize("kill_at", [0.0, 0.2, 1.0])
def test_a_fork_server_that_dies_before_it_has_begun_is_a_failure_and_another_takes_its_place(kill_at):
    def explore(ctx):
        ctx.record(episode_return=0.0, episode_length=1)

    old = children_of(os.getpid())
    with ExplorerPool(explore, 2, make_buffer(), backend="process", restart_delay=0.0) as pool:
        eventually(lambda: children_of(os.getpid()).keys() - old, interval=0.001)
        time.sleep(kill_at)
        for server in children_of(os.getpid()).keys() - old:
            os.kill(server, signal.SIGKILL)
        assert pool.wait(150)
        assert [stats.state for stats in pool.stats()] == ["finished"] * 2


@pytest.mark.parametrize("gone", [False, True], ids=["soon", "at-once"])
def test_a_fork_server_that_cannot_start_fails_the_pool_in_words(monkeypatch, gone):
    popen = subprocess.Popen

    def start(*args, **kwargs):
        process = popen(*args, **kwargs)
        if gone:  # before the first message to it
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return process

    monkeypatch.setattr(spawn, "_python_exe", b"/bin/false")
    monkeypatch.setattr(fork_server.subprocess, "Popen", start)
    pool = ExplorerPool(lambda ctx: None, 2, make_buffer(), backend="process", max_restarts=0)
    with pool, pytest.raises(ExplorersFailed, match="process that starts workers has died"):
        pool.wait(60)
    assert len(pool.errors) == 2


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.5])
def test_a_pool_can_be_stopped_while_its_fork_server_starts(delay):
    pool = ExplorerPool(lambda ctx: None, 4, make_buffer(), backend="process").start()
    time.sleep(delay)
    pool.stop()
    assert {stats.state for stats in pool.stats()} <= {"stopped", "finished"}
    assert not pool.errors
