"""`Coordinator`: the actor that knows where the shards are, has lost ones made anew, and counts for the limiter."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from torchreplay.ray.runtime.cluster import errors_as_raised, living_nodes, only_on, reason
from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.ray.sharded.manifest import Manifest
from torchreplay.ray.sharded.rate_limiter import GlobalRateLimiter, LearnerReport, Rule, Totals
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.ray.sharded.shard_keys import MAX_SHARDS
from torchreplay.ray.sharded.shard_table import LostShard, ShardEntry, ShardTable
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import Limiter

RETRY: Final = 5.0
"""Seconds after which a shard that could not be made is tried again; twice as many after each of six more failures."""

RESEND: Final = 1.0
"""Seconds after which shards are sent their limits again, while anyone looks at the table: Ray may have lost some."""

STOP_SECONDS: Final = 5.0
"""Seconds for which a stop waits for the shards, so that who closes them next does not end them before."""

REPEAT: Final = 2.0
"""Seconds after which an announcement of writers is repeated."""

BELIEF: Final = 20.0
"""Seconds for which it is believed: then whoever made it is gone."""


@dataclass(slots=True)
class _Slot:
    """One of the parts into which the capacity is divided: the shard that fills it, if one does."""

    capacity: int
    node: str
    number: int = -1  # of the shard; -1: the next one that is made takes a new one
    limit: int | None = None  # items up to which it may admit its writers
    actor: Any = None
    ready: Any = None  # the first answer of a shard that is being made
    handle: Any = None  # what attaches to the shard, once it is made
    failures: int = 0  # of the last attempts to make it
    again_at: float = 0.0  # monotonic time of the next attempt

    @property
    def filled(self) -> bool:
        return self.actor is not None and self.ready is None


class Coordinator:
    """Makes the shards, one on each of some nodes, says which of them there are, and counts for the limiter.

    Nobody waits for it to draw or to write. It is asked when a process comes, when a shard is lost, and now and then.
    Learners report to it beside their draws, and it sends each shard the number of items that it may admit.

    Args:
        config: Of the union; its capacity does not count.
        capacities: Rows of each shard.
        nodes: Ray's ids of the nodes, one for each shard.
        anywhere: Whether a node that comes later may take the place of one that is gone.
        seed: Of all draws.
    """

    def __init__(self, config: Config, capacities: list[int], nodes: list[str], anywhere: bool, seed: int) -> None:
        self._ray = import_ray()
        self._config, self._anywhere, self._seed = config, anywhere, seed
        self._limiter = GlobalRateLimiter(Rule(config.limiter))
        self._slots = [_Slot(capacity, node) for capacity, node in zip(capacities, nodes, strict=True)]
        self._born = 0
        self._streams = 0
        self._turns = 0
        self._lost: dict[int, LostShard] = {}
        self._lost_updates = 0
        self._expecting: dict[str, float] = {}  # until when each announcement is believed, by the monotonic clock
        self._stopped = False
        self._table = ShardTable({}, self._limiter.rule)  # as it was when somebody looked last
        self._sent_at = 0.0  # when shards were last sent their limits again
        self._restored: tuple[Any, ...] = ()  # what was last said of that

    def open(self) -> ShardTable:
        """Makes all shards, and returns when they are there.

        Raises:
            MemoryError: A node has too little memory left for its shard.
            RuntimeError: A shard cannot be made: its node is gone, or it died.
        """
        for slot, limit in zip(self._slots, self._limiter.limits(range(len(self._slots))).values(), strict=True):
            self._make(slot, limit)
        for slot in self._slots:
            try:
                with errors_as_raised():
                    self._ray.get(slot.ready)
            except self._ray.exceptions.RayError as error:
                raise RuntimeError(
                    f"the shard of the ShardedReplay on node {slot.node} cannot be made: {reason(error)}. If the node "
                    f"is gone, call again once ray.nodes() says so, or give nodes=[...] without it"
                ) from None
        return self.table()

    def table(self) -> ShardTable:
        """Returns what is where now."""
        self._look_after()
        table = ShardTable(
            {
                slot.number: ShardEntry(slot.number, slot.node, slot.capacity, slot.actor, slot.handle)
                for slot in self._slots
                if slot.filled
            },
            self._limiter.rule,
            self._nodes(),
            tuple(self._lost.values()),
            self._lost_updates,
            any(until > time.monotonic() for until in self._expecting.values()),
            self._stopped,
            self._table.moment,
        )
        if table != self._table:
            self._table = replace(table, moment=table.moment + 1)
        return self._table

    def lost(self, number: int, rows: int, inserted: int, why: str) -> ShardTable:
        """Takes a shard that does not answer out of the table, and ends it in case it is still there.

        Of several callers' reports the one that knows of the most items counts, which is the latest. It says how many
        rows the shard held when it was last heard of, and how many items had become drawable in it by then.
        """
        self._limiter.count_inserted({number: inserted})
        before = self._lost.get(number)
        if before is not None and inserted > before.inserted:
            self._lost[number] = replace(before, rows=rows, inserted=inserted)
        for slot in self._slots:
            if slot.number == number and slot.actor is not None:
                self._ray.kill(slot.actor, no_restart=True)
                self._lost[number] = LostShard(number, slot.node, rows, inserted)
                slot.actor, slot.ready, slot.number = None, None, -1
                # Its explorers take seconds to notice, and wait for the next one then.
                self._expecting[f"shard {number}"] = time.monotonic() + BELIEF
                logger.error("shard %d on node %s is lost, and %d rows with it: %s", number, slot.node, rows, why)
        return self.table()

    def dropped(self, updates: int) -> None:
        """Counts TD errors whose shard is gone."""
        self._lost_updates += updates

    def report(self, report: LearnerReport, known: int | None = None) -> tuple[Totals, ShardTable | None]:
        """Takes in what a learner says, and divides anew what the limiter admits.

        Returns what others have drawn, and the table if the learner looks at it and it is newer than the one `known`.
        """
        totals = self._limiter.hear(report)
        if report.rule == self._limiter.rule.number:  # others know an old limiter only
            limits = self._limiter.limits([slot.number for slot in self._slots if slot.filled], report)
            for slot in self._slots:
                if slot.filled and slot.limit != limits[slot.number]:
                    self._admit(slot, limits[slot.number])
        table = None if known is None else self.table()
        return totals, None if table is None or table.moment == known else table

    def change_limiter(self, limiter: Limiter) -> ShardTable:
        """Sets another limiter for everyone; learners hear of it with their next report, or look at the table.

        It counts from the items that were reported last. Under a ratio no more are admitted until the next report.
        """
        self._limiter.change(limiter)
        return self._limit_anew()

    def cleared(self, inserted: dict[int, int]) -> ShardTable:
        """Takes in that the shards were emptied, each at so many items: the limiter begins anew.

        Learners hear of it as they hear of another limiter.
        """
        self._limiter.restart(inserted)
        return self._limit_anew()

    def counts(self) -> tuple[int, int]:
        """Returns how many numbers of shards, and of learners, were given."""
        return self._born, self._streams

    def restored(self, manifest: Manifest, numbers: dict[int, int], born: int, inserted: dict[int, int]) -> ShardTable:
        """Takes in that the shards hold the rows of a checkpoint now; to say so again changes nothing.

        Args:
            manifest: Of the checkpoint. Of another limiter than this one its counts of draws mean nothing.
            numbers: The number that each shard has, by that which it had.
            born: How many numbers of shards were given.
            inserted: Items that have become drawable in each shard, by its new number.
        """
        said = (manifest, numbers, born, inserted)
        if said == self._restored:
            return self.table()
        self._restored, counts = said, manifest.counts
        for slot in self._slots:
            slot.number = numbers.get(slot.number, slot.number)
        self._seed, self._born, self._streams = manifest.seed, born, max(self._streams, counts.streams)
        self._lost, self._lost_updates = {one.number: one for one in manifest.lost}, counts.lost_updates
        counted, sampled = self._limiter, 0
        counted.inserted = {**inserted, **{one.number: one.inserted for one in manifest.lost}}
        counted.rule = replace(counted.rule, cleared=counts.cleared)
        counted.change(counted.rule.limiter)
        if manifest.config.limiter == counted.rule.limiter:
            counted.rule, sampled = replace(counted.rule, inserted_before=counts.inserted_before), counts.sampled
        counted.remember(counts.items, counts.batches, sampled)
        return self.table()

    def join(self) -> int:
        """Returns a number for a process that draws; no other one gets it."""
        self._streams += 1
        return self._streams - 1

    def turn(self) -> int:
        """Returns a number, each time the next one: by it those who choose among equal shards take turns."""
        self._turns += 1
        return self._turns - 1

    def expect(self, token: str, expecting: bool) -> None:
        """Notes that someone says that writers will come, or says so no more."""
        now = time.monotonic()
        self._expecting = {other: until for other, until in self._expecting.items() if until > now and other != token}
        if expecting:
            self._expecting[token] = now + BELIEF

    def stop(self) -> None:
        """Stops the buffer for all processes, and returns when all shards that can be reached soon say so."""
        self._stopped = True
        stops = [slot.actor.ask.remote("stop") for slot in self._slots if slot.actor is not None]
        self._ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS)

    def _make(self, slot: _Slot, limit: int | None) -> None:
        if slot.number < 0 and self._born == MAX_SHARDS:
            raise RuntimeError(f"{MAX_SHARDS:,} shards were made, and there are no numbers left for more")
        if slot.number < 0:
            slot.number, self._born = self._born, self._born + 1
        seed = int(np.random.SeedSequence(self._seed, spawn_key=(slot.number,)).generate_state(1, np.uint64)[0])
        actor = self._ray.remote(Shard).options(num_cpus=0, max_restarts=0, scheduling_strategy=only_on(slot.node))
        config = replace(self._config, capacity=slot.capacity)
        slot.actor, slot.limit = actor.remote(slot.number, config, seed, limit), limit
        slot.ready = slot.actor.open.remote()

    def _admit(self, slot: _Slot, limit: int | None) -> None:
        slot.limit = limit
        if slot.actor is not None:
            slot.actor.admit.remote(limit)

    def _limit_anew(self) -> ShardTable:
        for slot in self._slots:
            self._admit(slot, self._limit_until_reported())
        return self.table()

    def _limit_until_reported(self) -> int | None:
        """Items up to which a shard's writers are admitted until a learner reports: none, under a ratio."""
        return 0 if self._limiter.rule.divides else None

    def _nodes(self) -> tuple[str, ...]:
        if all(slot.filled for slot in self._slots):
            return tuple(slot.node for slot in self._slots)
        alive = living_nodes()
        return tuple(slot.node for slot in self._slots if slot.filled or slot.node in alive)

    def _look_after(self) -> None:
        """Sees which shards are made, sends limits again, and has missing shards made where a node can take them."""
        for slot in self._slots:
            if slot.ready is not None and self._ray.wait([slot.ready], timeout=0)[0]:
                self._welcome(slot)
        now = time.monotonic()
        if now - self._sent_at >= RESEND:
            self._sent_at = now
            for slot in self._slots:
                self._admit(slot, slot.limit)
        missing = [slot for slot in self._slots if slot.actor is None and now >= slot.again_at]
        if not missing or self._stopped:
            return
        alive = living_nodes()
        free = [node for node in alive if node not in {slot.node for slot in self._slots}]
        for slot in missing:
            if slot.node not in alive and self._anywhere and free:
                slot.node, slot.failures = free.pop(), 0
            if slot.node in alive:
                self._make(slot, self._limit_until_reported())

    def _welcome(self, slot: _Slot) -> None:
        try:
            slot.handle, slot.failures = self._ray.get(slot.ready), 0
        except self._ray.exceptions.RayError as error:  # such as too little memory, or it was killed, or its node went
            slot.actor = None
            wait = RETRY * 2 ** min(slot.failures, 6)
            slot.failures, slot.again_at = slot.failures + 1, time.monotonic() + wait
            text = "no shard can be made on node %s, which is tried again in %.0f s: %s"
            # Of a lost shard's memory the last goes with the last explorer that has noticed.
            logger.error(text, slot.node, wait, getattr(error, "cause", None) or reason(error))
        slot.ready = None
