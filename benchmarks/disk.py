"""The disk's own rate: what a plain program gets that writes or reads one file from end to end."""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PIECE = 1 << 20


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the time that ``work`` takes, once: it does not fit into a cache."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def write_sequentially(path: Path, size: int) -> None:
    """Writes ``size`` random bytes to ``path`` and waits until they are on the disk."""
    piece = np.random.default_rng(0).integers(0, 256, PIECE, dtype=np.uint8).data
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, PIECE):
            file.write(piece[: min(PIECE, size - at)])
        os.fsync(file.fileno())


def read_sequentially(path: Path) -> None:
    """Reads ``path`` to its end into memory that is used again and again."""
    room = bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(room):
            pass


def read_whole(path: Path) -> None:
    """Reads ``path`` into new memory as large as the file."""
    room = np.empty(path.stat().st_size, np.uint8).data
    with path.open("rb", buffering=0) as file:
        for at in range(0, len(room), PIECE):
            file.readinto(room[at : at + PIECE])


def read_into_shared_memory(path: Path) -> None:
    """Reads ``path`` into new shared memory as large as the file: the least that a loader of a shared buffer does."""
    size = path.stat().st_size
    fd = os.memfd_create("torchreplay-benchmark")
    try:
        os.posix_fallocate(fd, 0, size)
        with mmap.mmap(fd, size) as memory, memoryview(memory) as room, path.open("rb", buffering=0) as file:
            for at in range(0, size, PIECE):
                file.readinto(room[at : at + PIECE])
    finally:
        os.close(fd)


def forget(directory: Path) -> None:
    """Drops the files in and below ``directory`` from the page cache, so that reading them means the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
