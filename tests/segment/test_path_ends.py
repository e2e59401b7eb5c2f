"""Buffers in files whose last process ends in order: they are marked as closed, also where their memory is still
held."""

import gc
import multiprocessing as mp
import os
import re
import struct
import subprocess
import sys
import textwrap

import pytest
from failing_calls import FSYNC, fail
from file_buffers import BOOT, HOLDER, MUTEX, make, poke, rows
from forked import Forked
from paths import SUPPORT

import torchreplay as tr
from torchreplay.ops import Ring


def assert_at_rest(path, least):
    """Only what was put to rest opens when the machine has been restarted."""
    poke(path, BOOT, struct.pack("Q", 12345))
    with tr.ReplayBuffer.open(path) as buffer:
        assert len(buffer) >= least
        buffer.extend(**rows(0, 100))


def run(path, program):
    """Runs a program, which finds `path`, `make` and `rows`."""
    begin = (
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\nfrom file_buffers import make, rows\npath = {str(path)!r}\n"
    )
    done = subprocess.run([sys.executable, "-c", begin + textwrap.dedent(program)], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr.decode()) == (0, "")


def write_after(buffer, ready, parent_is_done):
    ready.set()
    assert parent_is_done.wait(60)
    buffer.extend(**rows(0, 5))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_by_a_process_of_multiprocessing(method, path):
    context = mp.get_context(method)
    ready, parent_is_done = context.Event(), context.Event()
    with make(path) as buffer:
        process = context.Process(target=write_after, args=(buffer, ready, parent_is_done))
        process.start()
        assert ready.wait(60)
    parent_is_done.set()
    process.join()
    assert process.exitcode == 0
    assert_at_rest(path, 5)


ENDS = {
    "that holds a view of the storage": """
        buffer = make(path)
        buffer.extend(**rows(0, 5))
        storage = buffer.storage
        buffer.close()
        storage["number"][:] = 7
        sys.keep = storage
    """,
    "with an open buffer and a writer that modules keep": """
        sys.keep = make(path)
        sys.writer = sys.keep.writer()
        sys.keep.extend(**rows(0, 5))
    """,
    "whose daemon threads go on writing": """
        import threading
        buffer = make(path)
        buffer.extend(**rows(0, 5))
        begun = threading.Barrier(3)
        def write():
            image = rows(0, 1)["wide"]["image"][0]
            with buffer.writer() as writer:
                begun.wait()
                while True:
                    writer.append(number=0, wide={"image": image})
        for _ in range(2):
            threading.Thread(target=write, daemon=True).start()
        begun.wait()
    """,
    "whose daemon thread holds the lock": f"""
        import ctypes, threading
        buffer = make(path)
        buffer.extend(**rows(0, 5))
        header = buffer._segment.address
        held = threading.Event()
        def hold():
            assert ctypes.CDLL(None).pthread_mutex_lock(ctypes.c_void_p(header + {MUTEX})) == 0
            ctypes.c_uint64.from_address(header + {HOLDER}).value = 1 << 32 | threading.get_native_id()
            held.set()
            threading.Event().wait()
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
    """,
    "whose ring outlives its buffer": """
        from torchreplay.ops import Ring
        buffer = make(path)
        buffer.extend(**rows(0, 5))
        ring = Ring(buffer)
        ring.sample(3)
        buffer.close()
    """,
    "whose exit handler writes": """
        import atexit
        buffer = make(path)
        atexit.register(lambda: buffer.extend(**rows(0, 5)))
    """,
    "whose child writes after its own last line": """
        import atexit, multiprocessing
        buffer = make(path)
        context = multiprocessing.get_context("fork")
        over = context.Event()
        def write():
            over.wait()
            buffer.extend(**rows(0, 5))
        context.Process(target=write).start()
        atexit.register(over.set)
    """,
    "that was forked and exits": """
        import os
        buffer = make(path)
        ours, theirs = os.pipe()
        if os.fork():
            buffer.close()
            os.write(theirs, b".")
            os.wait()
            os._exit(0)
        os.read(ours, 1)
        buffer.extend(**rows(0, 5))
        sys.keep = buffer.storage
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_by_a_process(end, path):
    run(path, ENDS[end])
    assert_at_rest(path, 5)


@pytest.mark.slow
def test_what_the_first_of_all_exit_handlers_writes_is_in_the_file(path):
    program = f"""
import atexit, sys
atexit.register(lambda: sys.end())
sys.path.insert(0, {str(SUPPORT)!r})
from file_buffers import make, rows
buffer = make({str(path)!r})
buffer.extend(**rows(0, 5))
sys.end = lambda: buffer.extend(**rows(5, 4))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert_at_rest(path, 9)


WHAT_TO_DO = r"could not be marked as closed.*open it again before.*Input/output error"


def close_on_a_failing_disk(path):
    fail(FSYNC)
    buffer = make(path)
    buffer.extend(**rows(0, 5))
    with pytest.raises(OSError, match=WHAT_TO_DO):
        buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        len(buffer)
    buffer.close()


def drop_on_a_failing_disk(path, ring):
    os.dup2(os.open(path.with_suffix(".said"), os.O_CREAT | os.O_WRONLY), 2)
    fail(FSYNC)
    buffer = make(path)
    last = Ring(buffer) if ring else buffer.writer()
    buffer.extend(**rows(0, 5))
    buffer.close()
    del last
    gc.collect()


def test_a_file_that_the_disk_does_not_take_is_no_closed_one_and_close_says_so(path):
    with Forked(close_on_a_failing_disk, path) as process:
        assert process.wait() == 0
    with tr.ReplayBuffer.open(path) as buffer:  # the advice
        assert buffer.storage["number"][:5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ring", [False, True])
def test_the_last_holder_that_no_call_closes_says_so_on_stderr(path, ring):
    with Forked(drop_on_a_failing_disk, path, ring) as process:
        assert process.wait() == 0
    assert re.search(f"torchreplay: .*{WHAT_TO_DO}", path.with_suffix(".said").read_text())
