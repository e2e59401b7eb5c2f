"""Waits that can always say what they wait for, and that end when nobody is left to end them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

from torchreplay import _C
from torchreplay.errors import ReplayTimeout, Stopped, WouldBlockForever
from torchreplay.segment.progress import LONG_AFTER, LiveLine
from torchreplay.validation import checked_timeout

if TYPE_CHECKING:
    from torchreplay._C import Census

logger = logging.getLogger("torchreplay")

NEVER = (1 << 63) - 1
"""A deadline, in monotonic nanoseconds, that does not come."""

SLICE_NS = 50_000_000
"""Waits look around this often: for signals, deadlines, deaths, and rows whose wake-up got lost."""

RETURN_GRACE = 5.0
"""Seconds for which a learner believes that writers who are gone may come back: restarts take this long."""

STARTUP_GRACE = 120.0
"""Seconds for which a learner waits for the first writer of a buffer that was handed to other processes; and for which
the only thread of the process that made it waits for a learner elsewhere."""

IN_VAIN = 1.0
"""Seconds for which a ring must be seen without a complete item before a learner believes that it completes none."""

LOG_EVERY = 10.0
"""Seconds between two warnings of one long wait."""

STALL_LIMIT = 60.0
"""Seconds after which a writer that finds every slot held by stopped writers gives up."""


UNNAMED = "the replay buffer"
"""What messages call a buffer that has no name."""

Meanwhile: TypeAlias = Callable[[], None]
MEANWHILE: ContextVar[Meanwhile | None] = ContextVar("MEANWHILE", default=None)
"""What waits that begin in this context call whenever they look around."""


class Watched(Protocol):
    """What a wait looks at: a segment, or an object that reports the same of several."""

    @property
    def stopped(self) -> bool:
        """Whether it was stopped."""

    @property
    def called(self) -> str:
        """What messages call it."""

    def census(self, unused_count_as_others: bool, /) -> Census:
        """Returns who takes part."""


class Wait:
    """One wait: its start, its deadline, and the reasons to give it up.

    Args:
        segment: What it looks at.
        timeout: Seconds after which it ends; None: it has no deadline.
        alone_since: Since when the learner believes that writers may come back, as an earlier wait said that found none
            (`WouldBlockForever.alone_since`); None: since now. It holds while no writer has come and gone since.
    """

    _found_nobody = False  # at the last look that could
    _inserted = -1  # by then
    _barren_since: float | None = None

    def __init__(self, segment: Watched, timeout: float | None, alone_since: float | None = None) -> None:
        self._segment, self._alone_since = segment, alone_since
        seconds = None if timeout is None else checked_timeout(timeout)
        self._timeout = None if seconds == math.inf else seconds
        self._log_at = LOG_EVERY
        self._meanwhile = MEANWHILE.get()
        self._start = time.monotonic()

    @property
    def deadline_ns(self) -> int:
        """When the timeout is over, by the monotonic clock: for waits in the native core."""
        return NEVER if self._timeout is None else int(min((self._start + self._timeout) * 1e9, float(NEVER >> 1)))

    def look(self) -> None:
        """Looks around, as each wait does once a slice.

        Raises:
            Stopped: The buffer was stopped.
        """
        self._check_stopped()
        if self._meanwhile is not None:
            self._meanwhile()

    def slice_ns(self) -> int:
        """Looks around, and returns how long to sleep now.

        Raises:
            Stopped: The buffer was stopped.
        """
        self.look()
        if self._timeout is None:
            return SLICE_NS
        left = self._timeout - (time.monotonic() - self._start)
        return max(0, min(SLICE_NS, int(left * 1e9)))

    @property
    def expired(self) -> bool:
        """Whether the timeout is over."""
        return self._timeout is not None and time.monotonic() - self._start >= self._timeout

    def check_rows(
        self,
        inserted: int,
        needed: int,
        drawable: int,
        size: int | None,
        complete_when: str,
        remark: Callable[[], str] = str,
    ) -> None:
        """Gives up a wait for rows that nobody will write, or that took too long; a long one is logged.

        Who wrote the last rows may have left between the draw that missed them and this look. So it counts when nobody
        is found at two looks, and the draw between them saw no more rows than the one before.

        Args:
            inserted: Items that became drawable so far.
            needed: How many the limiter asks for.
            drawable: Items that can be drawn now.
            size: Rows held; None where that is not known.
            complete_when: When an item can be, as the view says.
            remark: Returns what else there is to say about these figures.

        Raises:
            Stopped: The buffer was stopped.
            WouldBlockForever: No writer is left.
            ReplayTimeout: The deadline has passed.
        """
        self._barren_since = None
        census = self._segment.census(threading.active_count() > 1)
        why = f" ({complete_when})" if complete_when and not drawable else ""
        self._check_stopped()  # last: who stops it may leave at once, and that is no reason to give up
        held = "" if size is None else f", size: {size:,} rows"

        def figures() -> str:
            return (
                f"{inserted:,} items were inserted, {needed:,} are needed and {drawable:,} can be drawn{why}; writers "
                f"alive: {census['writers']}, last write: {_ago(census['since_write'])}{held}{remark()}"
            )

        nobody, again = not census["others_writing"] and not census["supervisors"], self._found_nobody
        known, self._found_nobody, self._inserted = self._inserted, nobody, inserted
        if nobody:
            error = self._no_writer(census, figures)
            if error is not None and again and inserted == known:
                raise error
            if error is not None:
                return
        if self.expired:
            raise ReplayTimeout(f"no batch{self._of()} within {self._timeout:.10g} s: {figures()}")
        self._tell("rows", figures)

    def check_turns(self, trouble: str) -> None:
        """Gives up a wait for items that the ring does not complete, however often it turns.

        A small ring that turns fast may be without a complete item at one look, and another: it counts when it was so
        at each, for `IN_VAIN` seconds.

        Raises:
            RuntimeError: It was; `trouble` says what it means.
            ReplayTimeout: The deadline has passed before that.
        """
        now = time.monotonic()
        self._barren_since = now if self._barren_since is None else self._barren_since
        if now - self._barren_since >= IN_VAIN:
            raise RuntimeError(trouble)
        if self.expired:
            raise ReplayTimeout(f"no batch{self._of()} within {self._timeout:.10g} s: {trouble}")

    def check_delivery(self, waiting_for: str, not_admitted: str = "") -> None:
        """Says, now and then, what keeps the rows of a remote writer from being taken, or why it is not admitted.

        Raises:
            ReplayTimeout: The deadline has passed.
        """
        if self.expired:
            call, why = ("admit()", not_admitted) if not_admitted else ("append()", f"it waits for {waiting_for}")
            raise ReplayTimeout(f"{call}{self._of()} found no room within {self._timeout:.10g} s: {why}")
        self._tell(waiting_for, lambda: not_admitted or "the buffer is on another node")

    def _tell(self, what: str, figures: Callable[[], str]) -> None:
        """Says what is waited for, now and then."""
        waited = time.monotonic() - self._start
        if waited >= self._log_at:
            self._log_at += LOG_EVERY
            logger.warning("waiting for %s%s since %.0f s: %s", what, self._of(), waited, figures())

    def end(self) -> None:
        """Called when the wait is over, however it ended."""

    def _of(self) -> str:
        """Returns " of the replay buffer" with its name, where it has one."""
        return "" if self._segment.called == UNNAMED else f" of {self._segment.called}"

    def _check_stopped(self) -> None:
        if self._segment.stopped:
            raise Stopped(f"{self._segment.called} was stopped")

    def _no_writer(self, census: Census, figures: Callable[[], str]) -> WouldBlockForever | None:
        """Returns what to raise where nobody writes; None while somebody may come."""
        now, since, gone = time.monotonic(), self._start, census["since_departure"]
        if self._alone_since is not None and not 0 <= gone < now - self._alone_since:
            since = self._alone_since
        waited = now - since
        if not census["shared"]:
            reason = "no other thread holds a writer and the buffer was never handed to another process"
        elif gone >= 0 and min(gone, waited) >= RETURN_GRACE:
            reason = f"the last writer or learner left {gone:.0f} s ago"
        elif gone < 0 and waited >= STARTUP_GRACE:
            reason = f"no writer has come in {waited:.0f} s: did the explorers fail to start?"
        else:
            return None
        error = WouldBlockForever(
            f"sample(){self._of()} would wait for ever: {figures()}; {reason}. Write more rows, start explorers, or "
            f"ask less of the limiter; buffer.expect_writers() says that writers will come"
        )
        error.no_writer, error.alone_since = True, since
        return error

    def check_room(
        self,
        balance: Callable[[], str],
        advice: str,
        missing: str,
        state: Callable[[], str] = str,
        call: str = "append()",
    ) -> None:
        """Gives up a wait for a learner that cannot come, or that took too long; a long one is logged.

        As in `check_rows`, it counts when nobody is found at two looks: the last learner may have made room, and left.

        Args:
            balance: Says what was inserted and drawn, and what follows from it.
            advice: What else to do, after "Draw more batches between appends".
            missing: What the writer waits for.
            state: Returns what else is known of that, with "; " at its end. It waits for no lock.
            call: What waits.

        Raises:
            Stopped: The buffer was stopped.
            WouldBlockForever: This process made the buffer and has no other thread that could draw, nor has another
                process come to draw.
            ReplayTimeout: The deadline has passed.
        """
        census, waited = self._segment.census(True), time.monotonic() - self._start
        alone = not census["others_learning"] and not census["others_owning"] and threading.active_count() == 1
        self._check_stopped()  # last, as in check_rows
        again, self._found_nobody = self._found_nobody, alone
        if alone and (again or self.expired) and (not census["shared"] or waited >= STARTUP_GRACE):
            nobody = f"no learner has come in {waited:.0f} s, and there is no other thread to draw"
            if not census["shared"]:
                nobody = "there is no other thread and no other process to draw"
            raise WouldBlockForever(
                f"{call}{self._of()} would wait for ever: {balance()}; writers alive: {census['writers']}, last "
                f"write: {_ago(census['since_write'])}; {nobody}. Draw more batches between appends, {advice}"
            )

        def figures() -> str:
            alive = f"{state()}learners alive: {census['learners']}"
            if not census["learners"] or census["others_learning"]:
                return alive
            return (
                f"{alive}, which is this thread itself: it waits for itself, unless another comes. Draw between appends"
            )

        if self.expired:
            raise ReplayTimeout(f"{call}{self._of()} found no room within {self._timeout:.10g} s: {figures()}")
        self._tell(missing, figures)


Waiting: TypeAlias = Callable[[Watched, float | None], Wait]
"""Begins a wait: a kind of wait, perhaps one that goes on with another."""

Listener: TypeAlias = Literal["owners", "learners", "supervisors"]
LISTENERS: tuple[Listener, ...] = get_args(Listener)


class Audience:
    """Whether anybody is left to draw what is written.

    Args:
        segment: What is written to.
        listeners: The kinds of participant that count.
    """

    def __init__(self, segment: Watched, listeners: Sequence[Listener] = LISTENERS) -> None:
        self._segment, self._listeners = segment, listeners
        self._alone_since: float | None = None

    def check(self) -> None:
        """Checks which participants are there; to be called about once a second.

        Raises:
            Stopped: Nobody has been there to draw for some seconds.
        """
        census = self._segment.census(True)
        now = time.monotonic()
        if any(census[who] for who in self._listeners):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since >= RETURN_GRACE:
            raise Stopped(
                f"since {now - self._alone_since:.0f} s nobody draws what this writer writes: the process that made "
                f"the buffer is gone or has closed it, and no learner is left"
            )


class ShownWait(Wait):
    """A wait that a terminal shows as one live line while it lasts."""

    _line: LiveLine | None = None

    def _tell(self, what: str, figures: Callable[[], str]) -> None:
        waited = time.monotonic() - self._start
        if self._line is None and waited >= LONG_AFTER:
            self._line = LiveLine.on_terminal()
        if self._line is None:
            super()._tell(what, figures)
        else:
            self._line.show(f"waiting for {what}{self._of()} since {waited:.0f} s: {figures()}")

    def end(self) -> None:
        """Takes the line away."""
        if self._line is not None:
            self._line.close()


def _ago(seconds: float) -> str:
    return "never" if seconds < 0 else f"{seconds:.1f} s ago"


_C.init_waits(ReplayTimeout, Stopped, logger.warning, LOG_EVERY)  # as those of the native core end, and what they log
