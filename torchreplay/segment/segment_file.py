"""Segments in files, which outlive every process that uses them: how one is made, and found again.

Each process that uses a file holds a shared `flock` on it. The kernel takes it back with the last mapping. A process
that gets the exclusive lock knows that nobody is left. The native core marks a file that its last user has put to rest.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import secrets
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torchreplay import _C
from torchreplay.errors import CheckpointError
from torchreplay.segment.file_lock import lock
from torchreplay.segment.handle import machine_id, new_nonce
from torchreplay.segment.regular_file import NoRegularFile, open_own
from torchreplay.segment.reservation import require_memory, size_text

UNFINISHED = ".torchreplay-{}.unfinished"
"""The name of a file that is being made, beside where it will be."""

TRIES = 1000  # to find a file either used or unused, about 10 ms each


class OpenFile(NamedTuple):
    """A file with a segment that is fit for use.

    Attributes:
        fd: Its descriptor, which holds the shared lock.
        nonce: The segment's identity.
        found_alone: Nobody else had it open.
        dropped_rows: Rows that were being written when its last users died.
    """

    fd: int
    nonce: int
    found_alone: bool
    dropped_rows: int


def boot_number() -> int:
    """Returns a number of 64 bits, never 0, that names the time since this machine was started."""
    return int(machine_id().replace("-", "")[:16], 16) | 1


class NewFile:
    """A new file of `size` bytes, on the disk in full, for its owner's eyes only.

    It has another name until it is finished. So a death before leaves nothing at its path that is taken for a buffer,
    or that blocks another one. What such have left in the directory is removed. A context, which finishes it when it
    ends in order, and else removes it.

    Args:
        path: Where it will be.
        size: Its length in bytes.

    Attributes:
        fd: Its descriptor, with a shared lock; the user closes it.

    Raises:
        FileExistsError: Something is there already.
        FileNotFoundError: Its directory is not there.
        OSError: The disk has too little room, or the filesystem cannot hold shared memory. Nothing was touched.
        MemoryError: The filesystem is a tmpfs, and there is too little memory.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        with suppress(FileNotFoundError):
            os.lstat(path)  # which also refuses what can be no name
            raise self._is_there()
        _remove_unfinished(path.parent)
        _require_room(path, size)
        self.fd, self._place = -1, path.with_name(UNFINISHED.format(secrets.token_hex(8)))
        try:
            self._make()
            os.posix_fallocate(self.fd, 0, size)  # or the first touch of a page without room would raise SIGBUS
            _require_locks_and_mappings(self.fd)
        except BaseException as error:
            if self.fd >= 0:
                os.close(self.fd)
            self.discard()
            if not isinstance(error, OSError):
                raise
            why = f"cannot hold a replay buffer of {size_text(size)}: {error.strerror}"
            if error.errno == errno.ENOMEM:
                raise MemoryError(f"{path} {why}") from None
            raise OSError(error.errno, why, str(path)) from None

    def finish(self) -> None:
        """Gives it its name, or removes it.

        Raises:
            FileExistsError: Something has come there meanwhile.
        """
        try:
            _C.rename_new(os.fsencode(self._place), os.fsencode(self._path))
        except FileExistsError:
            self.discard()
            raise self._is_there() from None
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Removes it, unless it is finished."""
        with suppress(FileNotFoundError):
            os.unlink(self._place)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def _make(self) -> None:
        while self.fd < 0:
            self.fd = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self.fd, fcntl.LOCK_SH)
            if not os.fstat(self.fd).st_nlink:  # another one, who found it without the lock, took it for a dead one's
                os.close(self.fd)
                self.fd = -1

    def _is_there(self) -> FileExistsError:
        advice = "if it is a buffer, ReplayBuffer.open brings it back; delete it to make a new one"
        text = "this is a directory: name a file in it" if self._path.is_dir() else f"there is a file already: {advice}"
        return FileExistsError(errno.EEXIST, text, str(self._path))


def _remove_unfinished(directory: Path) -> None:
    """Removes the files of processes that died before they had finished them."""
    for place in directory.glob(UNFINISHED.format("*")):
        with suppress(OSError, NoRegularFile):  # another removes it, or it is another user's, who may name it so
            fd = open_own(place, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(place)
            finally:
                os.close(fd)


def _require_room(path: Path, size: int) -> None:
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    if size > free:
        raise OSError(
            errno.ENOSPC,
            f"the replay buffer needs {size_text(size)}, and the disk has {size_text(free)} left: choose a smaller "
            f"capacity or smaller fields",
            str(path),
        )
    if _is_in_memory(path.parent):
        require_memory(size, "replay buffer on a tmpfs")


def _is_in_memory(directory: Path) -> bool:
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return any(mount[2] == number and mount[mount.index("-") + 1] == "tmpfs" for mount in mounts)


def _require_locks_and_mappings(fd: int) -> None:
    """Tries what the core relies on: shared mappings, and byte locks that leave `flock` alone (not so on NFS)."""
    mmap.mmap(fd, mmap.PAGESIZE).close()
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    except OSError as error:
        raise OSError(error.errno, f"its filesystem has no locks of single bytes ({error.strerror})") from None
    finally:
        os.close(other)


def open_file(path: Path) -> OpenFile:
    """Returns the file `path`, repaired if its last users died.

    Raises:
        FileNotFoundError: There is none.
        PermissionError: It belongs to another user.
        CheckpointError: It is no replay buffer, of another version, truncated or damaged, or was copied while in use.
        OSError: It has holes, and the disk has no room for them.
    """
    fd = opened_buffer(path, os.O_RDWR)
    try:
        return _claim(fd, path)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, ConnectionError):
            raise CheckpointError(f"{path} cannot be opened as a replay buffer: {error}") from None
        raise


def opened_buffer(path: Path, flags: int) -> int:
    """Returns the descriptor of what should be a buffer's file.

    Raises:
        PermissionError: It belongs to another user.
        CheckpointError: It is no regular file.
        OSError: It cannot be opened.
    """
    try:
        return open_own(path, flags)
    except NoRegularFile as error:
        raise CheckpointError(f"{path} holds no replay buffer: {error}") from None
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
        what = "only the user who owns the file of a replay buffer can open it"
        raise PermissionError(errno.EPERM, what, str(path)) from None


def _repaired(fd: int, path: Path) -> tuple[int, int]:
    try:
        return _C.repair_file(fd, boot_number(), new_nonce())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    size, disk = os.fstat(fd), os.statvfs(path)
    raise OSError(
        errno.ENOSPC,
        f"the file of the replay buffer has holes, as sparse copies have: of its {size_text(size.st_size)} the disk "
        f"holds {size_text(size.st_blocks * 512)}, and has {size_text(disk.f_bavail * disk.f_frsize)} left. Make room, "
        f"or copy it to another disk",
        str(path),
    )


def _claim(fd: int, path: Path) -> OpenFile:
    for _ in range(TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock(fd, fcntl.LOCK_SH, f"another process that repairs {path}, or puts it to rest")
            nonce = _C.nonce_in_use(fd, boot_number())
            if nonce is not None:
                return OpenFile(fd, nonce, False, 0)
            fcntl.flock(fd, fcntl.LOCK_UN)  # the holder has left
            time.sleep(random.uniform(0, 0.02))  # or two who open it could keep each other out
        else:
            nonce, dropped_rows = _repaired(fd, path)
            fcntl.flock(fd, fcntl.LOCK_SH)
            return OpenFile(fd, nonce, True, dropped_rows)
    raise CheckpointError(f"{path} cannot be opened as a replay buffer: other processes hold it, but do not use it")
