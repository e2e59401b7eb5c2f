"""`Shards`: one process's view of a `ShardedReplay`: which shards there are, what they said, and calls to them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from torchreplay.batch import ReplayBatch
from torchreplay.errors import AttachError, ReplayTimeout, Stopped
from torchreplay.limiters import Limiter
from torchreplay.nodes import ray_node
from torchreplay.ray.directory import NAMESPACE, Place, Table
from torchreplay.ray.figures import Answer, Figures, Order
from torchreplay.ray.nearby import Gone, Nearby
from torchreplay.ray.session import import_ray
from torchreplay.ray.union_limiter import UnionLimiter
from torchreplay.waiting import LOG_EVERY, SLICE_NS, Wait

if TYPE_CHECKING:
    from torchreplay._C import Census

logger = logging.getLogger("torchreplay.ray")

REFRESH: Final = 1.0
"""Seconds between two looks at the table: shards that came back are drawn from that much later."""

REPORT: Final = 0.1
"""Seconds between two reports of this learner's draws to a shard that it draws from without a message."""

REPORTS: Final = 32
"""Reports under way at most: the next one says all that those left out would have said."""

Answers = dict[int, Answer]


class Shards:
    """The shards as one process sees them.

    Args:
        name: Of the directory's actor.
        limiter: Of the union.

    The shard on the process's own node is drawn from and fed back to through shared memory once `attach` was called.

    Attributes:
        node: Ray's id of the node that this process is on.
        nearby: The shard there, when it is attached.
        table: What was where when it was last asked.
        figures: What each shard said last, by number. Never changed: there is another when one says more.
    """

    def __init__(self, name: str, limiter: Limiter) -> None:
        self.ray = import_ray()
        if not self.ray.is_initialized():
            raise RuntimeError(
                "a ShardedReplay needs this process to be connected to its Ray cluster: call ray.init(address=...)"
            )
        try:
            self._directory = self.ray.get_actor(name, NAMESPACE)
        except ValueError:
            raise Stopped(
                "the ShardedReplay is closed, or the process that made it is gone, and its shards too"
            ) from None
        self._limiter = limiter
        self._union_limiter: UnionLimiter | None = None
        self._stream = -1
        self._lock = threading.RLock()
        self._asked: Any = None  # the table, on its way
        self._asked_at = 0.0
        self._reports: deque[tuple[int, Any]] = deque()  # shard, answer to come
        self._reported_at = -REPORT
        self._refused = -1  # the shard here that cannot be attached
        self.node = ray_node()
        self.nearby: Nearby | None = None
        self.figures: dict[int, Figures] = {}
        self.table = self._adopt(self.ask("table"))

    @property
    def stream(self) -> int:
        """The number of this learner, which no other process has."""
        if self._stream < 0:
            self._stream = self.ask("join")
        return self._stream

    @property
    def union_limiter(self) -> UnionLimiter:
        """What was inserted and drawn."""
        if self._union_limiter is None:
            self._union_limiter = UnionLimiter(self._limiter, self.stream)
            self._adopt(self.table)
        return self._union_limiter

    @property
    def stopped(self) -> bool:
        """Whether the buffer was stopped, as far as this process has heard."""
        return self.table.stopped or any(figures.stopped for figures in self.figures.values())

    def ask(self, what: str, *args: Any) -> Any:
        """Returns the directory's answer.

        Raises:
            Stopped: It is gone, and so are the shards.
        """
        try:
            return self.ray.get(self.tell(what, *args))
        except self.ray.exceptions.RayActorError:
            raise Stopped("the ShardedReplay was closed, or the process that made it is gone") from None

    def tell(self, what: str, *args: Any) -> Any:
        """Calls the directory, and returns what its answer will be got by."""
        return getattr(self._directory, what).remote(*args)

    def refresh(self) -> None:
        """Looks at the table now and then, without waiting for it."""
        now = time.monotonic()
        with self._lock:
            if self._asked is None and now - self._asked_at >= REFRESH:
                self._asked, self._asked_at = self.tell("table"), now
            elif self._asked is not None and self.ray.wait([self._asked], timeout=0)[0]:
                asked, self._asked = self._asked, None
                try:
                    self._adopt(self.ray.get(asked))
                except self.ray.exceptions.RayActorError:
                    raise Stopped("the ShardedReplay was closed, or the process that made it is gone") from None

    def look(self) -> Table:
        """Returns the table as it is now."""
        with self._lock:
            return self._adopt(self.ask("table"))

    def attach(self, wait: Wait | None = None) -> Nearby | None:
        """Attaches the shard on this node, unless it is already.

        Args:
            wait: How long it may take; None: as long as the shard is there.

        Returns:
            It; None if this node has none, as far as this process knows.

        Raises:
            AttachError: It cannot be attached, and its actor is alive.
            ReplayTimeout: It takes too long.
        """
        with self._lock:
            place = self.place_here()
            if place is None or (self.nearby is not None and self.nearby.number == place.number):
                return self.nearby
            self.detach()
            for attempt in range(2):
                told = self.collect({place.number: place.actor.handle.remote()}, wait)
                try:
                    if told:
                        self.nearby = Nearby(place.number, told[place.number])
                    break
                except AttachError:  # it may have died just now, which the next call tells
                    if attempt:
                        raise
            return self.nearby

    def detach(self) -> None:
        """Lets go of the shard that is attached."""
        with self._lock:
            nearby, self.nearby = self.nearby, None
            if nearby is not None:
                nearby.close()

    def draws_here(self, wait: Wait) -> bool:
        """Returns whether candidates of the shard on this node are drawn into their place, and attaches it first.

        Raises:
            ReplayTimeout: It takes too long.
        """
        place = self.place_here()
        if place is None or place.number == self._refused:
            return False
        try:
            return self.attach(wait) is not None
        except AttachError as error:
            self._refused = place.number
            logger.warning("shard %d is on this node, and draws from it go through Ray: %s", place.number, error)
            return False

    def order(self, candidates: Mapping[int, int], n: int, room: ReplayBatch | None = None) -> dict[int, Any]:
        """Asks shards for candidates, and returns what their answers will be got by.

        Args:
            candidates: How many each is to draw; 0 for figures alone.
            n: Items that the learner waits for.
            room: Where the shard that is attached draws its candidates to, beginning with the first row; None: it is
                asked as the others are.
        """
        with self._lock:
            union_limiter, places, nearby = self.union_limiter, self.table.places, self.nearby
            limits = union_limiter.limits(places, n)
            calls: dict[int, Any] = {}
            for number, count in candidates.items():
                if number not in places:
                    continue
                order = Order(
                    self.stream,
                    union_limiter.items,
                    union_limiter.batches,
                    union_limiter.largest,
                    limits[number],
                    count,
                )
                if room is None or nearby is None or number != nearby.number:
                    calls[number] = places[number].actor.draw.remote(order)
                else:
                    calls[number] = nearby.draw(order, room)
                    self._report_to(places[number], order)
            return calls

    def update(self, number: int, keys: NDArray[np.int64], td: NDArray[np.float64]) -> Any:
        """Has TD errors applied by a shard, which come after the draws that it was asked for.

        Args:
            number: Of the shard.
            keys: Its own `[n]`.
            td: The TD errors `[n]`.

        Returns:
            What the answer will be got by: how many; None if there is no such shard any more.
        """
        with self._lock:
            place = self.table.places.get(number)
            if place is None:
                return None
            if self.nearby is not None and self.nearby.number == number:
                return self.nearby.update(keys, td)
            return place.actor.update.remote(keys, td)

    def fetch(self, calls: Iterable[Any]) -> None:
        """Has those answers that are there brought to this node, without waiting for them."""
        remote = [call for call in calls if not isinstance(call, Future)]
        if remote:
            # What is asked for so is brought here also after the call has come back.
            self.ray.wait(remote, num_returns=len(remote), timeout=0)

    def hear(self, calls: Mapping[int, Any], wait: Wait) -> Answers:
        """Waits for what shards answer to an order. Those that are lost meanwhile are left out.

        Raises:
            ReplayTimeout: One takes too long.
            RuntimeError: One can never draw.
            Stopped: The buffer was stopped.
        """
        answers = self._note(self.collect(calls, wait))
        for number, (figures, _) in answers.items():
            if figures.trouble is not None:
                raise RuntimeError(f"shard {number}: {figures.trouble}")
        if self.stopped:
            raise Stopped("the replay buffer was stopped")
        return answers

    def exchange(self) -> None:
        """Looks at the table and hears all shards' figures, also after the buffer was stopped."""
        places = self.look().places
        self._note(self.collect(self.order(dict.fromkeys(places, 0), 0)))

    def collect(self, calls: Mapping[int, Any], wait: Wait | None = None) -> dict[int, Any]:
        """Returns what the shards called answer, by number; those that are lost meanwhile are left out.

        Args:
            calls: What the answers will be got by.
            wait: How long it may take; None: as long as the shards are there.

        Raises:
            ReplayTimeout: One takes too long.
        """
        log_at = started = time.monotonic()
        left = list(calls.values())
        while left:
            seconds = (SLICE_NS if wait is None else wait.slice_ns()) * 1e-9
            left = self._unanswered(left, seconds)
            expired = wait is not None and wait.expired
            if left and (expired or time.monotonic() - log_at >= LOG_EVERY):
                log_at = time.monotonic()
                silent = [number for number, call in calls.items() if call in left]
                text = f"no answer from {self._names(silent)} for {log_at - started:.1f} s"
                if expired:
                    raise ReplayTimeout(text)
                logger.warning(text)
        return {number: answer for number, call in calls.items() if (answer := self._answer(number, call)) is not None}

    def lose(self, number: int, why: str) -> None:
        """Has a shard that does not answer taken out for everyone."""
        with self._lock:
            if number not in self.table.places:
                return
            figures = self.figures.get(number)
            rows, inserted = (figures.rows, figures.inserted) if figures else (0, 0)
            reason = why.strip().splitlines()[0] if why.strip() else "its process died"
            place = self.table.places[number]
            logger.error("shard %d on node %s is lost, and its %d rows with it: %s", number, place.node, rows, reason)
            self._adopt(self.ask("lost", number, rows, inserted, reason))

    def census(self, unused_count_as_others: bool, /) -> Census:
        """Returns who takes part, in the terms of a buffer's own census."""
        told = list(self.figures.values())
        writers = sum(figures.writers for figures in told)
        departures = [figures.since_departure for figures in told if figures.since_departure >= 0]
        writes = [figures.since_write for figures in told if figures.since_write >= 0]
        return {
            "writers": writers,
            "learners": self.union_limiter.learners,
            "owners": len(told),
            "others_writing": writers,
            "others_learning": self.union_limiter.learners,
            "waiting": 0,
            "supervisors": int(self.table.expected or bool(self.table.starting)),
            "shared": True,
            "since_departure": min(departures, default=-1.0),
            "since_write": min(writes, default=-1.0),
        }

    def place_here(self) -> Place | None:
        """Returns the shard of this node, as far as this process knows."""
        return next((place for place in self.table.places.values() if place.node == self.node), None)

    def _note(self, answers: Answers) -> Answers:
        with self._lock:
            self.figures = self.figures | {number: figures for number, (figures, _) in answers.items()}
            for number, (figures, _) in answers.items():
                self.union_limiter.hear(number, figures)
        return answers

    def _unanswered(self, calls: list[Any], seconds: float) -> list[Any]:
        """Waits for answers, so long at most, and returns the calls that have none."""
        here = [call for call in calls if isinstance(call, Future)]
        left = [call for call in calls if not isinstance(call, Future)]
        if left:
            left = self.ray.wait(left, num_returns=len(left), timeout=seconds)[1]
        elif here:
            wait_for_futures(here, seconds)
        return left + [call for call in here if not call.done()]

    def _answer(self, number: int, call: Any) -> Any:
        """Returns what a call that has been answered returned; None if the shard is lost."""
        errors = self.ray.exceptions
        try:
            return call.result() if isinstance(call, Future) else self.ray.get(call)
        except (errors.RayActorError, errors.ObjectLostError, Gone, CancelledError) as error:
            self.lose(number, str(error))
            return None

    def _report_to(self, place: Place, order: Order) -> None:
        """Tells a shard's actor what it would have heard, had it been asked for the candidates of this order.

        Nobody waits for its answers. Where explorers wait for what learners draw, every order is reported; elsewhere
        only other learners' schedules and statistics need to know, and now and then is enough.
        """
        while self._reports and self.ray.wait([self._reports[0][1]], timeout=0)[0]:
            number, report = self._reports.popleft()
            answer = self._answer(number, report)
            if answer is not None:
                self.union_limiter.hear(number, answer[0])
        now = time.monotonic()
        due = order.limit is not None or now - self._reported_at >= REPORT
        if due and len(self._reports) < REPORTS:
            self._reports.append((place.number, place.actor.draw.remote(replace(order, candidates=0))))
            self._reported_at = now

    def _adopt(self, table: Table) -> Table:
        self.table = table
        self.figures = {number: figures for number, figures in self.figures.items() if number in table.places}
        if self.nearby is not None and self.nearby.number not in table.places:
            self.detach()
        if self._union_limiter is not None:
            for lost in table.lost:
                self._union_limiter.count_inserted(lost.number, lost.inserted)
        return table

    def _names(self, numbers: list[int]) -> str:
        places = self.table.places
        return ", ".join(f"shard {k} on node {places[k].node if k in places else 'unknown'}" for k in numbers)
