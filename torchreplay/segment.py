"""Shared memory: how a segment is reserved, how its handle finds it from another process, and what can go wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from stat import S_ISREG

from . import _C
from .arguments import checked_int
from .errors import AttachError
from .nodes import is_elsewhere, ray_node

# Linux's numbers for fcntl: Python 3.11 does not name them all.
F_ADD_SEALS = 1033
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4

HUGE_PIECE = 2**27  # bytes reserved in one native call
PATIENCE = 0.25  # seconds for a piece; 0.03 measured, as for small pages


@dataclass(frozen=True, slots=True)
class Handle:
    """Enough to attach a segment from another process of the same user on the same machine. Plain data.

    Attributes:
        pid: A process that has the segment open, in the pid namespace of the machine that made the handle.
        fd: Its descriptor there.
        inode: The file's inode, so that a reused pid or descriptor is noticed.
        size: The file's size in bytes.
        nonce: The identity written into the segment itself.
        machine: Boot id of the machine.
        node: Ray's id of the node; "" where Ray was not running.
        ledger: Of a buffer that writers on other nodes may write to.
    """

    pid: int
    fd: int
    inode: int
    size: int
    nonce: int
    machine: str
    node: str = ""
    ledger: Handle | None = None


@cache
def machine_id() -> str:
    """Returns the boot id of this machine: equal for all its containers, different after a reboot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def available_memory() -> int:
    """Returns the bytes that can still be reserved here: free memory, within the cgroup's limit."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return min([int(meminfo["MemAvailable"].split()[0]) * 1024, *_cgroup_headroom()])


def _cgroup_headroom() -> list[int]:
    """Bytes left under each limit of this process's cgroup and its parents; inactive page cache counts as free."""
    left = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = root / path.lstrip("/")
        for level in (group, *group.parents):
            if level == root.parent:
                break
            try:
                limit, used = ((level / name).read_text().strip() for name in names)
                stat = dict(item.split() for item in (level / "memory.stat").read_text().splitlines())
            except OSError:  # the root has no limit, and a container may hide its parents
                continue
            if limit != "max":
                # In version 1 only the total has what groups below hold, as what is used does.
                inactive = stat.get("total_inactive_file") or stat.get("inactive_file") or "0"
                left.append(int(limit) - int(used) + int(inactive))
    return [max(n, 0) for n in left]


def require_memory(size: int, what: str) -> None:
    """Raises a MemoryError with the numbers when `size` bytes cannot be reserved here any more."""
    free = available_memory()
    if size > free:
        raise MemoryError(
            f"{what} needs {size_text(size)} of memory, and {size_text(free)} can still be had here (free memory and "
            f"cgroup limits): choose a smaller capacity or smaller fields"
        )


def reserve(size: int, what: str) -> int:
    """Returns the descriptor of a new anonymous shared file of `size` bytes, reserved in full and never to be resized.

    Args:
        size: Bytes.
        what: Names it in /proc and in errors.

    Raises:
        MemoryError: The machine, or the cgroup, has less left than that. Nothing was touched.
    """
    require_memory(size, what)
    # memfd: not bound by the size of /dev/shm, and freed by the kernel when its last process is gone.
    fd = os.memfd_create(f"torchreplay-{what.replace(' ', '-')}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        _take_huge_pages(fd, size)
        # The rest. Without it the first touch of a page that the system cannot give would raise SIGBUS.
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise MemoryError(f"{what} needs {size_text(size)} of memory: {error.strerror} when reserving it") from None
        raise
    return fd


def _take_huge_pages(fd: int, size: int) -> None:
    """Takes huge pages until the system has none, or has to tidy its memory for them: then small ones are cheaper."""
    for offset in range(0, size, HUGE_PIECE):
        began = time.monotonic()
        if not _C.take_huge_pages(fd, offset, min(HUGE_PIECE, size - offset)) or time.monotonic() - began > PATIENCE:
            return


def make_handle(fd: int, nonce: int) -> Handle:
    """Returns the handle by which other processes find the segment that this process has open as `fd`."""
    status = os.fstat(fd)
    return Handle(os.getpid(), fd, status.st_ino, status.st_size, nonce, machine_id(), ray_node())


def lasting_handle(fd: int, nonce: int, origin: Handle | None) -> Handle:
    """Returns what `make_handle` does, but by the process that the segment was attached from, while it has it open.

    That is most often the one that made it: whoever passes a buffer on may end long before those who get it.
    """
    handle = make_handle(fd, nonce)
    try:
        status = None if origin is None else os.stat(f"/proc/{origin.pid}/fd/{origin.fd}")
    except OSError:  # it is gone, or in another container
        status = None
    if origin is None or status is None or (status.st_ino, status.st_size) != (handle.inode, handle.size):
        return handle
    return replace(handle, pid=origin.pid, fd=origin.fd)


def open_handle(handle: Handle, what: str) -> int:
    """Returns a descriptor of the segment that `handle` names.

    Raises:
        AttachError: The owner is gone, on another machine, or belongs to another user.
        TypeError: It is no handle.
        ValueError: A part of the handle is not what handles have.
    """
    if not isinstance(handle, Handle):
        raise TypeError(f"expected a torchreplay.Handle, got {type(handle).__name__}")
    for name in ("pid", "fd", "inode", "size", "nonce"):  # they make a path: a handle is data that others may have made
        checked_int(f"the handle's {name}", getattr(handle, name, None), 0, (1 << 64) - 1)
    machine = getattr(handle, "machine", None)
    if machine != machine_id():
        raise AttachError(
            f"the handle is of a {what} on another machine (boot id {machine}, here {machine_id()}): "
            f"shared memory ends at the machine, so run this process where the {what} is, or start Ray on both before "
            f"the handle is made"
        )
    if is_elsewhere(handle.node):
        raise AttachError(
            f"the handle is of a {what} on another Ray node ({handle.node}, here {ray_node()}): shared memory ends at "
            f"the node, so run this process where the {what} is"
        )
    gone = f"the owner of the {what} (process {handle.pid}) is gone, and its memory with it: make a new one"
    place = None
    try:
        # A mere place at first: to open a device or a pipe, which the descriptor may be by now, can have effects.
        place = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_PATH | os.O_CLOEXEC)
        status = os.fstat(place)
        if not S_ISREG(status.st_mode) or (status.st_ino, status.st_size) != (handle.inode, handle.size):
            raise AttachError(gone)
        if status.st_uid != os.geteuid():
            raise AttachError(
                f"the {what} belongs to another user (uid {status.st_uid}, here {os.geteuid()}): only the same user "
                f"can attach"
            )
        fd = os.open(f"/proc/self/fd/{place}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)  # as for every user of a segment in a file
        return fd
    except (FileNotFoundError, ProcessLookupError):
        raise AttachError(gone) from None
    except PermissionError:
        raise AttachError(
            f"process {handle.pid}, which owns the {what}, is not open to this process: only the same user can attach"
        ) from None
    finally:
        if place is not None:
            os.close(place)


def new_nonce() -> int:
    """Returns a random identity of 63 bits, so that it fits an int64."""
    return secrets.randbits(63)


def size_text(n: int) -> str:
    """Returns a number of bytes for people."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**27 else f"{n / 2**20:.2f} MiB"
