"""Waits of a queue that can never end: found, and said with the numbers."""

from __future__ import annotations

import threading
import time
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchreplay.errors import ReplayTimeout, WouldBlockForever
from torchreplay.segment.waits import IN_VAIN, LOG_EVERY, RETURN_GRACE, logger

if TYPE_CHECKING:
    from torchreplay import _C
    from torchreplay._C import QueueState
    from torchreplay.schema.config import Config


class Need(IntEnum):
    """Why the oldest row that is needed is so: the native core's numbers."""

    NONE = 0
    TO_DRAW = 1
    HELD = 2
    UNFINISHED = 3
    UNWRITTEN = 4


def state_of(segment: _C.Segment, count_streams: bool = False) -> QueueState | None:
    """Returns what the queue holds; None where the lock is another's now, who may be stopped."""
    try:
        return segment.queue_state(count_streams)
    except ReplayTimeout:
        return None


def held_by(state: QueueState) -> str:
    """Returns who holds how many items, and which of them are stopped; "" where nobody holds any."""
    parts = []
    for pid, items, mine in state["holders"]:
        who = "this process" if mine else f"process {pid}"
        stopped = f", which is stopped (continue it with `kill -CONT {pid}`)" if not mine and _is_stopped(pid) else ""
        parts.append(f"{items:,} by {who}{stopped}")
    return f"held: {', '.join(parts)}" if parts else ""


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


class WriterJam:
    """Finds that unfinished episodes fill the queue, so that none can be completed. For one wait of a writer.

    Args:
        segment: The queue's memory.
        config: What it was made of.
    """

    def __init__(self, segment: _C.Segment, config: Config) -> None:
        self._segment, self._config = segment, config
        self._seen: Any = None  # at the last look, and when
        self._since = 0.0
        self._log_at = LOG_EVERY

    def check(self, waited: float) -> None:
        """Looks at the queue, a few times a second.

        Args:
            waited: Seconds so far.

        Raises:
            WouldBlockForever: All writers wait for room, nothing can be drawn, and nobody holds anything.
        """
        now = time.monotonic()
        if now - self._since < IN_VAIN / 4:
            return
        self._since = now
        state = state_of(self._segment)
        if state is None:
            return
        if waited >= self._log_at:
            self._log_at += LOG_EVERY
            text = "the queue is full since %.0f s: %d items wait to be drawn; %s"
            logger.warning(text, waited, state["to_draw"], held_by(state))
        key = state["head"], state["needed_key"]
        stuck = (
            state["need"] == Need.UNFINISHED
            and not state["to_draw"]
            and not state["held"]
            and state["waiting"] + 1 >= state["writers"]  # this one looks, and does not sleep
        )
        if stuck and self._seen == key:
            self._raise()
        self._seen = key if stuck else None

    def _raise(self) -> None:
        state = state_of(self._segment, True)
        if state is None:
            return
        view, capacity, streams = self._config.view, self._config.capacity, max(1, state["open_streams"])
        enough = max(capacity + 1, streams * (view.rows_of_an_item + 1))
        raise WouldBlockForever(
            f"append() of {self._config.called} would wait for ever: unfinished episodes of {streams:,} environments "
            f"fill the {capacity:,} rows, so that none of their items can be completed ({view} needs "
            f"{view.rows_of_an_item:,} rows of one environment), and nothing can be drawn. Choose a capacity of at "
            f"least {enough:,}, more where some environments are much slower than others, or fewer environments"
        )


class LearnerJam:
    """Finds that a learner waits for items that no writer has room for. For one wait.

    Args:
        segment: The queue's memory.
        config: What it was made of.
    """

    def __init__(self, segment: _C.Segment, config: Config) -> None:
        self._segment, self._config = segment, config
        self._seen: Any = None
        self._since = time.monotonic()

    def check(self, at_least: int, loop: int) -> None:
        """Looks at the queue.

        Args:
            at_least: Items that the learner waits for.
            loop: The number of its loop.

        Raises:
            WouldBlockForever: Nobody but the waiting learner could make room.
        """
        state = state_of(self._segment)
        if state is None or state["head"] < state["limit"] or state["need"] == Need.NONE:
            self._seen = None
            return
        mine = sum(items for _, items, own in state["holders"] if own)
        others = state["held"] - mine + self._segment.held_elsewhere(loop)
        by_writers = state["need"] in (Need.UNFINISHED, Need.UNWRITTEN)
        moves = others or (by_writers and state["waiting"] < state["writers"])
        key = state["head"], state["limit"], state["to_draw"], state["held"]
        if moves or key != self._seen:
            self._seen, self._since = (None if moves else key), time.monotonic()
            return
        census = self._segment.census(True)
        alone = not census["others_learning"] and threading.active_count() == 1
        if time.monotonic() - self._since < (0.0 if alone else RETURN_GRACE):
            return
        advice = "call commit() or release() first" if mine else "ask for fewer, or for at_least=1"
        if state["need"] == Need.UNFINISHED:
            advice = f"an unfinished episode keeps its place, and its writer has no room to go on; {advice}"
        rows = self._config.view.rows_of_an_item
        raise WouldBlockForever(
            f"sample() of {self._config.called} would wait for ever: the queue is full, and its writers wait for room. "
            f"{at_least:,} items are asked for, {state['to_draw']:,} can be drawn, and this process holds {mine:,} of "
            f"the {self._config.capacity:,} rows' items; {advice}, or choose a capacity of at least "
            f"{self._config.capacity + at_least * rows:,}"
        )
