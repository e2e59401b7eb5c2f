"""Opening what should be a file, though others may have chosen its name: it is never waited for."""

from __future__ import annotations

import errno
import os
import stat


class NoRegularFile(ValueError):
    """It is a directory, a device, a pipe, a socket, or a link where none is followed."""

    def __init__(self) -> None:
        super().__init__("it is no regular file")


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Returns the descriptor of a file that must be one; closed on exec.

    Raises:
        NoRegularFile: It is something else.
        OSError: It cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)  # or a pipe waits for its other end
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV, errno.ELOOP):  # a socket, a device that is not there, a link
            raise NoRegularFile from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NoRegularFile
    return fd


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Returns the descriptor of a file of this user; closed on exec.

    Raises:
        NoRegularFile: It is something else.
        PermissionError: It belongs to another user.
        OSError: It cannot be opened.
    """
    fd = open_regular(path, flags)
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    return fd
