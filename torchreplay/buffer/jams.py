"""What a queue's writers and learners wait for, in words; and waits that can never end, which are found."""

from __future__ import annotations

import os
import threading
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from torchreplay.errors import ReplayTimeout, WouldBlockForever
from torchreplay.schema.limiters import from_native
from torchreplay.schema.samplers import Fifo
from torchreplay.segment.process_state import is_stopped, named
from torchreplay.segment.waits import IN_VAIN, RETURN_GRACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchreplay import _C
    from torchreplay._C import QueueState, Shortage
    from torchreplay.schema.config import Config

PUBLISH_GRACE = 60.0
"""Seconds within which another learner, or who comes for a publisher that died, is expected to publish a version."""


class Need(IntEnum):
    """Why writers have no room, by the oldest row that is needed: the native core's numbers."""

    NONE = 0
    TO_DRAW = 1
    HELD = 2
    UNFINISHED = 3
    UNWRITTEN = 4


def queue_state(segment: _C.Segment, count_streams: bool = False) -> QueueState | None:
    """Returns what the queue holds; None where the lock is another's now, who may be stopped."""
    try:
        return segment.queue_state(count_streams)
    except ReplayTimeout:
        return None


def held_by(holders: Sequence[tuple[int, int, bool]]) -> str:
    """Returns who holds how many items, and which of them are stopped: of (pid, items, whether it is this process)."""
    parts = [f"{items:,} by {'this process' if mine else named(pid)}" for pid, items, mine in holders]
    return ", ".join(parts)


def writers_of(state: QueueState, most: int = 8) -> str:
    """Returns whose writers there are: `most` processes by name, and how many more."""
    pids = sorted(set(state["writers"]))
    names = ["of this process" if pid == os.getpid() else f"of {named(pid)}" for pid in pids[:most]]
    return ", ".join(names + ([f"and of {len(pids) - most:,} more processes"] if len(pids) > most else []))


def writers_of_this_thread(segment: _C.Segment) -> int:
    """Returns how many writers the calling thread has: as long as it waits, none of them goes on."""
    census = segment.census(threading.active_count() > 1)
    return census["writers"] - census["others_writing"]


def kept_by(need: int, pid: int) -> str:
    """Returns what keeps the oldest row, where it is no item: an episode or a row that somebody writes; else ""."""
    who = named(pid) if pid else "an unknown process"
    if need == Need.UNFINISHED:
        return f"an unfinished episode of {who} keeps the oldest row"
    return f"the oldest row is being written by {who}" if need == Need.UNWRITTEN else ""


def why_full(segment: _C.Segment, config: Config) -> str:
    """Returns why a writer has no room: what waits to be drawn, who holds items, and what keeps the oldest row."""
    state = queue_state(segment)
    if state is None:
        return "the queue is full, and another process has its lock"
    holders = held_by(state["holders"])
    parts = [
        f"the queue is full: {state['to_draw']:,} items wait to be drawn",
        f"{state['held']:,} are held{holders and ': ' + holders}",
        kept_by(state["need"], state["needed_pid"]),
        f"capacity: {config.capacity:,} rows",
        _room_for_values(config, state) if state["pages_wanted"] else "",
    ]
    return "; ".join(filter(None, parts))


def why_not_admitted(segment: _C.Segment, n: int) -> str:
    """Returns why a writer begins no item: how many are, how far the learner is, and who holds items."""
    state = queue_state(segment)
    if state is None:
        return "no item is admitted, and another process has the queue's lock"
    limiter = from_native(*segment.limiter)
    holders = held_by(state["holders"])
    return (
        f"{state['may_admit']:,} items may be admitted, and {n:,} are to be; {state['may_write']:,} are begun, "
        f"{state['to_draw']:,} wait to be drawn, {state['held']:,} are held{holders and ': ' + holders}; the learner "
        f"is at policy_version {segment.policy_version:,}, and the limiter is {limiter}"
    )


