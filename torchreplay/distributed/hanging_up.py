"""Ending this process's TCP connections with given processes of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def hang_up(pids: Iterable[int]) -> int:
    """Shuts down this process's TCP connections with the processes `pids`, and returns how many there were.

    A wait for data on one of them, at either end, ends with an error at once, as if the other process had died. This is
    what ends gloo's collectives: they hear of nothing but their connections and a time-out, and `abort()` and
    `destroy_process_group()` do not touch the connections (torch 2.13: a peer in `all_reduce` waits on after either).
    The descriptors stay open and their owner's.
    """
    own = dict(_sockets(os.getpid()))
    others = {inode for pid in pids for inode in dict(_sockets(pid))}
    ends = dict(_connections())
    theirs = {ends[inode] for inode in others - own.keys() if inode in ends}
    ended = 0
    for inode in own.keys() - others:  # a socket that both have was inherited: it is no connection between them
        here, there = ends.get(inode, ("", ""))
        if (there, here) in theirs:
            with suppress(OSError), socket.socket(fileno=os.dup(own[inode])) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def _sockets(pid: int) -> Iterator[tuple[str, int]]:
    """Yields (inode, a descriptor) of the sockets of a process; of one that is gone there are none."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")
                if kind == "socket":
                    yield inode.rstrip("]"), int(fd)


def _connections() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the inode and the addresses, near and far in the kernel's notation, of all TCP sockets of this machine."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(FileNotFoundError):
            for line in table.read_text().splitlines()[1:]:
                column = line.split()
                yield column[9], (column[1], column[2])
