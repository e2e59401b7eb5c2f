"""The handle of shared memory: how another process finds a segment by it, and what can go wrong."""

from __future__ import annotations

import fcntl
import os
import secrets
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from stat import S_ISREG

from torchreplay.errors import AttachError
from torchreplay.segment.file_lock import lock
from torchreplay.segment.ray_node import is_elsewhere, ray_node
from torchreplay.validation import checked_int

FILE_LOCK_SECONDS = 5.0
"""Seconds for which an attach waits for the file's lock. Its users share the lock: who has it alone puts the file to
rest, or is another program."""


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
        delivery_log: Of a buffer that writers on other nodes may write to.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
        >>> handle = buffer.handle()
        >>> tr.ReplayBuffer.attach(handle).capacity  # in another process, usually
        100
    """

    pid: int
    fd: int
    inode: int
    size: int
    nonce: int
    machine: str
    node: str = ""
    delivery_log: Handle | None = None


@cache
def machine_id() -> str:
    """Returns the boot id of this machine: equal for all its containers, different after a reboot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def make_handle(fd: int, nonce: int) -> Handle:
    """Returns the handle by which other processes find the segment that this process has open as `fd`."""
    status = os.fstat(fd)
    return Handle(os.getpid(), fd, status.st_ino, status.st_size, nonce, machine_id(), ray_node())


def lasting_handle(fd: int, nonce: int, origin: Handle | None) -> Handle:
    """Returns what `make_handle` does, but by the process that the segment was attached from, while it has it open.

    That is most often the one that made it: a process that passes a buffer on may end long before the receivers.
    """
    handle = make_handle(fd, nonce)
    try:
        status = None if origin is None else os.stat(f"/proc/{origin.pid}/fd/{origin.fd}")
    except OSError:  # it is gone, or in another container
        status = None
    if origin is None or status is None or (status.st_ino, status.st_size) != (handle.inode, handle.size):
        return handle
    return replace(handle, pid=origin.pid, fd=origin.fd)


def open_handle(handle: Handle, what: str, grows: bool = False) -> int:
    """Returns a descriptor of the segment that `handle` names.

    Args:
        handle: Names it.
        what: Its name, in errors.
        grows: Whether it may have grown since the handle was made.

    Raises:
        AttachError: The owner is gone, on another machine, or belongs to another user; or somebody has the file's lock
            alone.
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
    gone = (
        f"the owner of the {what} (process {handle.pid}) is gone, or has closed it: take a handle from another process "
        f"that has it, or make a new one"
    )
    place = None
    try:
        # A mere place at first: to open a device or a pipe, which the descriptor may be by now, can have effects.
        place = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_PATH | os.O_CLOEXEC)
        status = os.fstat(place)
        is_same = status.st_ino == handle.inode and (grows or status.st_size == handle.size)
        if not (S_ISREG(status.st_mode) and is_same):
            raise AttachError(gone)
        if status.st_uid != os.geteuid():
            raise AttachError(
                f"the {what} belongs to another user (uid {status.st_uid}, here {os.geteuid()}): only the same user "
                f"can attach"
            )
        return _open_shared(f"/proc/self/fd/{place}", what)
    except (FileNotFoundError, ProcessLookupError):
        raise AttachError(gone) from None
    except PermissionError:
        raise AttachError(
            f"process {handle.pid}, which owns the {what}, is not open to this process: only the same user can attach"
        ) from None
    finally:
        if place is not None:
            os.close(place)


def _open_shared(place: str, what: str) -> int:
    """Returns a descriptor of the file at `place` with the lock that every user of a segment in a file shares."""
    fd = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    try:
        lock(fd, fcntl.LOCK_SH, "who has the file locked alone", FILE_LOCK_SECONDS)
    except BaseException as error:
        os.close(fd)
        if not isinstance(error, TimeoutError):
            raise
        raise AttachError(
            f"the {what} cannot be attached: its file is locked by a process that puts it to rest, or the handle names "
            f"a file of another program ({error})"
        ) from None
    return fd


def new_nonce() -> int:
    """Returns a random identity of 63 bits, so that it fits an int64."""
    return secrets.randbits(63)