def _room_for_values(config: Config, state: QueueState) -> str:
    """Returns that values of any length have no room, with the numbers."""
    page = state["page_bytes"]
    return (
        f"ragged_bytes: {config.ragged_bytes:,}, of which {state['pages_in_use'] * page:,} are in use, and the next "
        f"row takes {state['pages_wanted'] * page:,} in one piece"
    )


def why_short(segment: _C.Segment, within_window: int | None) -> str:
    """Returns what else a learner has to know that waits for items, each part after "; ": who holds some, who stops.

    Args:
        segment: The queue's memory.
        within_window: Items that can be drawn, where a window holds others back; None: there is no window.
    """
    state = queue_state(segment)
    if state is None:
        return ""
    beyond = 0 if within_window is None else state["to_draw"] - within_window
    holders = held_by(state["holders"])
    stopped = sorted({pid for pid in state["writers"] if is_stopped(pid)})
    parts = [
        holders and f"held: {holders}",
        kept_by(state["need"], state["needed_pid"]),
        f"{beyond:,} complete items are beyond the window, after an unfinished one" if beyond > 0 else "",
        stopped and f"of the writers: {', '.join(map(named, stopped))}",
    ]
    return "".join(f"; {part}" for part in parts if part)


def capacity_that_does(config: Config, state: QueueState) -> int:
    """Returns a capacity with which a jam ends: the same for writers and learners.

    The unfinished items of all environments fit into it, each with one row more. So do the items that are complete or
    held, and those that a learner lacks. Each unfinished item that is completed is one that it lacks no more.

    Args:
        config: What the queue was made of.
        state: Of the queue, with its streams counted.
    """
    stride, streams, lacking = config.view.native()[2], state["open_streams"], state["lacking"]
    return max(_rows_in_need(config, state), config.capacity + max(1, lacking - streams) * stride)


def _rows_in_need(config: Config, state: QueueState) -> int:
    """Returns how many rows the items take that are there, and those that come to be completed."""
    rows, stride, streams = config.view.rows_of_an_item, config.view.native()[2], state["open_streams"]
    items = state["to_draw"] + state["held"] + state["lacking"]
    return streams * (rows + 1) + max(0, items - streams) * stride


