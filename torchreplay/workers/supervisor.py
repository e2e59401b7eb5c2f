"""Keeps a pool's workers running: launches, listens, restarts, and ends them."""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from torchreplay.segment.ray_node import ray_node
from torchreplay.workers.backend import Backend
from torchreplay.workers.explorer_stats import ExplorerFailure, ExplorerStats, State, explorer_stats
from torchreplay.workers.worker_process import Launch, Outcome
from torchreplay.workers.worker_table import WorkerTable

logger = logging.getLogger("torchreplay.ray")  # the name by which users know all pools

_PLACES: Final = re.compile(r"0x[0-9a-f]+|process \d+")
"""What equal errors differ in: addresses and process ids."""

_POLL: Final = 0.1
"""Seconds between looks at stop requests and due restarts; a worker's end is seen at once."""

_LONGEST_DELAY: Final = 30.0
"""Seconds; the back-off between restarts doubles up to this, and is never shorter than the first."""

GRACE: Final = 0.5
"""Seconds in which a stopped worker should notice by itself, before it is interrupted."""

SLOW_START: Final = 30.0
"""Seconds after which a worker that has not begun is mentioned in the log, again and again."""

_HOPELESS_AFTER: Final = 5
"""Failures in a row, without an item or an episode in between, after which nobody should wait for a
worker any more. It goes on being restarted."""

_KNOWN_ERRORS: Final = 1000
"""Different errors that are told apart in the log; of more, each is shown in full."""


@dataclass
class Worker:
    """One worker as its supervisor sees it."""

    index: int
    state: State = "starting"
    restarts: int = 0
    begun: float = 0.0  # monotonic time at which the present run was first seen to be in its function; 0: not yet
    streak: int = 0  # failures in a row without progress
    recorded: int = 0  # its progress in the table at the last launch
    due: float = 0.0  # monotonic time of the next launch
    launched: float = 0.0  # monotonic time of the last launch
    mentioned: float = 0.0  # monotonic time at which the log said that it takes long
    run: Any = None  # the present run; None between runs
    failure: ExplorerFailure | None = None  # the last failure

    @property
    def over(self) -> bool:
        """Whether it will not run again."""
        return self.state in ("finished", "failed", "stopped")


@dataclass(frozen=True)
class Policy:
    """How workers are seeded and restarted."""

    seed: int  # entropy of all seeds
    generation: int  # number of this start of the pool; every start has its own seeds
    max_restarts: int  # per worker; -1 for no limit
    restart_delay: float  # seconds before the first restart; doubles with each further failure
    heartbeat_timeout: float | None = None  # seconds without a heartbeat after which a worker is killed

    def run_seed(self, worker: Worker) -> int:
        """Seed of the worker's next run: its own child of the pool's seed (`SeedSequence`)."""
        key = (self.generation, worker.index, worker.restarts)
        return int(np.random.SeedSequence(self.seed, spawn_key=key).generate_state(1)[0])

    def delay(self, streak: int) -> float:
        """Seconds to wait before the restart that follows `streak` failures in a row."""
        return float(min(self.restart_delay * 2.0 ** min(streak - 1, 30), max(self.restart_delay, _LONGEST_DELAY)))

    def gives_up(self, worker: Worker) -> bool:
        """Whether the worker has used up its restarts."""
        return 0 <= self.max_restarts <= worker.restarts


