"""Live shared memory, found through the kernel: what /proc says that processes have open. No file can go stale."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["buffer", "weights", "workers"]

MEMORY: dict[str, Kind] = {
    "/memfd:torchreplay-replay-buffer": "buffer",
    "/memfd:torchreplay-shared-weights": "weights",
    "/memfd:torchreplay-table-of-a-pool-of-workers": "workers",
}
"""What the names of anonymous files begin with, and what such a file holds."""

DELETED = " (deleted)"
"""What /proc adds to the name of a file that has none any more, as those in memory have never."""

MAGIC = b"Threplay"
"""The first bytes of every segment, of all format versions."""

SMALLEST = 1 << 18
"""Bytes of the smallest segment, which has a table of all participants."""

PAGE = 4096

SYSTEM = ("/dev/", "/proc/", "/sys/", "/memfd:", "/anon_hugepage", "/SYSV")
"""What names of open files begin with that are no files on a disk."""


class NoSuchBuffer(LookupError):
    """No live buffer is meant, or several are. The text says what there is, and what to do."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Shared memory of torchreplay that processes of this user have open.

    Attributes:
        kind: What it holds.
        inode: Of the file; of two files with the same one the devices differ.
        device: That it is on.
        path: The file's name; None where it lies in memory.
        holders: Processes that have it open for writing, and their descriptors, in the order of the process ids.
            Processes that only look at it are left out.
    """

    kind: Kind
    inode: int
    device: int
    path: Path | None
    holders: tuple[tuple[int, int], ...]

    def open(self) -> int:
        """Returns a new descriptor for reading. It shares no lock with others.

        Raises:
            NoSuchBuffer: All its holders have closed it, or are gone.
        """
        for pid, fd in self.holders:
            with suppress(OSError):
                own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                status = os.fstat(own)
                if (status.st_dev, status.st_ino) == (self.device, self.inode):
                    return own
                os.close(own)  # the number is another file's by now
        raise NoSuchBuffer("all processes that had the buffer are gone, or have closed it")


def shared_files() -> list[SharedFile]:
    """Returns what processes of this user have open, ordered by kind and then by the first process that has it.

    Processes may come and go meanwhile. What a process has open that this one may not look at is left out.
    """
    found: dict[tuple[int, int], tuple[Kind, Path | None]] = {}
    others: set[tuple[int, int]] = set()  # files of other programs
    holders: dict[tuple[int, int], dict[int, int]] = {}
    for pid, fd, target in _open_files():
        with suppress(OSError):  # gone meanwhile
            status = os.stat(f"/proc/{pid}/fd/{fd}")
            file = status.st_dev, status.st_ino
            if file in others:
                continue
            if file not in found:
                kind = _kind_of(pid, fd, target, status)
                if kind is None:
                    others.add(file)
                    continue
                on_disk = not target.startswith("/memfd:")
                found[file] = kind, Path(target.removesuffix(DELETED)) if on_disk else None
            if _may_write(pid, fd):
                holders.setdefault(file, {}).setdefault(pid, fd)
    files = [
        SharedFile(kind, inode, device, path, tuple(sorted(holders[device, inode].items())))
        for (device, inode), (kind, path) in found.items()
        if (device, inode) in holders
    ]
    return sorted(files, key=lambda file: (file.kind, file.holders, file.inode))


def _open_files() -> Iterator[tuple[int, int, str]]:
    """Yields process, descriptor and name of open files that may be ours."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:  # another user's, or gone
            continue
        for fd in descriptors:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if target.startswith("/memfd:torchreplay-") or (target[0] == "/" and not target.startswith(SYSTEM)):
                yield pid, int(fd), target


def _kind_of(pid: int, fd: int, target: str, status: os.stat_result) -> Kind | None:
    """Returns what a file holds; None: it is none of ours, or another user's."""
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return None
    if target.startswith("/memfd:"):
        kind = next((kind for prefix, kind in MEMORY.items() if target.startswith(prefix)), None)
        return kind if kind != "buffer" or _is_segment(pid, fd) else None
    is_sized = status.st_size >= SMALLEST and status.st_size % PAGE == 0
    return "buffer" if is_sized and _is_segment(pid, fd) else None


def _is_segment(pid: int, fd: int) -> bool:
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.pread(own, len(MAGIC), 0) == MAGIC
    finally:
        os.close(own)


def _may_write(pid: int, fd: int) -> bool:
    """Returns whether a descriptor was opened for writing, which those who only look do not."""
    for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return True


def program_of(pid: int) -> str:
    """Returns the program of a process for people, such as "python train.py"; "" when it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    texts = [word.decode(errors="replace") for word in words if word]
    if not texts:
        return ""
    program, *rest = texts
    return " ".join([Path(program).name if "/" in program else program, *map(_short, rest[:3])])[:60]


def _short(argument: str) -> str:
    argument = argument.split("\n", 1)[0].strip()  # of `python -c`
    return Path(argument).name if argument.startswith("/") else argument
