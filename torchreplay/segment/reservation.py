"""Shared memory: how much can be had, and how it is reserved, so that touching it cannot fail later."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

from torchreplay import _C
from torchreplay.segment.closeable import Closeable
from torchreplay.segment.thread_pool import ThreadPool

# Linux's numbers for fcntl: Python 3.11 does not name them all.
F_ADD_SEALS = 1033
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4

PIECE = 2**26
"""Bytes reserved at a time: a multiple of every size of page."""
PIECE_SECONDS = 0.25
"""Seconds for a piece of huge pages, on average; 0.01 measured, 0.19 where a machine has to get its memory."""
DELAY = 1.0
"""Seconds that all may take longer than that together."""
UNUSED = ("inactive_file",)
"""The page cache of a cgroup that nobody has used for long."""
SPARE = 4 << 20
"""Bytes that a save, or a load, is left beside its own memory: for its threads, Python and the kernel."""


def available_memory(cache: Sequence[str] = UNUSED) -> int:
    """Returns the bytes that can still be reserved here: free memory, within the cgroup's limit.

    Args:
        cache: What of the cgroup's page cache counts as free.
    """
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return min([int(meminfo["MemAvailable"].split()[0]) * 1024, *_cgroup_headroom(cache)])


def _cgroup_headroom(cache: Sequence[str]) -> list[int]:
    """Bytes left under each limit of this process's cgroup and its parents; such page cache counts as free."""
    left = []
    for version, level in cgroup_levels("memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
        try:
            limit, used = ((level / name).read_text().strip() for name in names)
            stat = dict(item.split() for item in (level / "memory.stat").read_text().splitlines())
        except OSError:  # the root has no limit, and a container may hide its parents
            continue
        if limit != "max":
            # In version 1 only the total has what groups below hold, as what is used does.
            free = sum(int(stat.get(f"total_{kind}") or stat.get(kind) or 0) for kind in cache)
            left.append(int(limit) - int(used) + free)
    return [max(n, 0) for n in left]


def cgroup_levels(controller: str) -> Iterator[tuple[int, Path]]:
    """Yields the version, 1 or 2, and the directory of this process's cgroups and their parents.

    Args:
        controller: What limits there are wanted of: "memory" or "cpu".
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path(f"/sys/fs/cgroup/{controller}" if controllers else "/sys/fs/cgroup")
        group = root / path.lstrip("/")
        for level in (group, *group.parents):
            if level == root.parent:
                break
            yield 1 if controllers else 2, level


def require_memory(size: int, what: str, spare: int = 0) -> None:
    """Raises a MemoryError with the numbers when `size` bytes, and `spare`, cannot be reserved here any more."""
    _require(size, what, available_memory() - spare, "choose a smaller capacity or smaller fields")


def require_memory_beside(size: int, what: str) -> None:
    """Raises a MemoryError with the numbers when `size` bytes cannot be had beside a buffer for a while.

    All page cache counts as free. The system gives it away before it ends a process, and a container that reads data
    sets is full of it.
    """
    _require(size, what, available_memory((*UNUSED, "active_file")), "end other processes, or raise the limit")


def _require(size: int, what: str, free: int, advice: str) -> None:
    if size > free:
        raise MemoryError(
            f"{what} needs {size_text(size)} of memory, and {size_text(max(free, 0))} can still be had here (free "
            f"memory and cgroup limits): {advice}"
        )


def new_memory(size: int, what: str) -> int:
    """Returns the descriptor of a new anonymous shared file of fixed size; nothing is reserved.

    Args:
        size: Bytes.
        what: Names it in /proc.
    """
    # memfd: not bound by the size of /dev/shm, and freed by the kernel when its last process is gone.
    fd = os.memfd_create(
        f"torchreplay-{re.sub(r'[^A-Za-z0-9.]+', '-', what).strip('-')}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    )
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def reserve(size: int, what: str) -> int:
    """Returns the descriptor of new memory as `new_memory` does, reserved in full.

    Raises:
        MemoryError: The machine, or the cgroup, has less left than that. Nothing was touched.
    """
    return begin_reservation(size, what).detach()


def begin_reservation(
    size: int, what: str, arrays: Sequence[tuple[int, int]] = (), slots: int = 0, spare: int = 0, beyond: int = 0
) -> Reservation:
    """Returns new memory as `new_memory` does. A thread reserves `arrays`, the rest is reserved: see `Reservation`.

    Behind it lie as many bytes as `beyond` says, which the system gives when they are first touched, as any process's.

    Raises:
        MemoryError: The machine, or the cgroup, has less left than that and `spare`. Nothing was touched.
    """
    require_memory(size, what, spare)
    return Reservation(new_memory(size + beyond, what), size, what, arrays, slots)


class Reservation(Closeable):
    """A file of memory on its way to being reserved: large arrays in a thread, all else before this object is there.

    Who fills the arrays slot by slot can begin at once: making memory takes about as long as filling it.

    Args:
        fd: The file, which this object closes.
        size: Bytes to reserve from its beginning on.
        what: Names it in errors.
        arrays: (first byte, bytes of a slot) of each array that is to be reserved little by little, slot after slot.
        slots: Of each array.

    Attributes:
        fd: The file, until `close`.

    Raises:
        MemoryError: There is less memory left than that.
    """

    def __init__(self, fd: int, size: int, what: str, arrays: Sequence[tuple[int, int]] = (), slots: int = 0) -> None:
        self.fd = fd
        self._size, self._what = size, what
        self._delay = 0.0  # by huge pages
        self._error: BaseException | None = None
        self._progress: SimpleQueue[None] = SimpleQueue()
        self._pool: ThreadPool | None = None
        self._closed = False
        try:
            whole = [(begin, begin + slots * stride, stride) for begin, stride in arrays]
            # Pieces, by the first slot that lies in each; -1 where something else does.
            self._left = deque(sorted((self._first_slot(at, whole), at) for at in range(0, size, PIECE)))
            while self._left and self._left[0][0] < 0:
                self._take(fd, self._left.popleft()[1])
            if self._left:
                # A file of its own: the thread may outlive a close that is interrupted.
                self._own = FileIO(f"/proc/self/fd/{fd}", "r+")
                self._pool = ThreadPool(1)
                self._pool.submit(self._take_rest, self._own)
        except BaseException:
            self.close()
            raise

    @property
    def complete(self) -> bool:
        """Whether all is reserved."""
        return not self._left

    def wait(self, slots: int) -> None:
        """Returns when the first `slots` slots of all arrays are reserved, so that they can be filled.

        Raises:
            MemoryError: They cannot be.
        """
        while self._pool and not self._error and self._left and self._left[0][0] < slots:
            self._pool.get(self._progress)
        if self._error:
            raise self._error

    def detach(self) -> int:
        """Returns the descriptor, which is the caller's to close; what is not reserved by then never is."""
        fd, self.fd = self.fd, -1
        self.close()
        return fd

    def close(self) -> None:
        """Gives the descriptor back; what is not reserved by then never is."""
        self._closed = True
        try:
            if self._pool is not None:
                self._pool.close()
                self._own.close()
        finally:
            self._error = None  # whose traceback holds the waiting thread, and the memory with it
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)

    def _first_slot(self, at: int, arrays: Sequence[tuple[int, int, int]]) -> int:
        end = min(at + PIECE, self._size)
        return next(((at - begin) // stride for begin, over, stride in arrays if begin <= at and end <= over), -1)

    def _take_rest(self, own: FileIO) -> None:
        try:
            with own:
                while self._left and not self._closed:
                    self._take(own.fileno(), self._left[0][1])
                    self._left.popleft()
                    self._progress.put(None)
        except BaseException as error:
            self._error = error
            self._progress.put(None)

    def _take(self, fd: int, at: int) -> None:
        size = min(PIECE, self._size - at)
        try:
            if self._delay < DELAY:
                # Until the system has none, or has to tidy its memory for each: then small ones are cheaper.
                began = time.monotonic()
                taken = _C.take_huge_pages(fd, at, size)
                late = time.monotonic() - began - PIECE_SECONDS
                self._delay = max(self._delay + late, 0.0) if taken else DELAY
            # The rest. Without it the first touch of a page that the system cannot give would raise SIGBUS.
            os.posix_fallocate(fd, at, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise MemoryError(
                    f"{self._what} needs {size_text(self._size)} of memory: {error.strerror} when reserving it"
                ) from None
            raise


def page_tables(size: int) -> int:
    """Returns the bytes that the kernel takes at most when this process touches all of `size` bytes that it maps.

    Those are 8 for a page of 4 KB, less what it has taken by now. Of huge pages it takes next to nothing.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return max(0, size // 512 - int(status["VmPTE"].split()[0]) * 1024)


def size_text(n: int) -> str:
    """Returns a number of bytes for people, such as "77.50 MiB"."""
    if n < 2**20:
        return f"{n / 2**10:.1f} KiB"
    return f"{n / 2**30:.2f} GiB" if n >= 2**27 else f"{n / 2**20:.2f} MiB"
