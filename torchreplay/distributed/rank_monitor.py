"""The ranks of a run on one machine watch each other: which have left, which are gone, and why."""

from __future__ import annotations

import faulthandler
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torchreplay.errors import AttachError
from torchreplay.segment.waits import logger

REASON_SECONDS = 2.0
"""Seconds for which a rank whose collective has failed waits to hear which rank is the reason: the kernel closes the
connections of a dying process before it tells of the death."""

GRACE = 30.0
"""Seconds that a rank has to come out of what it does once another one is lost; then its process is ended."""

LONGEST = 1500  # bytes of a reason: a whole line goes through a pipe in one piece up to 4096


@dataclass(frozen=True, slots=True)
class Member:
    """What the other ranks need to know of one. Plain data.

    Attributes:
        rank: Its number.
        pid: Its process.
        inbox: Descriptor, there, of the writing end of the pipe that it reads.
        inode: The pipe's inode, so that another process of that number is noticed.
        machine: Boot id of its machine.
    """

    rank: int
    pid: int
    inbox: int
    inode: int
    machine: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"


@dataclass(slots=True)
class _Peer:
    """Another rank, as this one sees it."""

    member: Member
    alive: int = -1  # a pidfd: readable once the process has ended
    inbox: int = -1
    left: bool = field(default=False)


class RankMonitor:
    """The other ranks of a run on this machine.

    Each rank has a pipe that the others write to, and a pidfd for each other rank. A thread sleeps until one of them
    has something to say. The first rank that dies, or says that it failed, is the reason for which the run is lost:
    everyone learns it. A rank that has left in order may then do what it likes.

    Args:
        rank: This process's number.
        machine: Boot id of this machine.

    Attributes:
        me: This rank, as the others need to know it.
        loss: Why the run is lost; None while it is not.
    """

    def __init__(self, rank: int, machine: str) -> None:
        self._inbox, self._own = os.pipe()
        os.set_blocking(self._inbox, False)
        self.me = Member(rank, os.getpid(), self._own, os.fstat(self._own).st_ino, machine)
        self.loss: str | None = None
        self._peers: dict[int, _Peer] = {}
        self._left = False  # said so; the thread has not heard of it before it reads it, and closes nothing before
        self._leaving = False
        self._lost = threading.Event()
        self._heard = threading.Event()
        self._on_loss: Callable[[], object] = lambda: None
        self._watch: threading.Thread | None = None

    def meet(self, members: Sequence[Member]) -> None:
        """Gets to know the others. All are alive now, and stay so until they know of this.

        Raises:
            AttachError: One of them cannot be seen from here.
        """
        for member in members:
            if member.rank == self.me.rank:
                continue
            peer = self._peers[member.rank] = _Peer(member)
            try:
                peer.alive = os.pidfd_open(member.pid)
                inbox = f"/proc/{member.pid}/fd/{member.inbox}"
                peer.inbox = os.open(inbox, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be another pipe by now
                os.set_blocking(peer.inbox, True)
                seen = os.fstat(peer.inbox).st_ino == member.inode
            except OSError:
                seen = False
            if not seen:
                raise AttachError(
                    f"{self.me} does not see the process of {member}, though both are on this machine: all ranks must "
                    f"run as the same user and in the same container (PID namespace)"
                )

    def watch(self, on_loss: Callable[[], object]) -> None:
        """Starts to watch over the others.

        Args:
            on_loss: Called in a thread of its own once, when another rank is lost while this one has not left.
        """
        self._on_loss = on_loss
        self._watch = threading.Thread(target=self._run, name="torchreplay-peers", daemon=True)
        self._watch.start()

    def hear(self, patience: float = 0.0) -> str | None:
        """Returns why the run is lost, after hearing all that was said until now; waits for it up to `patience` s."""
        if self._left or self._watch is None:
            return self.loss
        self._heard.clear()
        self._write(self._own, "heard")
        self._heard.wait(REASON_SECONDS)
        if self.loss is None:
            self._lost.wait(patience)
        return self.loss

    def leave(self, failure: str | None = None) -> None:
        """Reports to the others that this rank leaves, in order or because of `failure`. Idempotent."""
        if self._left:
            return
        self._left = True
        if failure is not None and self.loss is None:
            self.loss = f"{self.me} {failure}"
            self._tell_all(f"lost {self.me.rank} {self.loss}")
        self._tell_all(f"left {self.me.rank}")
        if self._watch is None:
            self._close()
        else:
            self._write(self._own, f"left {self.me.rank}")

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._inbox, *(peer.alive for peer in self._peers.values())):
            poll.register(fd, select.POLLIN)
        deadline = None
        while not self._leaving:
            self._look(poll, None if deadline is None else deadline - time.monotonic())
            if deadline is None and self.loss is not None:
                deadline = time.monotonic() + GRACE
            if deadline is not None and time.monotonic() >= deadline and not self._left:
                self._end_process()
        self._close()

    def _look(self, poll: select.poll, seconds: float | None) -> None:
        """Sleeps until something happens, or so many seconds, and takes note of it."""
        ready = {fd for fd, _ in poll.poll(None if seconds is None else max(0.0, seconds * 1000))}
        if ready:  # first: a rank that said why it leaves may be gone by now
            with suppress(BlockingIOError):
                for line in os.read(self._inbox, 1 << 16).decode(errors="replace").splitlines():
                    self._take_note(line)
        for peer in self._peers.values():
            if peer.alive in ready:
                poll.unregister(peer.alive)
                if not peer.left:
                    peer.left = True
                    self._lose(f"{peer.member} is gone: it died, or ended before its training was over")

    def _take_note(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        rank, _, reason = rest.partition(" ")
        if word == "heard":
            self._heard.set()
        elif word == "left" and int(rank) == self.me.rank:
            self._leaving = True
        elif word == "left":
            self._peers[int(rank)].left = True
        elif word == "lost":
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self.loss is not None or self._left:
            return
        self.loss = reason
        self._tell_all(f"lost {self.me.rank} {reason}")  # before anyone sees what it does
        logger.error("%s; the run ends on %s too", reason, self.me)
        self._on_loss()
        self._lost.set()

    def _tell_all(self, line: str) -> None:
        for peer in self._peers.values():
            self._write(peer.inbox, line)

    def _write(self, fd: int, line: str) -> None:
        text = " ".join(line.split()).encode()[:LONGEST].decode(errors="ignore")
        with suppress(OSError):  # a rank that has left reads no more
            os.write(fd, f"{text}\n".encode())

    def _end_process(self) -> None:
        logger.critical("%s; %s has not come out of this within %g s and is ended:", self.loss, self.me, GRACE)
        faulthandler.dump_traceback(2)
        os._exit(1)

    def _close(self) -> None:
        for peer in self._peers.values():
            for fd in (peer.alive, peer.inbox):
                if fd >= 0:
                    os.close(fd)
        self._peers = {}
        os.close(self._inbox)
        os.close(self._own)
