"""Keeps a pool's explorers running: launches, listens, restarts, and ends them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from torchreplay.ray.actors import Actors
from torchreplay.ray.board import Board
from torchreplay.ray.explorer import Launch, Outcome
from torchreplay.ray.stats import ExplorerFailure, ExplorerStats, State, explorer_stats

logger = logging.getLogger("torchreplay.ray")

_POLL: Final = 0.1
"""Seconds between looks at stop requests and due restarts; an explorer's end is seen at once."""

_LONGEST_DELAY: Final = 30.0
"""Seconds; the back-off between restarts doubles up to this."""

_GRACE: Final = 0.5
"""Seconds in which a stopped explorer should notice by itself, before it is interrupted."""

_HOPELESS_AFTER: Final = 5
"""Failures in a row, without a row or an episode in between, after which nobody should wait for an
explorer any more. It goes on being restarted."""


class Mark(Protocol):
    """The buffer's note that writers may still come."""

    def close(self) -> None:
        """Withdraws it."""


@dataclass
class Explorer:
    """One explorer as its supervisor sees it."""

    index: int
    state: State = "starting"
    restarts: int = 0
    streak: int = 0  # failures in a row without progress
    recorded: int = 0  # its progress on the board at the last launch
    due: float = 0.0  # monotonic time of the next launch
    run: Any = None  # the present run, None between runs
    last_error: str | None = None

    @property
    def over(self) -> bool:
        """Whether it will not run again."""
        return self.state in ("finished", "failed", "stopped")


@dataclass(frozen=True)
class Policy:
    """How explorers are seeded and restarted.

    Attributes:
        seed: Entropy of all seeds.
        generation: Number of this start of the pool; every start has its own seeds.
        max_restarts: Per explorer; -1 for no limit.
        restart_delay: Seconds before the first restart; doubles with each further failure.
    """

    seed: int
    generation: int
    max_restarts: int
    restart_delay: float

    def run_seed(self, explorer: Explorer) -> int:
        """Seed of the explorer's next run: its own child of the pool's seed (`SeedSequence`)."""
        key = (self.generation, explorer.index, explorer.restarts)
        return int(np.random.SeedSequence(self.seed, spawn_key=key).generate_state(1)[0])

    def delay(self, streak: int) -> float:
        """Seconds to wait before the restart that follows `streak` failures in a row."""
        return float(min(self.restart_delay * 2.0 ** min(streak - 1, 30), _LONGEST_DELAY))

    def gives_up(self, explorer: Explorer) -> bool:
        """Whether the explorer has used up its restarts."""
        return 0 <= self.max_restarts <= explorer.restarts


