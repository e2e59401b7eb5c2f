"""Programs that end while children of multiprocessing, which Python then waits for, still use the buffer."""

import atexit
import os
import signal
import subprocess
import sys

import pytest
from forked import Forked
from limited_buffers import buffer_with
from paths import import_path

import torchreplay as tr

HEAD = """
import contextlib, multiprocessing, os, signal, sys, time, torchreplay as tr
from torchreplay.segment import waits
waits.RETURN_GRACE = 0.5  # seconds, of the children too

mp = multiprocessing.get_context("fork")

def explore(buffer):  # as in the quick start
    with contextlib.suppress(tr.Stopped), buffer.writer() as writer:
        while True:
            writer.append(x=1.0)

def start(target, *args):
    child = mp.Process(target=target, args=args)
    child.start()
    return child

limiter = tr.SamplesPerInsert(8, min_size=100)
buffer = tr.ReplayBuffer({"x": tr.Field()}, 10_000, limiter=limiter)
"""
LEARN = """
explorers = [start(explore, buffer) for _ in range(2)]
for _, batch in zip(range(20), tr.ReplayDataset(buffer, batch_size=16)):
    pass
"""
# How the learner's program goes on after its last batch, and its exit status.
ENDS = {
    "an exception": ("raise RuntimeError('in the loss')", 1),
    "its last line": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "Ctrl-C": (
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's parent may have ignored it\n"
        "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
        -signal.SIGINT,
    ),
}


def run(program, tmp_path):
    """Runs a program to its end; returns its exit status and what it said."""
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.Popen(
        [sys.executable, path],
        env={**os.environ, "PYTHONPATH": import_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = done.communicate(timeout=60)
        return done.returncode, out, err
    finally:
        if done.returncode is None:
            os.killpg(done.pid, signal.SIGKILL)  # the children, too
            done.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_a_learner_that_ends_without_stopping_the_buffer_is_not_kept_by_its_explorers(end, tmp_path):
    line, expected = end
    status, _, said = run(HEAD + LEARN + line, tmp_path)
    assert status == expected, said
    assert ("in the loss" in said) == (line.startswith("raise"))


@pytest.mark.slow
def test_explorers_whose_program_ends_and_leaves_no_learner_end_later(tmp_path):
    program = "from torchreplay.segment import process_hooks\nprocess_hooks.STARTUP_GRACE = 0.5\n"
    status, _, said = run(HEAD + program + "start(explore, buffer)\nsys.exit(2)  # the arguments were wrong", tmp_path)
    assert status == 2, said


@pytest.mark.slow
def test_a_learner_that_fails_before_its_first_batch_is_not_kept_by_its_explorers(tmp_path):
    status, _, said = run(HEAD + "start(explore, buffer)\nraise RuntimeError('in the network')", tmp_path)
    assert status == 1
    assert "in the network" in said


@pytest.mark.slow
def test_a_child_that_learns_goes_on_with_the_explorers_when_the_program_that_learned_too_fails(tmp_path):
    program = """
def learn(buffer):
    for _ in range(300):  # far more than lies there
        buffer.sample(16)
        time.sleep(0.005)  # so that it takes longer than the grace
    print("learned", buffer.stats().rows_written > 400, flush=True)

learner = start(learn, buffer)
start(explore, buffer)
while not buffer.stats().learners:
    time.sleep(0.01)
buffer.sample(16)
raise RuntimeError("in the loss")
"""
    status, out, said = run(HEAD + program, tmp_path)
    assert (status, out) == (1, "learned True\n"), said


@pytest.mark.slow
def test_a_program_that_only_starts_a_learner_and_explorers_may_end_before_the_learner_draws(tmp_path):
    program = """
def learn(buffer):
    deadline = time.monotonic() + 4 * waits.RETURN_GRACE
    while time.monotonic() < deadline:  # it compiles, say
        time.sleep(0.01)
    for _ in range(50):
        buffer.sample(16)
    print("learned", flush=True)

start(explore, buffer)
start(learn, buffer)
"""
    status, out, said = run(HEAD + program, tmp_path)
    assert (status, out) == (0, "learned\n"), said


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "raise RuntimeError('in the environment')"], ids=["in order", "by an error"])
def test_a_program_that_wrote_is_not_kept_by_its_child_that_learns(end, tmp_path):
    program = f"""
def learn(buffer):
    try:
        for _ in range(10_000):
            buffer.sample(16)
    except tr.WouldBlockForever as error:
        print(error, flush=True)

writer = buffer.writer()
for _ in range(50):
    writer.append(x=1.0)
start(learn, buffer)
{end}
"""
    status, out, said = run(HEAD + program, tmp_path)
    assert status == bool(end), said
    assert "the last writer or learner left" in out


@pytest.mark.slow
def test_a_child_that_made_a_buffer_and_children_of_its_own_is_not_kept_by_them(tmp_path):
    program = """
def own():
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 10_000, limiter=limiter)
    start(explore, buffer)
    buffer.sample(16)

child = start(own)
child.join()
sys.exit(child.exitcode)
"""
    status, _, said = run(HEAD + program, tmp_path)
    assert status == 0, said


@pytest.mark.slow
def test_what_runs_after_the_children_have_been_told_can_still_draw_and_write(tmp_path):
    program = """
from multiprocessing.util import Finalize

def late():
    buffer.sample(16)
    with buffer.writer() as writer:
        writer.append(x=1.0)
    print(buffer.draws, buffer.stats().learners, flush=True)

Finalize(None, late, exitpriority=-1)  # after the children are joined
start(explore, buffer)
buffer.sample(16)
"""
    status, out, said = run(HEAD + program, tmp_path)
    assert (status, out) == (0, "2 1\n"), said


def test_a_forked_child_that_ends_takes_no_place_of_its_parent():
    buffer = buffer_with(tr.MinSize(), capacity=16)
    writer = buffer.writer()
    writer.append(x=1)
    buffer.sample(1)
    with Forked(atexit._run_exitfuncs) as child:
        assert child.wait() == 0
    census = buffer._segment.census(True)
    assert (census["owners"], census["learners"], census["writers"]) == (1, 1, 1)


def test_a_writer_that_has_departed_knows_its_rows_and_does_not_come_back_for_the_question():
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 10)
    writer = buffer.writer()
    writer.append(x=1.0)
    writer._depart()
    assert (writer.rows, buffer.stats().writers) == (1, 0)
    writer.append(x=2.0)
    assert (writer.rows, buffer.stats().writers) == (2, 1)
    writer.close()
    assert (writer.rows, buffer.stats().writers) == (2, 0)
