"""Little memory: a machine that says so, and cgroups of the system's own."""

import os
import secrets
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchreplay.segment import reservation, segment_file

MIB = 1 << 20


class Machine:
    """A /proc and a /sys of its own, in which a process finds its memory and the limits of its cgroup."""

    def __init__(self, root, monkeypatch):
        self._root = root
        monkeypatch.setattr(reservation, "Path", lambda path: root / str(path).lstrip("/"))
        self.in_cgroup("0::/")
        self.write("proc/self/status", "VmPTE: 0 kB")

    def write(self, path, text):
        path = self._root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def memory(self, available):
        self.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB")

    def in_cgroup(self, lines):
        self.write("proc/self/cgroup", lines)

    def limit(self, directory, limit, used, inactive=0, names=("memory.max", "memory.current"), active=0):
        for name, text in zip(names, (limit, used), strict=True):
            self.write(f"sys/fs/cgroup/{directory}/{name}", text)
        self.write(f"sys/fs/cgroup/{directory}/memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file {active}")


@contextmanager
def cgroup_limited_to(size):
    """A cgroup of the system's own below this process's, with `size` bytes of memory at most; skips where forbidden."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    in_v1 = [path for _, controllers, path in lines if controllers == "memory"]
    root, limit = ("memory", "memory.limit_in_bytes") if in_v1 else ("", "memory.max")
    own = (in_v1 or [path for *_, path in lines])[0]
    group = Path("/sys/fs/cgroup", root, own.lstrip("/"), f"torchreplay-{secrets.token_hex(4)}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip(f"the cgroups below {own} have no limit of memory")
        (group / limit).write_text(str(size))
        yield group
    finally:
        group.rmdir()


def join(group, left):
    """Moves this process to a cgroup, where it finds so many bytes beside what it takes there by itself."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    limit, used = next(pair for pair in names if (group / pair[0]).exists())
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / limit).write_text(str(int((group / used).read_text()) + left))


def require_disk(directory):
    """Skips a test whose files would be memory."""
    if segment_file._is_in_memory(directory):
        pytest.skip(f"{directory} is on a tmpfs")