def ragged_bytes_that_do(config: Config, state: QueueState) -> int:
    """Returns `ragged_bytes` with which a jam for want of them ends, where no row is longer than those there.

    All rows of `capacity_that_does`, each as long as the longest, and that once more for the end of the ring, which no
    row goes over. With more bytes pages are larger, and the last one of each row is half empty: hence an eighth.
    """
    longest = state["longest_run"] * state["page_bytes"]
    enough = max(4, _rows_in_need(config, state) + 2) * longest
    return max(enough + enough // 8, (config.ragged_bytes or 0) + longest)


def advised_size(config: Config, state: QueueState) -> str:
    """Returns which argument of a queue that is full has to be larger, and how large.

    With a window that depends on how much faster others write than the one whose unfinished episode has no room.
    """
    if state["lacks_pages"]:
        return f"ragged_bytes of at least {ragged_bytes_that_do(config, state):,} (it is {config.ragged_bytes:,})"
    sampler = config.sampler
    if isinstance(sampler, Fifo) and sampler.window is not None and state["need"] == Need.UNFINISHED:
        return (
            f"a capacity of at least {capacity_that_does(config, state):,} that has room for all rows that are written "
            f"while the slowest environment completes an item"
        )
    return f"a capacity of at least {capacity_that_does(config, state):,}"


def _progress(state: QueueState) -> tuple[int, ...]:
    """Returns what changes where a queue moves."""
    return state["head"], state["limit"], state["page_limit"], state["to_draw"], state["held"]


class Jam:
    """Finds that a wait on a queue can never end.

    Args:
        segment: The queue's memory.
        config: What it was made of.
    """

    def __init__(self, segment: _C.Segment, config: Config) -> None:
        self._segment, self._config = segment, config
        self._seen: Any = None  # at the last look, and since when
        self._since = 0.0
        self._not_admitted: tuple[Any, float] | None = None  # the same of a learner whose writers are not admitted


class WriterJam(Jam):
    """Finds that unfinished episodes fill the queue, so that none can be completed. For all waits of a writer."""

    def check(self, others: int = 0) -> None:
        """Looks at the queue, a few times a second.

        Args:
            others: Writers that cannot go on either, and do not wait in the native core: such as those of this thread.

        Raises:
            WouldBlockForever: All writers wait for room, nothing can be drawn, and nobody holds anything.
        """
        now = time.monotonic()
        if now - self._since < IN_VAIN / 4:
            return
        state = queue_state(self._segment)
        if state is None:
            return
        alone = others + 1 >= len(state["writers"])
        self._since = 0.0 if alone else now  # nobody else moves: the next look is enough
        key = state["head"], state["needed_key"]
        stuck = (
            state["need"] == Need.UNFINISHED
            and not state["to_draw"]
            and not state["held"]
            and state["waiting"] + others >= len(state["writers"])
        )
        if stuck and self._seen == key:
            self._raise()
        self._seen = key if stuck else None

    def _raise(self) -> None:
        state = queue_state(self._segment, True)
        if state is None:
            return
        view, capacity, streams = self._config.view, self._config.capacity, max(1, state["open_streams"])
        full = f"{self._config.ragged_bytes:,} ragged_bytes" if state["lacks_pages"] else f"{capacity:,} rows"
        raise WouldBlockForever(
            f"append() of {self._config.called} would wait for ever: unfinished episodes of {streams:,} environments "
            f"fill the {full}, so that none of their items can be completed ({view} needs "
            f"{view.rows_of_an_item:,} rows of one environment), and nothing can be drawn. Choose "
            f"{advised_size(self._config, state)}, more where some environments are much slower than others, or fewer "
            f"environments"
        )


class LearnerJam(Jam):
    """Finds that a learner waits for items that no writer has room for. For one wait.

    What other loops of the process hold counts as soon to be done, unless the process has no other thread. Threads that
    each hold a claim, and wait for more within it, are not found: their waits end by their timeouts.

    Args:
        segment: The queue's memory.
        config: What it was made of.
        for_others: Another process takes over what this one holds.
    """

    def __init__(self, segment: _C.Segment, config: Config, for_others: bool = False) -> None:
        super().__init__(segment, config)
        self._for_others = for_others
        sampler = config.sampler
        self._window = sampler.window if isinstance(sampler, Fifo) else None
        self._head = -1  # at the last look
        self._stands = False

    def looked_at(self, shortage: Shortage, at_least: int, loop: int) -> Shortage:
        """Checks where items are missing, as `check` does. Returns what the native core gave instead of a batch.

        A full queue goes round the rows that it keeps. So its ring may turn without completing an item, until its
        writers wait for room. Then they may go on, or this look finds that they cannot.
        """
        if shortage[0] not in ("wait", "barren"):
            return shortage
        self.check(at_least, loop)
        return ("wait", *shortage[1:]) if self._stands else shortage

    def check(self, at_least: int, loop: int) -> None:
        """Looks at the queue.

        Args:
            at_least: Items that the learner waits for.
            loop: The number of its loop.

        Raises:
            WouldBlockForever: Nobody but the waiting learner could make room.
        """
        state = queue_state(self._segment)
        if state is None:  # says nothing, and what was seen before still holds
            return
        if state["admits"]:
            self._check_admission(state, at_least, loop)
        self._stands = state["need"] != Need.NONE and state["head"] == self._head
        self._head = state["head"]
        if state["need"] == Need.NONE:
            self._seen = None
            return
        mine, others = self._held(state, loop)
        single = threading.active_count() == 1
        by_writers = state["need"] in (Need.UNFINISHED, Need.UNWRITTEN)
        still = state["waiting"] + writers_of_this_thread(self._segment)
        moves = others or (by_writers and still < len(state["writers"]))
        key = _progress(state)
        if moves or key != self._seen:
            self._seen, self._since = (None if moves else key), time.monotonic()
            return
        alone = single and not self._segment.census(True)["others_learning"]
        if time.monotonic() - self._since < (0.0 if alone else RETURN_GRACE):
            return
        state = queue_state(self._segment, True)
        if state is None or _progress(state) != key:
            return
        advice, window = self._advice(mine), self._window
        if window is not None and state["to_draw"] >= at_least:
            advice = f"items beyond the window of {window:g} wait for the unfinished one; leave window out"
        if state["need"] == Need.UNFINISHED:
            advice = f"an unfinished episode keeps its place, and its writer has no room to go on; {advice}"
        there = "can be drawn" if window is None else "are complete"
        size = f"{self._config.capacity:,} rows' items"
        if state["lacks_pages"]:
            size = f"items that the {self._config.ragged_bytes:,} ragged_bytes have"
        raise WouldBlockForever(
            f"sample() of {self._config.called} would wait for ever: the queue is full, and its writers wait for room. "
            f"{at_least:,} items are asked for, {state['to_draw']:,} {there}, and this process holds {mine:,} of "
            f"the {size}; {advice}, or choose {advised_size(self._config, state)}"
        )

    def _held(self, state: QueueState, loop: int) -> tuple[int, int]:
        """Returns how many items this process holds, and how many others may soon be done with."""
        mine = 0 if self._for_others else sum(items for _, items, own in state["holders"] if own)
        elsewhere = 0 if threading.active_count() == 1 else self._segment.held_elsewhere(loop)
        return mine, state["held"] - mine + elsewhere

    def _check_admission(self, state: QueueState, at_least: int, loop: int) -> None:
        """Finds that a learner waits for more items than are admitted before it publishes another version.

        Who holds items may go on, and publish one; so may a thread that has published the last one. Where there is room
        for some items, but for fewer than each writer waits for, others may still come to begin them: for seconds.
        """
        mine, others = self._held(state, loop)
        there = state["to_draw"] + state["may_write"]
        blocked = bool(state["writers"]) and state["not_admitted"] == len(state["writers"])
        comes = there + (0 if blocked else state["may_admit"])
        key = state["head"], state["to_draw"], state["held"], state["may_admit"], self._segment.policy_version
        if comes >= at_least or others or state["has_other_publisher"]:
            self._not_admitted = None
            return
        now = time.monotonic()
        if self._not_admitted is None or self._not_admitted[0] != key:
            self._not_admitted = key, now
            return
        if now - self._not_admitted[1] < self._patience(state, there + state["may_admit"] >= at_least):
            return
        raise WouldBlockForever(
            f"sample() of {self._config.called} would wait for ever: {at_least:,} items are asked for, "
            f"{state['to_draw']:,} can be drawn, and {why_not_admitted(self._segment, 1)}. Its writers, "
            f"{writers_of(state)}, wait until another version is published, and nobody publishes one but who waits "
            f"here: {self._advice_of_admission(mine)}"
        )

    def _patience(self, state: QueueState, may_fit: bool) -> float:
        """Returns for how many seconds somebody may yet begin items, or publish a version for the first time."""
        if state["has_lost_publisher"] or self._segment.census(True)["others_learning"]:
            return PUBLISH_GRACE
        others = threading.active_count() - 1
        waiting = state["writers"].count(os.getpid()) if state["not_admitted"] == len(state["writers"]) else 0
        return RETURN_GRACE if may_fit or waiting < others else IN_VAIN / 4

    def _advice_of_admission(self, mine: int) -> str:
        first = "call commit() or release() first, " if mine else ""
        return (
            f"{first}ask for at most batch_size items, begin groups of which batch_size is a multiple, or give a "
            f"larger max_age"
        )

    def _advice(self, mine: int) -> str:
        return "call commit() or release() first" if mine else "ask for fewer, or for at_least=1"
