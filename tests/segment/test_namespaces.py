"""Processes in other namespaces of the kernel, as containers have them: thread ids, or a clock, of their own."""

import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import LIBC, Forked
from namespaces import unshared

import torchreplay as tr
from torchreplay.segment import waits

CLONE_NEWPID = 0x20000000
DAY = 86400


def run_there(command, code, *args):
    """Runs Python code in other namespaces, with `given`, and returns what it prints."""
    program = [*command, sys.executable, "-c", f"import pickle, sys\ngiven = pickle.load(sys.stdin.buffer)\n{code}"]
    result = subprocess.run(program, input=pickle.dumps(args), capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode().strip()


class Started:
    """A program that runs in other namespaces until it may go on, or is killed."""

    def __init__(self, command, code, *args):
        program = [*command, sys.executable, "-c", code, *args]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout.readline() == b"ready\n"

    def finish(self):
        self._process.communicate(b"go on\n", timeout=60)
        assert self._process.returncode == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
        self._process.wait()  # it waits for its child, which then has let go of everything
        self._process.stdin.close()
        self._process.stdout.close()


# Thread ids


ATTACH = """
import torchreplay as tr
try:
    tr.ReplayBuffer.attach(given[0])
except tr.AttachError as error:
    print(error)
"""


def test_attaching_from_another_pid_namespace_is_an_error_that_says_what_to_do():
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 10)
    said = run_there(unshared("--pid"), ATTACH, buffer.handle())
    assert "another pid namespace" in said
    assert "docker run --pid=container:" in said
    assert "shareProcessNamespace" in said
    buffer.extend(x=np.ones(3))
    assert buffer.sample(3)["x"].eq(1).all()


USE = """
import sys
import numpy as np
import torchreplay as tr
buffer = tr.ReplayBuffer.open(sys.argv[1])
buffer.extend(x=np.full(1, len(buffer)))
print("ready", flush=True)
sys.stdin.readline()
buffer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "in order"])
def test_a_file_in_use_in_another_pid_namespace_can_be_opened_when_its_users_have_ended(tmp_path, end):
    path = tmp_path / "buffer"
    tr.ReplayBuffer({"x": tr.Field()}, 10, path=path).close()
    with Started(unshared("--pid"), USE, str(path)) as there:
        with pytest.raises(tr.CheckpointError, match=r"another pid namespace .* can be opened anywhere when they have"):
            tr.ReplayBuffer.open(path)
        if end == "in order":
            there.finish()
    with tr.ReplayBuffer.open(path) as buffer:
        buffer.extend(x=np.ones(1))
        assert buffer.gather(torch.arange(2))["x"].tolist() == [0, 1]
    with Started(unshared("--pid"), USE, str(path)) as there:  # a container that was started again has another one
        there.finish()
    with tr.ReplayBuffer.open(path) as buffer:
        assert buffer.gather(torch.arange(3))["x"].tolist() == [0, 1, 2]


def test_a_buffer_whose_lock_says_another_pid_namespace_is_not_attached(tmp_path):
    """The same where nobody may make one: the file says that its users are elsewhere."""
    path = tmp_path / "buffer"
    here = struct.pack("<Q", os.stat("/proc/self/ns/pid").st_ino)
    with tr.ReplayBuffer({"x": tr.Field()}, 10, path=path) as buffer:
        header = path.read_bytes()[:4096]
        assert header.count(here) == 1
        with path.open("r+b") as file:
            file.seek(header.index(here))
            file.write(struct.pack("<Q", 1))
        with pytest.raises(tr.AttachError, match="another pid namespace"):
            tr.ReplayBuffer.attach(buffer.handle())
        with pytest.raises(tr.CheckpointError, match="another pid namespace"):
            tr.ReplayBuffer.open(path)
    with tr.ReplayBuffer.open(path) as buffer:
        assert len(buffer) == 0


def test_a_forked_child_in_another_pid_namespace_is_told_and_locks_nothing():
    unshared("--pid")
    if os.geteuid() != 0:
        pytest.skip("only root makes one without a user namespace, which a process with threads cannot enter")
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 10)
    buffer.extend(x=np.ones(3))

    def draw():
        with pytest.raises(RuntimeError, match="another pid namespace"):
            buffer.sample(1)

    def cross():
        assert LIBC.unshare(CLONE_NEWPID) == 0
        with Forked(draw) as child:
            assert child.wait() == 0

    with Forked(cross) as child:
        assert child.wait() == 0
    assert buffer.sample(3)["x"].eq(1).all()


# Clocks


WRITE = """
import numpy as np
given[0].extend(x=np.ones(1))
"""


def offsets():
    """Clocks that are ahead, and behind as far as none begins before zero."""
    return [DAY, -int(time.clock_gettime(time.CLOCK_MONOTONIC) / 2)]


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["ahead", "behind"])
def test_a_learner_knows_when_writers_of_another_time_namespace_wrote_and_left(monkeypatch, which):
    monkeypatch.setattr(waits, "RETURN_GRACE", 0.2)
    clock = unshared("--time", "--monotonic", str(offsets()[which]))
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 10, limiter=tr.MinSize(2))
    run_there(clock, WRITE, buffer)
    assert 0 <= buffer.stats().last_write_age < 60
    with pytest.raises(
        tr.WouldBlockForever, match=r"last write: \d.* s ago.*the last writer or learner left [0-9] s ago"
    ):
        buffer.sample(1, timeout=20)


LOOK = """
stats = given[0].stats()
print(stats.last_write_age)
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["ahead", "behind"])
def test_ages_are_told_right_in_another_time_namespace(which):
    clock = unshared("--time", "--monotonic", str(offsets()[which]))
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 10)
    buffer.extend(x=np.ones(1))
    assert 0 <= float(run_there(clock, LOOK, buffer)) < 60


def test_without_time_namespaces_the_machines_time_is_that_of_the_monotonic_clock():
    if Path("/proc/self/timens_offsets").exists():
        lines = [line.split() for line in Path("/proc/self/timens_offsets").read_text().splitlines()]
        offset = next(int(s) * 10**9 + int(ns) for clock, s, ns in lines if clock == "monotonic")
    else:
        offset = 0
    before = time.monotonic_ns()
    told = tr._C.machine_ns() + offset
    assert before <= told <= time.monotonic_ns()