@dataclass
class Supervisor:
    """A background thread that looks after the workers of one start of a pool.

    Args:
        names: What to call each worker in the log.
        expect_writers: Makes the buffers' marks that writers may still come; `close` withdraws them.
        failures: Receives every failure.
        listen: Called ten times a second and once more after the end.
    """

    backend: Backend[Any]
    table: WorkerTable
    names: Sequence[str]
    policy: Policy
    expect_writers: Callable[[], ExitStack]
    failures: deque[ExplorerFailure]
    listen: Callable[[], object] = lambda: None
    workers: Sequence[Worker] = field(init=False)

    def __post_init__(self) -> None:
        self.workers = [Worker(index) for index in range(len(self.names))]
        self.over = threading.Event()
        """Set when no worker will run any more."""
        self.interrupted = 0
        """How many did not end by themselves when they were told to."""
        self._node = ray_node()
        self._shown: dict[str, int] = {}  # how often each error was logged
        self._stopping = threading.Event()
        self._grace = self._deadline = 0.0
        self._mark: ExitStack | None = self.expect_writers()
        self._thread = threading.Thread(target=self._work, name="torchreplay-supervisor", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._stopping.set()  # Ctrl-C may come when the thread runs already
            self._withdraw_mark()
            raise

    def stop(self, grace: float, timeout: float) -> None:
        """Ends every worker; returns when all have ended.

        Args:
            grace: Seconds that they get to notice; those that have not returned by then are interrupted.
            timeout: Seconds after which those that still have not are killed.
        """
        now = time.monotonic()
        self._grace, self._deadline = now + grace, now + timeout
        self.table.stopped = True
        self._stopping.set()
        self._thread.join()

    def stats(self) -> tuple[ExplorerStats, ...]:
        """Statistics of each worker, in order."""
        return tuple(
            explorer_stats(w.index, self.table.entries[w.index], self._state(w), w.restarts, w.failure)
            for w in self.workers
        )

    def _state(self, w: Worker) -> State:
        begun = w.state == "starting" and self.table.entries[w.index]["pid"]  # its process says so itself
        return "running" if begun else w.state

    @property
    def stopping(self) -> bool:
        """Whether the workers are to end."""
        return self._stopping.is_set()

    @property
    def all_failing(self) -> bool:
        """Whether nobody should wait for any worker: all have ended, or do nothing but fail."""
        return all(w.over or self._only_fails(w) for w in self.workers)

    def _work(self) -> None:
        try:
            while not self._stopping.is_set() and not all(w.over for w in self.workers):
                self._launch_due()
                self._keep_mark()
                self._mention_slow_starts()
                self._kill_hung()
                self._await_some()
                self.listen()
            self._end_all()
        except (Exception, SystemExit) as error:  # the latter comes out of calls of Ray's
            # What runs the workers is gone, most likely: Ray was shut down under the pool.
            lost = _died("no longer supervised", error)
            logger.error("the workers are %s\n%s", lost.error, lost.traceback)
            for w in self._running():
                with suppress(Exception):  # it may go wrong again
                    self.backend.kill(w.run)
                    self.backend.release(w.run)
                w.run = None
            for w in self.workers:
                if not w.over:
                    self._note_failure(w, lost)
                    w.state = "failed"
        finally:
            try:
                self.listen()
                with suppress(RuntimeError):  # the buffer was closed meanwhile, and the mark with it
                    self._withdraw_mark()
            finally:
                self.over.set()

    def _launch_due(self) -> None:
        now = time.monotonic()
        for w in self.workers:
            if w.run is None and not w.over and w.due <= now and self.backend.is_free(w.index):
                self.table.launch(w.index, w.restarts)
                w.recorded = self.table.recorded(w.index)
                w.launched = w.mentioned = now
                w.begun = 0.0
                launch = Launch(w.index, len(self.workers), self.policy.run_seed(w), w.restarts)
                try:
                    w.run, w.state = self.backend.launch(launch), "starting"
                except Exception as error:  # such as too many open files: of this worker, at this moment
                    self._fail(w, _died("its process could not be started", error))

    def _mention_slow_starts(self) -> None:
        now = time.monotonic()
        slow = [
            w for w in self._running() if now - w.mentioned >= SLOW_START and not self.table.entries[w.index]["pid"]
        ]
        if slow:
            for w in slow:
                w.mentioned = now
            who = ", ".join(self.names[w.index] for w in slow[:2])
            others = f" and {len(slow) - 2} others" if len(slow) > 2 else ""
            text = "%s%s: not begun %.0f s after the start%s"
            logger.warning(text, who, others, now - slow[0].launched, self.backend.slow_start_hint)

    def _kill_hung(self) -> None:
        if self.policy.heartbeat_timeout is None:
            return
        now, entries = time.monotonic(), self.table.entries
        for w in self._running():
            if not entries[w.index]["pid"]:
                continue
            w.begun = w.begun or now
            silent = now - max(w.begun, float(entries[w.index]["heartbeat"]))  # that of an earlier run may be there
            if silent > self.policy.heartbeat_timeout:
                self.backend.kill(w.run)
                text = f"hung: no heartbeat for {silent:.1f} s (heartbeat_timeout={self.policy.heartbeat_timeout:g})"
                self._settle(w, Outcome("died", f"{text}, killed", f"{text}: its process was killed"))

    def _await_some(self) -> None:
        running = self._running()
        if not running:
            self.backend.wait([], 0)  # raises when none can be started any more
            self._stopping.wait(_POLL)
            return
        ended = self.backend.wait([w.run for w in running], _POLL)
        for w in running:
            if w.run in ended:
                self._settle(w, self._outcome(w))

    def _outcome(self, w: Worker) -> Outcome:
        try:
            return self.backend.outcome(w.run)
        except Exception as error:
            return _died("nobody knows how its process ended", error)

    def _settle(self, w: Worker, outcome: Outcome) -> None:
        try:
            self.backend.release(w.run)
        except Exception:
            logger.error("%s left something behind\n%s", self.names[w.index], traceback.format_exc())
        w.run = None
        if outcome.kind == "ended":
            w.state = "stopped" if self.table.stopped else "finished"
        else:
            self._fail(w, outcome)

    def _fail(self, w: Worker, outcome: Outcome) -> None:
        progress = self.table.recorded(w.index) > w.recorded
        w.streak = 1 if progress else w.streak + 1
        self._note_failure(w, outcome)
        self._restart_or_give_up(w, outcome)

    def _note_failure(self, w: Worker, outcome: Outcome) -> None:
        w.failure = ExplorerFailure(w.index, w.restarts, outcome.kind == "died", outcome.error, outcome.traceback)
        self.failures.append(w.failure)

    def _restart_or_give_up(self, w: Worker, outcome: Outcome) -> None:
        if self._stopping.is_set():
            w.state, then = "stopped", "the pool is stopping"
        elif self.policy.gives_up(w):
            w.state, then = "failed", f"dropped: max_restarts={self.policy.max_restarts} is used up"
        else:
            delay = self.policy.delay(w.streak)
            w.due, w.state, w.restarts = time.monotonic() + delay, "restarting", w.restarts + 1
            then = f"restart {w.restarts} in {delay:.3g} s"
        logger.error("%s failed (%s): %s%s", self.names[w.index], then, outcome.error, self._details(outcome))

    def _details(self, outcome: Outcome) -> str:
        """Returns the traceback for the log, or, of an error that is there already, how often it has come."""
        what = _PLACES.sub("", outcome.traceback)
        if what not in self._shown and len(self._shown) == _KNOWN_ERRORS:
            return f"\n{outcome.traceback}"
        times = self._shown[what] = self._shown.get(what, 0) + 1
        if times == 1:
            return f"\n{outcome.traceback}"
        return f" (the same error as before, {times} times)"

    def _keep_mark(self) -> None:
        """Lets learners wait for rows only while some worker can be expected to write them."""
        if not self.all_failing:
            self._mark = self._mark or self.expect_writers()
        else:
            self._withdraw_mark()

    def _withdraw_mark(self) -> None:
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    def _only_fails(self, w: Worker) -> bool:
        return w.streak >= _HOPELESS_AFTER and self.table.recorded(w.index) == w.recorded

    def _end_all(self) -> None:
        for w in self._running():
            if not self.table.entries[w.index]["pid"]:
                self.backend.kill(w.run)  # still starting: nothing of the user's runs yet
        self._await_ends(self._grace)
        for w in self._running():
            pid = int(self.table.entries[w.index]["pid"])
            if not pid:  # it was killed before it began, and is about to end
                continue
            self.interrupted += 1
            self.table.interrupt(w.index)
            if self.table.is_on(w.index, self._node):
                self.backend.interrupt(w.run, pid)
        self._await_ends(self._deadline)
        for w in self._running():
            logger.warning("%s was told to stop, did not return in time and was killed", self.names[w.index])
            self.backend.kill(w.run)
            self._settle(w, Outcome("ended"))
        for w in self.workers:
            w.state = w.state if w.over else "stopped"
        here = [w for w in self.workers if self.table.is_on(w.index, self._node)]  # elsewhere the same pid is another's
        self.backend.await_exit([int(self.table.entries[w.index]["pid"]) for w in here])

    def _running(self) -> list[Worker]:
        return [w for w in self.workers if w.run is not None]

    def _await_ends(self, deadline: float) -> None:
        while running := self._running():
            ended = self.backend.wait([w.run for w in running], deadline - time.monotonic())
            for w in running:
                if w.run in ended:
                    outcome = self._outcome(w)
                    # A death is our own doing by now; an exception on the way out is news.
                    self._settle(w, outcome if outcome.kind == "raised" else Outcome("ended"))
            if not ended:
                return


def _died(what: str, error: BaseException) -> Outcome:
    return Outcome("died", f"{what}: {error!r}", "".join(traceback.format_exception(error)).rstrip())
