"""`ShardClient`: one process's view of a `ShardedReplay`: its shards, what they said, and requests to them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.buffer.base import MAX_BATCH
from torchreplay.errors import Stopped
from torchreplay.ray.runtime.session import logger
from torchreplay.ray.sharded.batch_block import Layout
from torchreplay.ray.sharded.coordinator_view import CoordinatorView
from torchreplay.ray.sharded.local_shard import LocalAttachment, LocalShard
from torchreplay.ray.sharded.manifest import Manifest
from torchreplay.ray.sharded.remote_shard import RemoteAttachment
from torchreplay.ray.sharded.reply_collector import ReplyCollector
from torchreplay.ray.sharded.shard_keys import unpack
from torchreplay.ray.sharded.shard_sampler import Answer, ShardReport
from torchreplay.ray.sharded.shard_table import LostShard, ShardEntry, ShardTable
from torchreplay.ray.sharded.shard_wire import ShardLink, read_report
from torchreplay.ray.wire.way import Way
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.limiters import Limiter
from torchreplay.segment.ray_node import ray_node
from torchreplay.segment.waits import UNNAMED, Wait

if TYPE_CHECKING:
    from torchreplay._C import Census

LOOK_SECONDS: Final = 0.1
"""Seconds between two looks whether the process of the shard here is alive."""

Answers = dict[int, Answer]


class ShardClient(CoordinatorView):
    """The shards as one process sees them, by the name of their coordinator; messages call the buffer `called`."""

    def __init__(self, name: str, called: str = UNNAMED) -> None:
        self.calls = ReplyCollector(self.lose, self._name, self._probe)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # The shard that is written to from here where this node has none
        self.remote = RemoteAttachment(self._shard_to_write_to, self._answers)
        # The shard on this node, which is drawn from and fed back to through shared memory once it is attached
        self.local = LocalAttachment(self._lock, self.entry_here, self._answers)
        self._ways: dict[int, Way[ShardLink]] = {}  # to the shards of other nodes, by what names their memory
        self.connections = _C.Exchange()  # what sends and receives on them
        self.rounds = 0  # in which shards of other nodes were asked for candidates, all at once
        self.node = ray_node()  # Ray's id of the node that this process is on
        self._figures: dict[int, ShardReport] = {}
        self._heard_stop = False  # with items
        self._seen_at = 0.0  # when the shard here was seen to be alive
        # How the native core reaches all shards, which may have said more to it since, and what was where then.
        self._union: tuple[ShardTable, LocalShard | None, _C.UnionShards] | None = None
        super().__init__(name, called, self._lock)

    @property
    def figures(self) -> Mapping[int, ShardReport]:
        """What each shard said last, by number; an older answer changes nothing. It is never changed."""
        self._look_into()
        return self._figures

    def _look_into(self) -> None:
        if self._union is not None and (said := self._union[2].said()):
            self._note({number: (read_report(head), None) for number, head in said})

    def _leave_union(self) -> None:
        """Has the native core reach the shards anew with the next draw."""
        self._look_into()
        self._union = None

    @property
    def stopped(self) -> bool:
        """Whether the buffer was stopped, as far as this process has heard: where a shard is attached, at once.

        Where it writes to a shard of another node, it hears of that about half a second later.
        """
        told = self._heard_stop or self.table.stopped or any(each.stats.stopped for each in self._figures.values())
        return told or self.local.stopped or self.remote.stopped

    # Shards that come and go

    def lose(self, number: int, why: str) -> None:
        """Has a shard that does not answer taken out for everyone."""
        with self._lock:
            entry = self.table.entries.get(number)
            if entry is None:
                return
            rows, inserted = self._last_known(number)
            reason = why.strip().splitlines()[0] if why.strip() else "its process died"
            logger.error("%s is lost, and its %d rows with it: %s", self._name(number), rows, reason)
            self._take_in(self.table.without(LostShard(number, entry.node, rows, inserted)))
        self._adopt(self.coordinator.table("lost", number, rows, inserted, reason))

    def set_limiter(self, limiter: Limiter) -> None:
        """Sets another limiter for everyone, which counts from here; see `ShardedReplay.limiter`."""
        self.exchange()
        self._adopt(self.coordinator.table("change_limiter", limiter))
        self.exchange()

    def clear(self) -> None:
        """Empties all shards, and has the limiter begin anew; see `ShardedReplay.clear`."""
        entries = self.look().entries
        emptied = self.calls.collect({number: entry.actor.clear.remote() for number, entry in entries.items()})
        self._adopt(self.coordinator.table("cleared", emptied))
        self.exchange()

    def restored(self, manifest: Manifest, numbers: dict[int, int], born: int) -> None:
        """Announces that the shards hold the rows of a checkpoint now; arguments as in the coordinator's method.

        Raises:
            RuntimeError: One was lost before it could know.
        """
        self.release()
        entries = self.table.entries
        told = self.calls.collect({number: entry.actor.draw.remote(0, 0.0) for number, entry in entries.items()})
        for number in entries.keys() - told.keys():
            raise RuntimeError(f"shard {number} on node {entries[number].node} was lost when it had been restored")
        inserted = {numbers[number]: figures.stats.inserted for number, (figures, _) in told.items()}
        self._adopt(self.coordinator.table("restored", manifest, numbers, born, inserted))
        with self._lock:
            self._figures = {}  # a number may be that of another node's shard now
        self.exchange()

    def release(self) -> None:
        """Lets go of the shards that this process reads and writes."""
        self._leave_union()
        self._keep_ways(())
        self.local.release()
        self.remote.release()

    # The shard on this node, or the one that is written to instead

    def entry_here(self) -> ShardEntry | None:
        """Returns the shard of this node, as far as this process knows."""
        return next((entry for entry in self.table.entries.values() if entry.node == self.node), None)

    def _shard_to_write_to(self, number: int) -> ShardEntry | None:
        """Returns shard `number` while it is there, else the one with the fewest writers; None: none answers.

        Of several that have as few, processes take one in turn.
        """
        entries = self.table.entries
        if number in entries:
            return entries[number]
        told = self.calls.collect({number: entry.actor.draw.remote(0, 0.0) for number, entry in entries.items()})
        writers = {number: figures.writers for number, (figures, _) in told.items()}
        idlest = sorted(number for number, count in writers.items() if count == min(writers.values()))
        return entries[idlest[self.coordinator.ask("turn") % len(idlest)]] if idlest else None

    # Orders, keys, and feedback

    @property
    def all_here(self) -> bool:
        """Whether the only shard is on this node, as far as is known: it is drawn from as a local buffer is."""
        return self.local.shard is not None and len(self.table.entries) == 1

    def alone(self) -> LocalShard | None:
        """Returns the shard on this node, where it is the only one and nobody has to be asked for a draw; else None.

        Now and then it is heard as the others are, and its figures go to the coordinator.
        """
        here, table = self.local.shard, self.table
        if here is None or len(table.entries) != 1 or here.number not in table.entries or self.closed:
            return None
        now = time.monotonic()
        if self.limiter.tally.is_short or now - self._seen_at >= self._report_seconds:
            self.refresh()
            if not self._reports:
                self.coordinator.require_own_process()
                self._seen_at = now
                figures = here.report()
                if figures is None:  # a round of calls finds out what it means
                    return None
                self._note({here.number: (figures, None)})
                self.report()
        return here

    def order(
        self,
        candidates: Mapping[int, int],
        layout: Layout | None = None,
        room: ReplayBatch | None = None,
    ) -> dict[int, Any]:
        """Asks shards for so many candidates each, 0 for figures alone; returns what their answers will be got by.

        The shard that is attached draws its candidates here, into the first rows of `room` where that is given. The
        others send theirs over a connection of their own. Without `layout` all are called through Ray.
        """
        self.coordinator.require_own_process()
        self.coordinator.require_ray()
        largest = self.limiter.largest
        with self._lock:
            entries, local = self.table.entries, self.local.shard if layout is not None else None
        calls: dict[int, Any] = {}
        for number, count in candidates.items():
            entry = entries.get(number)
            if entry is None or (local is not None and number == local.number):
                continue
            link = None if layout is None else self._link_to(entry)
            calls[number] = (
                entry.actor.draw.remote(count, largest)
                if link is None or layout is None
                else link.draw(count, largest, layout)
            )
        self.rounds += layout is not None and bool(calls)
        if layout is not None and local is not None and local.number in candidates:  # while the others are asked
            calls[local.number] = local.draw(candidates[local.number], largest, layout, room)
        return calls

    @property
    def union_now(self) -> _C.UnionShards | None:
        """What `union` has returned, if the shards are still the same."""
        if self._union is None:
            return None
        if os.getpid() != self._pid:
            self.coordinator.require_own_process()
        known, here, union = self._union
        if here is not None and time.monotonic() - self._seen_at >= LOOK_SECONDS and not self._is_alive(here):
            self._leave_union()
            return None
        table = self.table
        if known is not table:  # most of them bring nothing new
            if known.memories != table.memories or known.rule.cleared != table.rule.cleared:
                return None
            self._union = table, here, union
        return union if here is self.local.shard else None

    def union(self, layout: Layout) -> _C.UnionShards | None:
        """Returns all shards as the native core reaches them; None where it does not, or not in one go.

        Then `order` does: where Ray has to be asked, with values of any length, and where the only shard is here.
        """
        self.coordinator.require_own_process()
        table, here, before = self.table, self.local.shard, None
        if (union := self.union_now) is not None:
            return union
        if self._union is not None:
            known, _, last = self._union
            before = last if known.rule.cleared == table.rule.cleared else None
            self._leave_union()  # the largest priority is heard of, too
        if layout.is_ragged or not table.entries or self.all_here or (here and not self._is_alive(here)):
            return None
        shards: list[tuple[int, _C.Link | None]] = []
        with self._lock:
            for number, entry in sorted(table.entries.items()):
                link = None if here is not None and number == here.number else self._link_to(entry)
                if link is None and (here is None or number != here.number):
                    return None
                shards.append((number, None if link is None else link.native))
        segment = None if here is None else here.segment
        union = _C.UnionShards(self.connections, shards, segment, self.limiter.largest, before)
        self._union = table, here, union
        return union

    def forget_union(self, union: _C.UnionShards) -> None:
        """Has the native core reach the shards anew, with other connections."""
        if self._union is not None and self._union[2] is union:
            self._leave_union()

    def take_in_union(self, union: _C.UnionShards, draw: _C.UnionDraw) -> bool:
        """Takes in what shards have said with their items, if they have; returns whether the batch is made of these.

        Raises:
            Stopped: The buffer was stopped.
        """
        made, stopped = union.take_in(draw)
        self._heard_stop = self._heard_stop or stopped
        if self._heard_stop or self.table.stopped:
            raise Stopped(f"{self.called} was stopped")
        return made

    def _is_alive(self, here: LocalShard) -> bool:
        """Whether the process of the shard here is there: its memory is for as long as somebody has it."""
        self._seen_at = time.monotonic()
        return here.alive

    def gather(self, keys: Mapping[int, NDArray[np.int64]], layout: Layout) -> Answers:
        """Returns what all shards have to say of themselves, and the items that they find; those lost are left out.

        `keys` are each shard's own `[n]` by its number; none for those left out.
        """
        self.coordinator.require_own_process()
        self.coordinator.require_ray()
        self.report()
        none, calls = np.empty(0, np.int64), dict[int, Any]()
        with self._lock:
            local = self.local.shard
            for number, entry in self.table.entries.items():
                own = keys.get(number, none)
                if local is not None and local.number == number:
                    calls[number] = local.gather(own, layout)
                else:
                    calls[number] = entry.actor.gather.remote(own)
        answers = self._note(self.calls.collect(calls))
        self.refresh()
        return answers

    def ask_all(self, method: str, *args: Any, **options: Any) -> list[tuple[int, Any]]:
        """Returns the number of each shard and what its `ask` answers, in order, without lost shards."""
        entries = self.look().entries
        calls = {n: entry.actor.ask.remote(method, *args, **options) for n, entry in sorted(entries.items())}
        return list(self.calls.collect(calls).items())

    def ask_owners(
        self, keys: NDArray[np.int64], call: Callable[[Any, NDArray[np.int64], NDArray[np.bool_]], Any]
    ) -> list[tuple[NDArray[np.bool_], Any]]:
        """Asks the shards of `keys`, each for its own; returns which those are and the answer, without lost shards.

        `call` gets what calls a method of a shard's buffer, the shard's own keys, and which of `keys` they are.
        """
        numbers, own = unpack(keys)
        entries = self.look().entries
        masks = {number: numbers == number for number in np.unique(numbers).tolist() if number in entries}
        calls = {number: call(entries[number].actor.ask.remote, own[mine], mine) for number, mine in masks.items()}
        return [(masks[number], answer) for number, answer in self.calls.collect(calls).items()]

    def update(self, number: int, keys: NDArray[np.int64], td: NDArray[np.float64]) -> Any:
        """Has TD errors `[n]` applied by a shard to its own keys `[n]`, after the draws that it was asked for.

        Returns what the answer will be got by; None if there is no such shard any more.
        """
        self.coordinator.require_own_process()
        self.coordinator.require_ray()
        with self._lock:
            entry = self.table.entries.get(number)
            if entry is None:
                return None
            local = self.local.shard
        if local is not None and local.number == number:
            return local.update(keys, td)
        link = self._link_to(entry)
        if link is None or len(keys) > MAX_BATCH:
            return entry.actor.update.remote(keys, td)
        return link.update(keys, td)

    # Answers

    def hear(self, calls: Mapping[int, Any], wait: Wait) -> Answers:
        """Waits for what shards answer to an order. Those that are lost meanwhile are left out.

        Raises:
            ReplayTimeout: One takes too long.
            RuntimeError: One can never draw.
            Stopped: The buffer was stopped.
        """
        return self.take_in(self.calls.collect(calls, wait))

    def take_in(self, answers: Answers) -> Answers:
        """Does what `hear` does, with answers that have come."""
        self._note(answers)
        for number, (figures, _) in answers.items():
            if figures.trouble is not None:
                raise RuntimeError(f"shard {number}: {figures.trouble}")
        if self.stopped:
            raise Stopped(f"{self.called} was stopped")
        return answers

    @property
    def barren(self) -> str | None:
        """Why a shard's ring completed no item when it was last heard; None if none said so."""
        told = ((number, figures.barren) for number, figures in self.figures.items())
        return next((f"shard {number}: {why}" for number, why in told if why is not None), None)

    def exchange(self) -> None:
        """Looks at the table and hears all shards' figures and the coordinator's, also after the buffer was stopped.

        The limiter divides anew, as if this process waited for an item. Otherwise a program that only polls until there
        is enough would poll for ever, where not every node has explorers.
        """
        self._note(self.calls.collect(self.order(dict.fromkeys(self.look().entries, 0))))
        self.limiter.hear(self.coordinator.ask("report", self.limiter.report(1, looks=True))[0])
        self._catch_up()

    def census(self, unused_count_as_others: bool, /) -> Census:
        """Returns who takes part, in the terms of a buffer's own census."""
        local = self.local.shard  # another node's shard has no writer of this thread's
        own = 0 if local is None else local.own_writers(unused_count_as_others)
        told, learners = self.figures.values(), self.limiter.learners
        writers = sum(figures.writers for figures in told)
        departures = [figures.since_departure for figures in told if figures.since_departure >= 0]
        writes = [figures.stats.last_write_age for figures in told if figures.stats.last_write_age >= 0]
        return {
            "writers": writers,
            "learners": learners,
            "owners": len(told),
            "others_writing": max(0, writers - own),  # which may have come since they reported
            "others_learning": learners,
            "others_owning": len(told),
            "waiting": 0,
            "supervisors": int(self.table.expected),
            "shared": True,
            "since_departure": min(departures, default=-1.0),
            "since_write": min(writes, default=-1.0),
        }

    def _note(self, answers: Answers) -> Answers:
        told, limiter = {number: figures for number, (figures, _) in answers.items()}, self.limiter
        with self._lock:
            known = self._figures  # another thread may have heard a later answer meanwhile
            later = {n: said for n, said in told.items() if n not in known or not said.is_older_than(known[n])}
            self._figures = known | later
            limiter.count(told)
        return answers

    def _take_in(self, table: ShardTable) -> None:
        for lost in table.lost:  # another reporter may have known less
            rows, inserted = self._last_known(lost.number)
            if inserted > lost.inserted:
                logger.error("with shard %d %d rows are lost, not %d", lost.number, rows, lost.rows)
                self.coordinator.tell("lost", lost.number, rows, inserted, "")
        super()._take_in(table)
        self._figures = {number: figures for number, figures in self.figures.items() if number in table.entries}
        self._keep_ways(table.entries.values())
        if self.local.shard is not None:
            entry = table.entries.get(self.local.shard.number)
            if entry is None or entry.node != self.node:  # a shard that was restored has another number
                self.local.release()

    def _last_known(self, number: int) -> tuple[int, int]:
        """Returns how many rows a shard held, and how many items had become drawable in it, when last heard of."""
        local = self.local.shard
        if local is not None and local.number == number:
            with suppress(RuntimeError):  # closed by another thread
                stats = local.buffer.stats()
                return stats.size, stats.inserted
        figures = self.figures.get(number)
        return (figures.stats.size, figures.stats.inserted) if figures else (0, 0)

    def _answers(self, number: int, wait: Wait | None) -> bool:
        call = self._probe(number)
        return call is not None and bool(self.calls.collect({number: call}, wait))

    def _probe(self, number: int) -> Any:
        entry = self.table.entries.get(number)
        return None if entry is None else entry.actor.draw.remote(0, 0.0)

    def _link_to(self, entry: ShardEntry) -> ShardLink | None:
        """Returns the connection to a shard of another node; None: it is called through Ray."""
        way = self._ways.get(entry.handle.nonce)
        if way is None:
            called = f"shard {entry.number} on node {entry.node}"
            way = Way(partial(ShardLink, exchange=self.connections), called, entry.actor.address.remote)
            way = self._ways.setdefault(entry.handle.nonce, way)
        return way.link()

    def _keep_ways(self, entries: Iterable[ShardEntry]) -> None:
        """Ends the connections to all but these shards."""
        there = {entry.handle.nonce for entry in entries}
        for shard in [shard for shard in list(self._ways) if shard not in there]:
            if (way := self._ways.pop(shard, None)) is not None:  # another thread may do the same
                way.close()

    def _name(self, number: int) -> str:
        entry = self.table.entries.get(number)
        return f"shard {number} on node {'unknown' if entry is None else entry.node}"
