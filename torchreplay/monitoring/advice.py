"""What is wrong with a run, in plain words, and what to do: from what its buffer has counted of late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from torchreplay.buffer.jams import Need
from torchreplay.monitoring.slots import SlotSample
from torchreplay.monitoring.snapshot import LiveBuffer, Participant, Snapshot
from torchreplay.monitoring.timeline import Timeline
from torchreplay.schema.limiters import Admission, SamplesPerInsert
from torchreplay.schema.samplers import Prioritized
from torchreplay.segment.process_state import is_stopped, state_of

OVER: Final = 10.0
"""Seconds over which rates are judged."""

ENOUGH: Final = 100
"""TD errors, items or batches that must have come in that time."""

LATE: Final = 0.05
"""Share of TD errors that may come too late."""

WAITING: Final = 0.2
"""Share of its time that a side may wait."""

UNSEEN: Final = 0.5
"""Share of the items that may be overwritten before they were ever drawn."""

SILENT: Final = 10.0
"""Seconds without a row, or a batch, after which a participant is silent while others work."""

GONE: Final = 30.0
"""Seconds for which it is said that a process is gone."""

FEW: Final = 0.01
"""Share of the items that may get half of the draws."""

MANY: Final = 1000
"""Items from which on priorities are judged."""

OLD_WEIGHTS: Final = 10
"""Publications that an explorer's weights may be behind."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence or two for people.

    Attributes:
        topic: What it is about, one word.
        text: What is the matter, and what to do.
        severity: "warning" where something is wrong; "note" where it may be meant.
    """

    topic: str
    text: str
    severity: Literal["warning", "note"] = "warning"


@dataclass(frozen=True, slots=True)
class WeightsInUse:
    """The weights that an explorer of a pool acts on.

    Attributes:
        index: The explorer.
        pid: Its process.
        version: Of the weights that it pulled last; -1: none yet.
        published: The newest version that there is; None where that is not known.
        heartbeat: Seconds since it was last heard of; NaN: never.
    """

    index: int
    pid: int
    version: int
    published: int | None
    heartbeat: float

    @property
    def behind(self) -> int:
        """How many publications it is behind."""
        return 0 if self.published is None or self.version < 0 else max(0, self.published - self.version)


@dataclass(frozen=True, slots=True)
class Findings:
    """What there is to judge by.

    Attributes:
        buffer: The buffer.
        timeline: Snapshots of it.
        slots: Its priorities and ages; None where nobody has looked.
        weights: What explorers act on, as far as that is known.
    """

    buffer: LiveBuffer
    timeline: Timeline
    slots: SlotSample | None = None
    weights: tuple[WeightsInUse, ...] = ()

    @property
    def now(self) -> Snapshot:
        """The newest snapshot."""
        return self.timeline.now


def advise(findings: Findings) -> list[Advice]:
    """Returns what is wrong, the gravest first; nothing where all is well."""
    found = [advice for rule in RULES for advice in rule(findings)]
    return sorted(found, key=lambda advice: advice.severity == "note")


def _stopped(findings: Findings) -> Iterator[Advice]:
    if findings.now.stopped:
        yield Advice("stopped", "The buffer was stopped: its writers and learners are to end.", "note")
    if findings.now.importing:
        yield Advice(
            "restore", "Rows of a checkpoint are being restored: nothing can be drawn until that is over.", "note"
        )


def _held_lock(findings: Findings) -> Iterator[Advice]:
    holder = findings.now.holder_pid
    held = holder and all(snapshot.holder_pid == holder for snapshot in findings.timeline.snapshots[-3:])
    if held and findings.buffer.sees_processes and is_stopped(holder):
        yield Advice(
            "lock",
            f"Process {holder} holds the buffer's lock and is stopped: nobody can draw. "
            f"Continue it with `kill -CONT {holder}`.",
        )


def _departed(findings: Findings) -> Iterator[Advice]:
    there = {(p.id, p.pid) for p in findings.now.participants if p.alive}
    gone: dict[int, tuple[str, float]] = {}  # who, and when it was seen last
    for ago in range(1, int(GONE) + 1):
        snapshot = findings.timeline.since(ago)
        for p in snapshot.participants:
            if p.alive and p.role in ("writer", "learner") and (p.id, p.pid) not in there and p.pid not in gone:
                gone[p.pid] = p.role, findings.now.time - snapshot.time
    ended = {pid: told for pid, told in gone.items() if findings.buffer.sees_processes and not state_of(pid)}
    for role in ("learner", "writer"):
        pids = [pid for pid, (whose, _) in ended.items() if whose == role]
        if pids and not findings.now.stopped:
            yield Advice("gone", _ending(role, pids, min(ended[pid][1] for pid in pids)))


def _ending(role: str, pids: list[int], seconds: float) -> str:
    since = f"ended {max(1.0, seconds):.0f} s ago. If that was not meant, look at"
    if len(pids) == 1:
        return f"Process {pids[0]}, a {role}, {since} its log."
    return f"{len(pids)} {role}s (processes {', '.join(map(str, sorted(pids)[:4]))}) {since} their logs."


def _silent(findings: Findings) -> Iterator[Advice]:
    now = findings.now
    for role, counter, idle in (("writer", "head", "written no row"), ("learner", "draws", "got no batch")):
        working = findings.timeline.change(counter, OVER) > 0
        for p in now.participants:
            if not (p.alive and p.role == role):
                continue
            if findings.buffer.sees_processes and is_stopped(p.pid):
                keeps = _kept_by(findings, p)
                yield Advice(
                    "silent", f"Process {p.pid}, a {role}, is stopped{keeps}: continue it with `kill -CONT {p.pid}`."
                )
            elif working and p.heartbeat > SILENT and not p.waiting:
                yield Advice("silent", _silence(p, idle))


def _kept_by(findings: Findings, p: Participant) -> str:
    """Returns what others miss of a queue while a process is stopped."""
    queue = findings.now.queue
    if queue is None:
        return ""
    in_the_way = queue.needed_pid == p.pid and _front_stays(findings)
    if p.role == "learner" and (items := queue.held_by(p.pid)):
        room = ", and whose room writers wait for" if in_the_way else ""
        return f" and holds {items:,} items, which nobody else gets{room}"
    needed = {Need.UNFINISHED: "its unfinished episode", Need.UNWRITTEN: "the row that it is writing"}
    if p.role == "writer" and in_the_way and queue.need in needed:
        return f", and {needed[queue.need]} leaves the other writers no room"
    return ""


def _front_stays(findings: Findings) -> bool:
    """Returns whether a full queue has no room because of the process that needs its oldest row.

    A queue keeps a row that is held, unfinished or being written for another turn if a later row is done with. So such
    a row is the reason only where few items are to be drawn. With a window an unfinished row is not kept, nor is one
    that is being written.
    """
    now, fifo = findings.now, findings.buffer.fifo
    if now.queue is None or fifo is None:
        return False
    of_writers = bool(fifo.window) or not now.to_draw
    stays = {
        Need.HELD: now.queue.held_items >= now.to_draw,
        Need.UNFINISHED: of_writers,
        Need.UNWRITTEN: of_writers,
    }
    return stays.get(now.queue.need, False)


def _silence(p: Participant, idle: str) -> str:
    reason = "its environment hangs" if p.role == "writer" else "it evaluates, saves or hangs"
    return f"Process {p.pid}, a {p.role}, has {idle} for {p.heartbeat:.0f} s, while others have: see whether {reason}."


def _nobody(findings: Findings) -> Iterator[Advice]:
    now, timeline = findings.now, findings.timeline
    if timeline.span < OVER:
        return
    if not now.alive("learner") and now.alive("writer") and timeline.change("head", OVER) > 0:
        yield Advice("learner", "Nobody draws what is written: no learner is there.", "note")
    if not now.alive("writer") and now.alive("learner") and timeline.change("draws", OVER) > 0:
        yield Advice("writer", "No writer is there: learners draw the rows that are left.", "note")
    if now.queue is not None and not now.alive("writer") and now.alive("learner") and not now.to_draw:
        yield Advice("writer", "No writer is there, and nothing is left to draw.", "note")


def _starving(findings: Findings) -> Iterator[Advice]:
    now, share = findings.now, findings.timeline.sample_wait_share(OVER)
    if findings.timeline.span < OVER / 3 or share < WAITING:
        return
    if now.queue is not None and findings.timeline.insert_wait_share(OVER) >= WAITING:
        return  # both sides wait: more explorers would wait, too
    limiter = now.limiter
    if not isinstance(limiter, Admission) and now.inserted < limiter.min_size:
        text = f"Learners wait for the first {limiter.min_size:,} items: {now.inserted:,} are there."
        yield Advice("starving", text, "note")
    elif isinstance(limiter, SamplesPerInsert):
        yield Advice(
            "starving",
            f"Learners wait {_percent(share)} of their time for rows: add explorers, or let each item be drawn "
            f"more often (SamplesPerInsert has a ratio of {limiter.ratio:g}).",
        )
    elif now.queue is not None:
        batches = f", and {now.to_draw:,} are there" if now.to_draw else ""
        yield Advice(
            "starving",
            f"Learners wait {_percent(share)} of their time for items{batches}: add explorers, or make them faster.",
        )
    else:
        yield Advice("starving", f"Learners wait {_percent(share)} of their time for rows: add explorers.")


def _held_back(findings: Findings) -> Iterator[Advice]:
    share = findings.timeline.insert_wait_share(OVER)
    if findings.timeline.span < OVER / 3 or share < WAITING:
        return
    if _waits_for_stopped(findings):
        return
    limiter = findings.now.limiter
    if isinstance(limiter, SamplesPerInsert):
        yield Advice(
            "held back",
            f"Explorers wait {_percent(share)} of their time for the learner, as "
            f"SamplesPerInsert(ratio={limiter.ratio:g}) asks. If they are to write more: a smaller ratio, larger "
            f"batches or a faster learner.",
            "note",
        )
    elif findings.now.queue is not None:
        has_room = findings.now.queue.need == Need.NONE and (
            findings.buffer.fill(findings.now) < findings.buffer.capacity / 2
        )
        if has_room or findings.timeline.insert_wait_share() < WAITING:
            return  # what they waited for has come
        yield Advice("held back", f"Explorers wait {_percent(share)} of their time for room: {_full(findings)}")
    else:
        yield Advice(
            "held back",
            f"Explorers wait {_percent(share)} of their time, because the learner falls behind: give it a core of its "
            f"own, or run fewer explorers.",
        )


def _waits_for_stopped(findings: Findings) -> bool:
    """Returns whether a queue has no room because of a stopped process, which is said already."""
    queue = findings.now.queue
    if queue is None or not findings.buffer.sees_processes:
        return False
    return _front_stays(findings) and is_stopped(queue.needed_pid)


def _full(findings: Findings) -> str:
    """Returns why a queue has no room, and what to do."""
    now, fifo = findings.now, findings.buffer.fifo
    assert now.queue is not None
    who = f"process {now.queue.needed_pid}" if now.queue.needed_pid else "a process"
    if not _front_stays(findings):
        return (
            f"the learner is too slow, and {now.to_draw:,} items wait to be drawn. Add learners, give each a core of "
            f"its own, or run fewer explorers."
        )
    if now.queue.need == Need.HELD:
        todo = "Call commit() more often" if fifo and fifo.commit == "manual" else "See whether it hangs"
        return f"{who} holds the oldest of {now.queue.held_items:,} items. {todo}, or enlarge the queue."
    oldest = (
        f"the oldest row is being written by {who}"
        if now.queue.need == Need.UNWRITTEN
        else f"an unfinished episode of {who} has the oldest row"
    )
    return f"{oldest}. See whether it hangs, or enlarge the queue."


def _dropped(findings: Findings) -> Iterator[Advice]:
    timeline = findings.timeline
    if findings.now.queue is None or timeline.change("inserted", OVER) < ENOUGH:
        return
    share = timeline.share("dropped_items", "inserted", OVER)
    if share >= LATE:
        yield Advice(
            "dropped",
            f"{_percent(share)} of the items are dropped before they are drawn: draw faster, enlarge the queue, or let "
            f"writers wait (Fifo(when_full='wait')).",
        )


def _late_feedback(findings: Findings) -> Iterator[Advice]:
    timeline = findings.timeline
    if timeline.change("feedback", OVER) < ENOUGH:
        return
    stale = timeline.share("stale_updates", "feedback", OVER)
    if stale >= LATE:
        yield Advice(
            "stale",
            f"{_percent(stale)} of TD errors come too late, their rows are overwritten: lower prefetch, enlarge the "
            f"buffer, or run fewer explorers.",
        )
    unready = timeline.share("unready_updates", "feedback", OVER)
    if unready >= LATE:
        yield Advice(
            "dropped",
            f"{_percent(unready)} of TD errors are dropped, because their item is not complete any more: enlarge "
            f"the buffer.",
        )


def _no_feedback(findings: Findings) -> Iterator[Advice]:
    now = findings.now
    if isinstance(findings.buffer.config.sampler, Prioritized) and now.draws >= ENOUGH and not now.feedback:
        yield Advice(
            "feedback",
            f"{now.draws:,} batches were drawn and no TD error has come back: call "
            f"buffer.update_priorities(batch, td_error) after each step.",
        )


def _undrawn(findings: Findings) -> Iterator[Advice]:
    timeline, buffer = findings.timeline, findings.buffer
    full = buffer.fill(findings.now) >= 0.99 * buffer.capacity
    if (
        findings.now.queue is not None
        or not full
        or timeline.change("inserted", OVER) < ENOUGH
        or not timeline.change("draws", OVER)
    ):
        return
    share = timeline.share("evicted_unsampled", "inserted", OVER)
    if share >= UNSEEN:
        yield Advice(
            "undrawn",
            f"{_percent(share)} of the items are overwritten before they were ever drawn: draw more often, enlarge the "
            f"buffer, or run fewer explorers.",
        )


def _short_of_bytes(findings: Findings) -> Iterator[Advice]:
    now, buffer, timeline = findings.now, findings.buffer, findings.timeline
    if now.queue is not None or timeline.change("head", OVER) < ENOUGH or now.rows > 0.9 * buffer.capacity:
        return
    if timeline.share("evicted_by_pages", "head", OVER) >= UNSEEN:
        given = buffer.config.ragged_bytes or 0
        enough = given * buffer.capacity // max(1, now.rows)
        yield Advice(
            "bytes",
            f"ragged_bytes is the smaller measure: {now.rows:,} of {buffer.capacity:,} rows fit into its {given:,}. "
            f"Raise it to about {enough:,}, or lower the capacity.",
            "note",
        )


def _priorities(findings: Findings) -> Iterator[Advice]:
    slots, sampler = findings.slots, findings.buffer.config.sampler
    if slots is None or not isinstance(sampler, Prioritized) or len(slots.leaves) < MANY:
        return
    if not sampler.alpha or findings.now.updated < findings.now.drawable:
        return
    share = slots.half_of_draws
    if share < FEW:
        yield Advice(
            "priorities",
            f"Half of the draws go to {_percent(share)} of the items: lower alpha (it is {sampler.alpha:g}), or clip "
            f"TD errors.",
        )
        return
    low, high = slots.quantiles(0.05, 0.95)
    if high <= low * 1.001:
        yield Advice(
            "priorities",
            f"Nearly all priorities are {high:.3g}: look whether TD errors are clipped, or all computed alike.",
        )


def _old_weights(findings: Findings) -> Iterator[Advice]:
    for weights in findings.weights:
        if weights.behind > OLD_WEIGHTS and weights.heartbeat < GONE:
            yield Advice(
                "weights",
                f"Explorer {weights.index} acts on weights {weights.behind} publications old: call ctx.pull_weights "
                f"more often, or lower max_weight_sync_delay.",
            )


def _percent(share: float) -> str:
    """Returns a share for people: two digits that count, such as "18 %" or "0.15 %"."""
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"


RULES: Final[tuple[Callable[[Findings], Iterator[Advice]], ...]] = (
    _held_lock,
    _departed,
    _silent,
    _dropped,
    _late_feedback,
    _no_feedback,
    _undrawn,
    _short_of_bytes,
    _starving,
    _held_back,
    _priorities,
    _old_weights,
    _nobody,
    _stopped,
)
"""Each looks for one thing, the gravest first."""