@dataclass
class Supervisor:
    """A background thread that looks after the explorers of one start of a pool.

    Args:
        actors: Runs explorers as Ray actors.
        board: Shared memory of the pool.
        num_explorers: How many explorers.
        policy: Seeds and restarts.
        expect_writers: Makes the buffer's mark that writers may still come.
        failures: Receives every failure.
    """

    actors: Actors
    board: Board
    num_explorers: int
    policy: Policy
    expect_writers: Callable[[], Mark]
    failures: deque[ExplorerFailure]
    explorers: Sequence[Explorer] = field(init=False)

    def __post_init__(self) -> None:
        self.explorers = [Explorer(index) for index in range(self.num_explorers)]
        self.over = threading.Event()
        """Set when no explorer will run any more."""
        self._stopping = threading.Event()
        self._deadline = 0.0
        self._mark: Mark | None = self.expect_writers()
        self._thread = threading.Thread(target=self._work, name="torchreplay-explorers", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Asks every explorer to finish, interrupts, and after `timeout` seconds kills, those that have not."""
        self._deadline = time.monotonic() + timeout
        self.board.stopped = True
        self._stopping.set()
        self._thread.join()

    def stats(self) -> tuple[ExplorerStats, ...]:
        """Statistics of each explorer, in order."""
        return tuple(
            explorer_stats(e.index, self.board.entries[e.index], e.state, e.restarts, e.last_error)
            for e in self.explorers
        )

    def _work(self) -> None:
        try:
            while not self._stopping.is_set() and not all(e.over for e in self.explorers):
                self._launch_due()
                self._keep_mark()
                self._listen()
            self._end_all()
        except Exception:
            # Ray was shut down under the pool, most likely: its actors went with it.
            logger.exception("the explorers are no longer supervised")
            for explorer in self.explorers:
                if not explorer.over:
                    explorer.state, explorer.last_error = "failed", "Ray is gone"
        finally:
            self._withdraw_mark()
            self.over.set()

    def _launch_due(self) -> None:
        now = time.monotonic()
        for e in self.explorers:
            if e.run is None and not e.over and e.due <= now:
                self.board.entries[e.index]["pid"] = 0
                e.recorded = self.board.recorded(e.index)
                e.run = self.actors.launch(Launch(e.index, self.num_explorers, self.policy.run_seed(e), e.restarts))
                e.state = "starting"

    def _listen(self) -> None:
        running = self._running()
        if not running:
            self._stopping.wait(_POLL)
            return
        ended = self.actors.wait([e.run for e in running], _POLL)
        for e in running:
            if e.run in ended:
                self._settle(e, self.actors.outcome(e.run))
            elif e.state == "starting" and self.board.entries[e.index]["pid"]:
                e.state = "running"

    def _settle(self, e: Explorer, outcome: Outcome) -> None:
        self.actors.release(e.run)
        e.run = None
        if outcome.kind == "ended":
            e.state = "stopped" if self.board.stopped else "finished"
            return
        progress = self.board.recorded(e.index) > e.recorded
        e.streak = 1 if progress else e.streak + 1
        e.last_error = outcome.error
        self.failures.append(
            ExplorerFailure(e.index, e.restarts, outcome.kind == "died", outcome.error, outcome.traceback)
        )
        self._restart_or_give_up(e, outcome)

    def _restart_or_give_up(self, e: Explorer, outcome: Outcome) -> None:
        if self._stopping.is_set():
            e.state, then = "stopped", "the pool is stopping"
        elif self.policy.gives_up(e):
            e.state, then = "failed", f"max_restarts={self.policy.max_restarts} is used up"
        else:
            delay = self.policy.delay(e.streak)
            e.due, e.state, e.restarts = time.monotonic() + delay, "restarting", e.restarts + 1
            then = f"restart {e.restarts} in {delay:.3g} s"
        logger.error(
            "explorer %d of %d failed (%s): %s\n%s",
            e.index,
            self.num_explorers,
            then,
            outcome.error,
            outcome.traceback,
        )

    def _keep_mark(self) -> None:
        """Lets learners wait for rows only while some explorer can be expected to write them."""
        if any(not e.over and not self._hopeless(e) for e in self.explorers):
            self._mark = self._mark or self.expect_writers()
        else:
            self._withdraw_mark()

    def _withdraw_mark(self) -> None:
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    def _hopeless(self, e: Explorer) -> bool:
        return e.streak >= _HOPELESS_AFTER and self.board.recorded(e.index) == e.recorded

    def _end_all(self) -> None:
        for e in self._running():
            if not self.board.entries[e.index]["pid"]:
                self.actors.kill(e.run)  # still starting: nothing of the user's runs yet
        left = self._deadline - time.monotonic()
        self._await_ends(self._deadline - left + min(_GRACE, left / 2))
        for e in self._running():
            self.actors.interrupt(e.run, int(self.board.entries[e.index]["pid"]))
        self._await_ends(self._deadline)
        for e in self._running():
            logger.warning("explorer %d was told to stop, did not return in time and was killed", e.index)
            self.actors.kill(e.run)
            self._settle(e, Outcome("ended"))
        for e in self.explorers:
            e.state = e.state if e.over else "stopped"
        self.actors.await_exit([int(entry["pid"]) for entry in self.board.entries])

    def _running(self) -> list[Explorer]:
        return [e for e in self.explorers if e.run is not None]

    def _await_ends(self, deadline: float) -> None:
        while running := self._running():
            ended = self.actors.wait([e.run for e in running], deadline - time.monotonic())
            for e in running:
                if e.run in ended:
                    self._finish(e)
            if not ended:
                return

    def _finish(self, e: Explorer) -> None:
        outcome = self.actors.outcome(e.run)
        # A death is our own doing by now; an exception on the way out is news.
        self._settle(e, outcome if outcome.kind == "raised" else Outcome("ended"))
