"""All live buffers of a machine, in a few figures each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from torchreplay.monitoring.discovery import NoSuchBuffer, SharedFile, program_of, shared_files
from torchreplay.monitoring.snapshot import LiveBuffer
from torchreplay.monitoring.timeline import Timeline

LOOK = 0.15
"""Seconds between the two looks by which rates are taken."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One live buffer. Plain data.

    Attributes:
        name: What people call it, that of its file, or "#" and its inode.
        inode: Of its file, or memory.
        nonce: Its identity, equal for all who look; 0 where that is not known.
        path: Its file; "" where it lies in memory.
        pid: The process that made it, or one that has it open.
        program: That one's.
        rows: Rows held; of a queue those that are still needed.
        capacity: Rows that fit.
        nbytes: Of its memory, or its file.
        rows_per_second: Rows written of late.
        batches_per_second: Batches drawn of late.
        writers: Those alive.
        learners: Those alive.
        to_draw: Items of a queue that wait to be drawn; -1: it is no queue.
        held_items: Items of a queue that somebody holds.
        dropped_items: Items of a queue that were overwritten while they were still to be drawn, or held and not
            committed.
        oldest_age: Seconds since the oldest item of a queue was written that can be drawn; -1 if there is none.
        age: Seconds since it was made.
        stopped: Whether it was stopped.
        trouble: Why nothing else is known of it; "" where all is.
        node: Ray's id of its node; "" without Ray.
        ragged_bytes: For the values of ragged fields; 0: there are none.
        ragged_fill: Share of these that rows take.
    """

    name: str
    inode: int
    nonce: int
    path: str
    pid: int
    program: str
    rows: int = 0
    capacity: int = 0
    nbytes: int = 0
    rows_per_second: float = 0.0
    batches_per_second: float = 0.0
    writers: int = 0
    learners: int = 0
    to_draw: int = -1
    held_items: int = 0
    dropped_items: int = 0
    oldest_age: float = -1.0
    age: float = 0.0
    stopped: bool = False
    trouble: str = ""
    node: str = ""
    ragged_bytes: int = 0
    ragged_fill: float = 0.0


def survey(seconds: float = LOOK, node: str = "") -> list[Listed]:
    """Returns the live buffers of this user on this machine, after two looks at each.

    Args:
        seconds: Between the looks.
        node: Ray's id of this node, for what is returned.
    """
    with ExitStack() as stack:
        buffers, refused = _opened(stack)
        looks = [(buffer, Timeline()) for buffer in buffers]
        _look(looks)
        if looks:
            time.sleep(seconds)
        _look(looks)
        return [*_listed(looks, node), *(_troubled(file, why, node) for file, why in refused)]


def _opened(stack: ExitStack) -> tuple[list[LiveBuffer], list[tuple[SharedFile, str]]]:
    """Returns all live buffers, open until `stack` ends, and the files that cannot be read, each with the reason."""
    buffers: list[LiveBuffer] = []
    refused: list[tuple[SharedFile, str]] = []
    for file in shared_files():
        if file.kind == "buffer":
            try:
                buffers.append(stack.enter_context(LiveBuffer(file)))
            except NoSuchBuffer:  # gone meanwhile
                continue
            except (ConnectionError, OSError) as error:
                refused.append((file, str(error)))
    return buffers, refused


def _look(looks: list[tuple[LiveBuffer, Timeline]]) -> None:
    for buffer, timeline in looks:
        timeline.add(buffer.snapshot())


def _listed(looks: list[tuple[LiveBuffer, Timeline]], node: str) -> Iterator[Listed]:
    for buffer, timeline in looks:
        now = timeline.now
        pid, program = buffer.owner(now)
        queue = now.queue
        yield Listed(
            name=buffer.name,
            inode=buffer.file.inode,
            nonce=buffer.nonce,
            path="" if buffer.file.path is None else str(buffer.file.path),
            pid=pid,
            program=program,
            rows=buffer.fill(now),
            capacity=buffer.capacity,
            nbytes=buffer.nbytes,
            rows_per_second=timeline.rate("head"),
            batches_per_second=timeline.rate("draws"),
            writers=len(now.alive("writer")),
            learners=len(now.alive("learner")),
            to_draw=-1 if queue is None else queue.to_draw,
            held_items=0 if queue is None else queue.held_items,
            dropped_items=now.dropped_items,
            oldest_age=-1.0 if queue is None else queue.oldest_age,
            age=now.age,
            stopped=now.stopped,
            node=node,
            ragged_bytes=buffer.ragged_bytes,
            ragged_fill=now.ragged_fill,
        )


def _troubled(file: SharedFile, trouble: str, node: str) -> Listed:
    pid = file.holders[0][0]
    name = f"#{file.inode}" if file.path is None else file.path.name
    path = "" if file.path is None else str(file.path)
    return Listed(name, file.inode, 0, path, pid, program_of(pid), trouble=trouble, node=node)


def choose(given: str | None) -> LiveBuffer:
    """Returns the live buffer that is meant, open for reading.

    Args:
        given: A name, a file, a process id or an inode (with or without "#"); None: the only one there is.

    Raises:
        NoSuchBuffer: None is meant, or several are; the text lists what there is.
        ConnectionError: It is of another version of torchreplay, or damaged.
    """
    with ExitStack() as stack:
        buffers, refused = _opened(stack)
        meant = buffers if given is None else _meant(given, buffers)
        if len(meant) == 1:
            return LiveBuffer(meant[0].file)
        unusable = [why for file, why in refused if given is None or _is(file, given)]
        if not meant and len(unusable) == 1 and (given is not None or not buffers):
            raise ConnectionError(unusable[0])
        raise NoSuchBuffer(_what_to_do(given, meant, buffers))


def _meant(given: str, buffers: list[LiveBuffer]) -> list[LiveBuffer]:
    """Returns those of a name; else of a process that made them; else of a file, an inode or another process."""
    by: list[list[LiveBuffer]] = [
        [buffer for buffer in buffers if buffer.config.name == given],
        [buffer for buffer in buffers if str(buffer.owner(buffer.snapshot())[0]) == given],
        [buffer for buffer in buffers if _is(buffer.file, given)],
    ]
    return next((found for found in by if found), [])


def _is(file: SharedFile, given: str) -> bool:
    """Returns whether a file is meant: by its path, its inode, or a process that has it open."""
    if file.path is not None and str(file.path) in (os.path.abspath(given), os.path.realpath(given)):
        return True
    return given.removeprefix("#") == str(file.inode) or given in (str(pid) for pid, _ in file.holders)


def _what_to_do(given: str | None, meant: list[LiveBuffer], buffers: list[LiveBuffer]) -> str:
    def named(those: list[LiveBuffer]) -> str:
        return ", ".join(f"{b.name} (#{b.file.inode}, process {b.owner(b.snapshot())[0]})" for b in those)

    if not buffers:
        return (
            "no live buffer of this user was found on this machine: start a program that makes a ReplayBuffer. "
            "For one in a file that nobody uses, see `torchreplay inspect FILE`"
        )
    if not meant:
        return f"no live buffer is called {given!r}: there are {named(buffers)}"
    which = "there are" if given is None else f"{given!r} may be"
    return f"{which} {len(meant)} live buffers: {named(meant)}. Say which by its #number"
