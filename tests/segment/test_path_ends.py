"""Buffers in files whose last process ends in order: they are marked as closed, also where their memory is still
held."""

import multiprocessing as mp
import struct
import subprocess
import sys
import textwrap

import pytest
from file_buffers import BOOT, HOLDER, MUTEX, make, poke, rows
from paths import SUPPORT

import torchreplay as tr


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
