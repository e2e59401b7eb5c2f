"""Ending TCP connections with given processes of this machine, whoever in this process holds them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def hang_up(pids: Iterable[int]) -> int:
    """Shuts down this process's TCP connections with the processes `pids`, and returns how many there were.

    Whoever waits for data on one of them, at either end, gets an error at once, as if the other process had died. This
    is what ends gloo's collectives: they hear of nothing but their connections and a time-out, and `abort()` and
    `destroy_process_group()` do not touch the connections (torch 2.13: a peer in `all_reduce` waits on after either).
    The descriptors stay open and their owner's.
    """
    ends = dict(_connections())  # by inode: the connection's addresses, ours first
    theirs = {ends[inode] for pid in pids for _, inode in _sockets(pid) if inode in ends}
    ended = 0
    for fd, inode in list(_sockets(os.getpid())):
        here, there = ends.get(inode, ("", ""))
        if (there, here) in theirs:
            with suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def _sockets(pid: int) -> Iterator[tuple[str, str]]:
    """Yields (descriptor, inode) of the sockets of a process; of one that is gone there are none."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")
                if kind == "socket":
                    yield fd, inode.rstrip("]")


def _connections() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the inode and the two addresses, in the kernel's notation, of all TCP connections of this machine."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(FileNotFoundError):
            for line in table.read_text().splitlines()[1:]:
                column = line.split()
                yield column[9], (column[1], column[2])
