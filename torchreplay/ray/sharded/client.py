"""`ShardClient`: one process's view of a `ShardedReplay`: its shards, what they said, and requests to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchreplay.errors import Stopped
from torchreplay.ray.sharded.census import union_census
from torchreplay.ray.sharded.coordinator import Lost, Place, Table
from torchreplay.ray.sharded.coordinator_client import CoordinatorClient
from torchreplay.ray.sharded.local_attachment import LocalAttachment
from torchreplay.ray.sharded.local_shard import LocalShard
from torchreplay.ray.sharded.messages import Answer, DrawRequest, Gathered, ShardReport
from torchreplay.ray.sharded.rate_limiter import GlobalRateLimiter
from torchreplay.ray.sharded.replies import ReplyCollector
from torchreplay.ray.sharded.reports import Reports
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.limiters import Limiter
from torchreplay.segment.handle import Handle
from torchreplay.segment.ray_node import ray_node
from torchreplay.segment.waits import Wait

if TYPE_CHECKING:
    from torchreplay._C import Census
    from torchreplay.ray.sharded.manifest import Counts

logger = logging.getLogger("torchreplay.ray")

Answers = dict[int, Answer]

T = TypeVar("T", Answer, Gathered)


class ShardClient:
    """The shards as one process sees them.

    Args:
        name: Of the directory's actor.

    The shard on the process's own node is drawn from and fed back to through shared memory once `attach` was called.

    Attributes:
        node: Ray's id of the node that this process is on.
        table: What was where when the directory said so last. It is never asked while the lock is held: if Ray cannot
            reach it, only the asking thread waits.
        figures: What each shard said last, by number. Never changed: there is another when one says more.
        closed: Whether the `ShardedReplay` that this belongs to is closed.
    """

    def __init__(self, name: str) -> None:
        self._lookup = CoordinatorClient(name)
        self.calls = ReplyCollector(self.lose, self._name, self._probe)
        self._reports = Reports()
        self._union_limiter: GlobalRateLimiter | None = None
        self._stream = -1
        self._lock = threading.RLock()
        self._attachment = LocalAttachment(self._lock, self.place_here, self._handle_of)
        self.node = ray_node()
        self.figures: dict[int, ShardReport] = {}
        self.table = self._lookup.table()
        self.closed = False

    @property
    def stream(self) -> int:
        """The number of this learner, which no other process has."""
        if self._stream < 0:
            number = self.ask("join")
            with self._lock:
                if self._stream < 0:  # no other thread has asked meanwhile
                    self._stream = number
        return self._stream

    @property
    def union_limiter(self) -> GlobalRateLimiter:
        """What was inserted and drawn."""
        if self._union_limiter is None:
            stream = self.stream
            with self._lock:
                if self._union_limiter is None:
                    self._union_limiter = GlobalRateLimiter(self.table.rule, stream)
                    self._take_in(self.table)
        return self._union_limiter

    @property
    def nearby(self) -> LocalShard | None:
        """The shard on this node, when it is attached."""
        return self._attachment.nearby

    def require_open(self) -> None:
        """Raises RuntimeError if the `ShardedReplay` is closed."""
        if self.closed:
            raise RuntimeError("the ShardedReplay is closed")

    @property
    def connected(self) -> bool:
        """Whether this process is still connected to the cluster."""
        return self._lookup.connected

    @property
    def stopped(self) -> bool:
        """Whether the buffer was stopped, as far as this process has heard."""
        return self.table.stopped or any(figures.stopped for figures in self.figures.values())

    # The directory

    def ask(self, what: str, *args: Any) -> Any:
        """Returns the directory's answer; asks again where Ray cannot reach it for a moment.

        Raises:
            Stopped: It is gone, and so are the shards.
        """
        return self._lookup.ask(what, *args)

    def ask_once(self, what: str, *args: Any) -> Any:
        """Returns the directory's answer.

        Raises:
            ActorUnavailableError: Ray cannot reach it now.
            Stopped: It is gone, and so are the shards.
        """
        return self._lookup.ask_once(what, *args)

    def tell(self, what: str, *args: Any) -> Any:
        """Calls the directory, and returns what its answer will be got by."""
        return self._lookup.tell(what, *args)

    def refresh(self) -> None:
        """Looks at the table now and then, without waiting for it."""
        with self._lock:
            table = self._lookup.news()
            if table is not None:
                self._adopt(table)

    def look(self) -> Table:
        """Returns the table as it is now."""
        return self._adopt(self._lookup.table())

    def lose(self, number: int, why: str) -> None:
        """Has a shard that does not answer taken out for everyone."""
        with self._lock:
            place = self.table.places.get(number)
            if place is None:
                return
            rows, inserted = self._last_known(number)
            reason = why.strip().splitlines()[0] if why.strip() else "its process died"
            logger.error("%s is lost, and its %d rows with it: %s", self._name(number), rows, reason)
            self._adopt(self.table.without(Lost(number, place.node, rows, inserted)))
        self._adopt(self._lookup.table("lost", number, rows, inserted, reason))

    def set_limiter(self, limiter: Limiter) -> None:
        """Sets another limiter for everyone, which counts from here; see `ShardedReplay.limiter`."""
        self.exchange()
        self._adopt(self._lookup.table("change_limiter", limiter, self.union_limiter.inserted))
        self.exchange(says=True)

    def restored(
        self, numbers: dict[int, int], seed: int, counts: Counts, lost: tuple[Lost, ...], limiter: Limiter
    ) -> None:
        """Announces that the shards hold the rows of a checkpoint now; arguments as in the coordinator's method.

        Raises:
            RuntimeError: One was lost before it could know.
        """
        self.detach()
        places = self.table.places
        told = self.calls.collect({place.number: place.actor.stats.remote() for place in places.values()})
        for number in places.keys() - told.keys():
            raise RuntimeError(f"shard {number} on node {places[number].node} was lost when it had been restored")
        inserted = sum(stats.inserted for stats in told.values()) + sum(one.inserted for one in lost)
        self._adopt(self._lookup.table("restored", numbers, seed, counts, lost, limiter, inserted))
        self.exchange()
        self.exchange(says=True)

    # The shard on this node

    def place_here(self) -> Place | None:
        """Returns the shard of this node, as far as this process knows."""
        return next((place for place in self.table.places.values() if place.node == self.node), None)

    def attach(self, wait: Wait | None = None) -> LocalShard | None:
        """Attaches the shard on this node, unless it is already.

        Args:
            wait: How long it may take; None: as long as the shard is there.

        Returns:
            It; None if this node has none, as far as this process knows, or it is gone.

        Raises:
            AttachError: It cannot be attached, and its actor is alive.
            ReplayTimeout: It takes too long.
        """
        return self._attachment.attach(wait)

    def draws_here(self, wait: Wait | None = None) -> bool:
        """Returns whether candidates of the shard on this node are drawn into their place, and attaches it first.

        Args:
            wait: How long it may take; None: as long as the shard is there.

        Raises:
            ReplayTimeout: It takes too long.
        """
        return self._attachment.draws(wait)

    def detach(self) -> None:
        """Lets go of the shard that is attached."""
        self._attachment.release()

    # Orders, keys, and feedback

    def order(
        self, candidates: Mapping[int, int], n: int, room: ReplayBatch | None = None, says: bool = True
    ) -> dict[int, Any]:
        """Asks shards for candidates, and returns what their answers will be got by.

        Args:
            candidates: How many each is to draw; 0 for figures alone.
            n: Items that the learner waits for.
            room: Where the shard that is attached draws its candidates to, beginning with the first row; None: it is
                asked as the others are.
            says: Whether shards are to admit their writers as far as this process thinks right.
        """
        self._lookup.require_own_process()
        with self._lock:
            answered = self._reports.answered()
        told = ((number, self.calls.answer(number, report)) for number, report in answered)
        self._count([(number, answer[0]) for number, answer in told if answer is not None])
        union_limiter = self.union_limiter
        with self._lock:
            places, nearby = self.table.places, self.nearby
            limits = union_limiter.limits(places, n) if says else dict.fromkeys(places)
            calls: dict[int, Any] = {}
            for number, count in candidates.items():
                if number not in places:
                    continue
                others = union_limiter.untold(number)
                drew, largest, waited = union_limiter.drew, union_limiter.largest, union_limiter.waited
                order = DrawRequest(self.stream, drew, largest, limits[number], count, says, others, waited)
                if room is None or nearby is None or number != nearby.number:
                    calls[number] = places[number].actor.draw.remote(order)
                else:
                    calls[number] = nearby.draw(order, room)
                    if self._reports.is_due(union_limiter.batches, order.limit is not None):
                        self._reports.add(number, places[number].actor.draw.remote(replace(order, candidates=0)))
            return calls

    def report(self, last: bool = False) -> None:
        """Reports to all shards what this process has drawn, without a wait, when no order carries it.

        Args:
            last: Whether it draws no more for now, so that it must be said in any case.
        """
        union_limiter = self._union_limiter
        if union_limiter is None or not union_limiter.batches:  # it has drawn nothing
            return
        if self._reports.is_due(union_limiter.batches, union_limiter.divides) or last:
            with suppress(Stopped):  # nobody is left to hear it
                for number, report in self.order(dict.fromkeys(self.table.places, 0), 0).items():
                    self._reports.add(number, report)

    def gather(self, keys: Mapping[int, NDArray[np.int64]]) -> dict[int, Gathered]:
        """Returns what all shards have to say of themselves, and the items that they find; those lost are left out.

        Args:
            keys: Of the items, each shard's own `[n]` by its number; none for those left out.
        """
        self._lookup.require_own_process()
        none = np.empty(0, np.int64)
        with self._lock:
            nearby = self.nearby
            calls = {
                number: (place.actor.gather.remote if nearby is None or number != nearby.number else nearby.gather)(
                    keys.get(number, none)
                )
                for number, place in self.table.places.items()
            }
        return self._note(self.calls.collect(calls))

    def update(self, number: int, keys: NDArray[np.int64], td: NDArray[np.float64]) -> Any:
        """Has TD errors applied by a shard, which come after the draws that it was asked for.

        Args:
            number: Of the shard.
            keys: Its own `[n]`.
            td: The TD errors `[n]`.

        Returns:
            What the answer will be got by: how many; None if there is no such shard any more.
        """
        self._lookup.require_own_process()
        with self._lock:
            place = self.table.places.get(number)
            if place is None:
                return None
            if self.nearby is not None and self.nearby.number == number:
                return self.nearby.update(keys, td)
            return place.actor.update.remote(keys, td)

    # Answers

    def hear(self, calls: Mapping[int, Any], wait: Wait) -> Answers:
        """Waits for what shards answer to an order. Those that are lost meanwhile are left out.

        Raises:
            ReplayTimeout: One takes too long.
            RuntimeError: One can never draw.
            Stopped: The buffer was stopped.
        """
        answers = self._note(self.calls.collect(calls, wait))
        for number, (figures, _) in answers.items():
            if figures.trouble is not None:
                raise RuntimeError(f"shard {number}: {figures.trouble}")
        if self.stopped:
            raise Stopped("the replay buffer was stopped")
        return answers

    @property
    def barren(self) -> str | None:
        """Why a shard's ring completed no item when it was last heard; None if none said so."""
        told = ((number, figures.barren) for number, figures in self.figures.items())
        return next((f"shard {number}: {why}" for number, why in told if why is not None), None)

    def exchange(self, says: bool = False) -> None:
        """Looks at the table and hears all shards' figures, also after the buffer was stopped.

        Once all have answered, it divides anew what the limiter admits, as if it waited for an item. Otherwise a
        program that only polls until there is enough would poll for ever, where not every node has explorers.

        Args:
            says: Whether the question itself carries the limits, from a process that knows what is in all shards.
                Otherwise the limits follow when the shards have answered, and nobody waits for that.
        """
        places = self.look().places
        all_of_them = dict.fromkeys(places, 0)
        answers = self._note(self.calls.collect(self.order(all_of_them, 0, says=says)))
        if not says and self.union_limiter.divides and answers.keys() >= places.keys():
            self.order(all_of_them, 1)

    def census(self, unused_count_as_others: bool, /) -> Census:
        """Returns who takes part, in the terms of a buffer's own census."""
        nearby = self.nearby  # another node's shard has no writer of this thread's
        own = 0 if nearby is None else nearby.own_writers(unused_count_as_others)
        return union_census(self.figures.values(), self.union_limiter.learners, self.table.expected, own)

    def _note(self, answers: dict[int, T]) -> dict[int, T]:
        told = {number: figures for number, (figures, _) in answers.items()}
        with self._lock:
            self.figures = self.figures | told
        self._count(told.items())
        return answers

    def _count(self, told: Iterable[tuple[int, ShardReport]]) -> None:
        """Takes in what shards have counted, and the limiter if they know of a newer one."""
        newest, union_limiter = -1, self.union_limiter
        with self._lock:
            for number, figures in told:
                union_limiter.hear(number, figures)
                newest = max(newest, figures.rule)
        if newest > self.table.rule.number:
            self.look()

    def _adopt(self, table: Table) -> Table:
        """Takes a table in, unless a newer one came first, and returns the newest."""
        with self._lock:
            if table.moment >= self.table.moment:
                self._take_in(table)
            return self.table

    def _take_in(self, table: Table) -> None:
        for lost in table.lost:  # another reporter may have known less
            rows, inserted = self._last_known(lost.number)
            if inserted > lost.inserted:
                logger.error("with shard %d %d rows are lost, not %d", lost.number, rows, lost.rows)
                self._lookup.tell("lost", lost.number, rows, inserted, "")
        self.table = table
        self.figures = {number: figures for number, figures in self.figures.items() if number in table.places}
        if self.nearby is not None:
            place = table.places.get(self.nearby.number)
            if place is None or place.node != self.node:  # a shard that was restored has another number
                self.detach()
        if self._union_limiter is not None:
            self._union_limiter.change(table.rule)
            if table.past is not None:
                self._union_limiter.remember(table.past)
            for lost in table.lost:
                self._union_limiter.count_inserted(lost.number, lost.inserted)

    def _last_known(self, number: int) -> tuple[int, int]:
        """Returns how many rows a shard held, and how many items had become drawable in it, when last heard of."""
        if self.nearby is not None and self.nearby.number == number:
            with suppress(RuntimeError):  # closed by another thread
                stats = self.nearby.buffer.stats()
                return stats.size, stats.inserted
        figures = self.figures.get(number)
        return (figures.rows, figures.inserted) if figures else (0, 0)

    def _handle_of(self, place: Place, wait: Wait | None) -> Handle | None:
        told = self.calls.collect({place.number: place.actor.handle.remote()}, wait)
        return told.get(place.number)

    def _probe(self, number: int) -> Any:
        place = self.table.places.get(number)
        return None if place is None else place.actor.stats.remote()

    def _name(self, number: int) -> str:
        place = self.table.places.get(number)
        return f"shard {number} on node {'unknown' if place is None else place.node}"
