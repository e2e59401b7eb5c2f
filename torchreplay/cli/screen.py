"""What `torchreplay watch` shows: a panel of a live buffer, or one plain line.

The panel is one text, whose columns are set here. Tables of rich inside each other take three times as long to render.
That time is taken from the run.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields

from rich.panel import Panel
from rich.text import Text

from torchreplay.buffer.jams import Need
from torchreplay.cli.figures import bar_chart, count_text, meter, percent_text, seconds_text, spark
from torchreplay.monitoring.advice import LATE, SILENT, WAITING, Advice, Findings, WeightsInUse
from torchreplay.monitoring.snapshot import Participant, QueueFacts
from torchreplay.monitoring.timeline import Timeline
from torchreplay.schema.samplers import Fifo, Prioritized, Sampler
from torchreplay.segment.process_state import is_stopped
from torchreplay.segment.reservation import size_text

WIDEST = 120
"""Characters of the panel, however wide the terminal is."""

NARROW = 96
"""Characters of the panel below which charts stand one under the other."""

SLIM = 60
"""Characters of a line below which figures have neither a course nor a remark, and texts are wrapped."""

SPARK = 40
"""Characters of a sparkline, one for each screen."""

PEOPLE = 12
"""Participants shown."""

STATE = 9
"""Characters of a participant's state, such as "silent", with the gap before it."""

CHART_HEIGHT, CHART_WIDTH, GAP = 4, 48, 4
"""Characters of a chart, and between two."""

DIM, GOOD, WORSE, BAD, ACCENT = "grey58", "green", "bold yellow", "bold red", "cyan"

COLUMNS = (("process", 10), ("rows/s", 8), ("in all", 9), ("last seen", 12), ("holds", 8), ("weights", 12))
"""Of the participants: headings, and characters. Only in queues does anybody hold items."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure.

    Attributes:
        label: What it is.
        value: Now, as text.
        course: Now, for its sparkline.
        remark: What else there is to say.
        style: Of the value.
    """

    label: str
    value: str
    course: float
    remark: str = ""
    style: str = "bold"


class Screen:
    """The panel, and the course of its figures from screen to screen."""

    def __init__(self) -> None:
        self._courses: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SPARK))
        self._rows: list[Row] = []

    def note(self, findings: Findings) -> None:
        """Takes the figures of now, and adds them to their courses: once for each screen."""
        self._rows = list(_rows(findings))
        for row in self._rows:
            self._courses[row.label].append(row.course)

    def panel(self, findings: Findings, advice: list[Advice], width: int, height: int | None = None) -> Panel:
        """Returns the panel, with the figures that were noted.

        Args:
            findings: What else is known of the buffer.
            advice: What is wrong.
            width: Characters of a line of the terminal.
            height: Lines of the terminal, in which charts are left out if there is no room; None: as many as it takes.
        """
        width = min(width, WIDEST)
        inner = max(1, width - 4)
        above, below = (
            [_head(findings, inner), self._figures(inner)],
            [_people(findings, inner), _advice(advice, inner)],
        )
        charts = [] if findings.now.queue is not None else [_charts(findings, inner)]  # its items are all alike
        lines = sum(len(part.plain.splitlines()) + 1 for part in (*above, *charts, *below)) + 1
        parts = [*above, *charts, *below] if height is None or lines <= height else [*above, *below]
        text = Text("\n\n", no_wrap=True, overflow="ellipsis").join(parts)
        title = Text.assemble((f" {findings.buffer.name} ", f"bold {ACCENT}"), ("torchreplay watch ", DIM))
        return Panel(text, title=title, title_align="left", border_style=DIM, padding=(0, 1), width=width)

    def _figures(self, width: int) -> Text:
        if width < SLIM:
            value = max((len(row.value) for row in self._rows), default=0)
            label = max(width - value, 0)
            return _lines(
                Text.assemble((f"{row.label[: max(label - 1, 0)]:<{label}}", DIM), (f"{row.value:>{value}}", row.style))
                for row in self._rows
            )
        room = max(8, min(SPARK, width - 62))
        return _lines(
            Text.assemble(
                (f"{row.label:<20}", DIM),
                (f"{row.value:>10}  ", row.style),
                (spark(self._courses[row.label], room), ACCENT),
                f"  {_fitting(row.remark, width - room - 34)}",
            )
            for row in self._rows
        )


def _fitting(remark: str, width: int) -> str:
    """Returns as many parts of a remark as a line has room for: a number that is cut is another number."""
    while remark and len(remark) > width:
        parts = max(remark.rfind("; "), remark.rfind(", "), 0)
        remark = remark[:parts]
    return remark


def _lines(lines: Iterable[Text]) -> Text:
    return Text("\n").join(lines)


def _head(findings: Findings, width: int) -> Text:
    buffer, now = findings.buffer, findings.now
    pid, program = buffer.owner(now)
    rows, share = buffer.fill(now), buffer.fill(now) / buffer.capacity
    sampler = buffer.config.sampler
    drawn = f"{type(sampler).__name__}({_told_of(sampler)})"
    in_use = "rows" if now.queue is None else "rows in use"
    made_of = [
        f"process {pid}",
        program,
        f"{type(buffer.config.view).__name__}, {drawn}",
        f"{seconds_text(now.age)} old",
    ]
    if width < SLIM:
        held = f"{rows:,} of {buffer.capacity:,} {in_use}, {percent_text(share)}, {size_text(buffer.nbytes)}"
        lines = [Text(meter(share, width), style=ACCENT)]
        lines += [Text(line, style="bold") for line in textwrap.wrap(held, width)]
        lines += [Text(line, style="bold") for line in textwrap.wrap(_values_text(findings), width)]
        lines += [Text(line, style=DIM) for line in textwrap.wrap(", ".join(filter(None, made_of)), width)]
        return _lines([*lines, *([Text("stopped", style=BAD)] if now.stopped else [])])
    return _lines(
        [
            Text.assemble(
                (meter(share, 24), ACCENT),
                (f"  {rows:,} of {buffer.capacity:,} {in_use}", "bold"),
                f"  {percent_text(share)}, {size_text(buffer.nbytes)}",
            ),
            *([_values(findings)] if buffer.ragged_bytes else []),
            Text.assemble(("  ".join(filter(None, made_of)), DIM), ("  stopped" if now.stopped else "", BAD)),
        ]
    )


def _values(findings: Findings) -> Text:
    return Text.assemble((meter(findings.now.ragged_fill, 24), ACCENT), (f"  {_values_text(findings)}", "bold"))


def _values_text(findings: Findings) -> str:
    """Returns how full the second measure is; of a buffer whose values are all of one size: ""."""
    buffer = findings.buffer
    if not buffer.ragged_bytes:
        return ""
    return f"{_share_of_values(findings)} for values of any length, in pages of {buffer.page_bytes:,} bytes"


def _share_of_values(findings: Findings) -> str:
    return f"{percent_text(findings.now.ragged_fill)} of {size_text(findings.buffer.ragged_bytes)}"


def _told_of(sampler: Sampler) -> str:
    """Returns what a sampler was given, as far as it matters here."""
    if isinstance(sampler, Prioritized):
        return f"alpha={sampler.alpha:g}"
    if isinstance(sampler, Fifo):
        given = {field.name: getattr(sampler, field.name) for field in fields(sampler)}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value != getattr(Fifo(), name))
    return ""


def _rows(findings: Findings) -> Iterator[Row]:
    yield from _rates(findings)
    now = findings.now
    if findings.buffer.config.has_versions:
        yield _version_row(findings)
    if now.queue is not None:
        yield from _queue_rows(findings, now.queue)
        yield from _waits(findings)
        return
    target = "" if now.target_ratio is None else f"target {count_text(now.target_ratio)}"
    ratio = now.samples_per_insert
    yield Row("samples per insert", count_text(ratio) if now.inserted else "-", ratio, target)
    yield from _waits(findings)
    timeline = findings.timeline
    late, dropped = (timeline.share(part, "feedback") for part in ("stale_updates", "unready_updates"))
    remark = (
        f"{percent_text(dropped)} of incomplete items; {count_text(now.stale_updates + now.unready_updates)} so far"
    )
    yield Row("late TD errors", percent_text(late), late, remark, BAD if late >= LATE else "bold")


def _version_row(findings: Findings) -> Row:
    now, timeline = findings.now, findings.timeline
    age = timeline.change("ages") / max(1.0, timeline.change("aged"))
    expired = f"; {count_text(now.expired_items)} expired" if now.expired_items else ""
    remark = f"the learner is at version {now.policy_version:,}; the oldest drawn was {now.age_max:,} behind{expired}"
    return Row("age in versions", count_text(age), age, remark)


def _queue_rows(findings: Findings, queue: QueueFacts) -> Iterator[Row]:
    now, timeline = findings.now, findings.timeline
    age = f"the oldest came {seconds_text(queue.oldest_age)} ago" if queue.oldest_age >= 0 else ""
    yield Row("items to draw", count_text(now.to_draw), now.to_draw, age)
    if now.admission_limit:
        begun = f"of {count_text(now.admission_limit)} at this version; {count_text(now.open_admissions)} are begun"
        yield Row("items admitted", count_text(now.admitted_items), now.admitted_items, begun)
    held = len(queue.holders)
    by = f"by {held} process{'' if held == 1 else 'es'}" if held else ""
    yield Row("items held", count_text(queue.held_items), queue.held_items, by)
    if findings.buffer.fifo is not None and findings.buffer.fifo.when_full == "drop_oldest":
        share = timeline.share("dropped_items", "inserted")
        remark = f"of those that came; {count_text(queue.dropped_items)} so far"
        yield Row("dropped items", percent_text(share), share, remark, BAD if share >= LATE else "bold")


def _rates(findings: Findings) -> Iterator[Row]:
    timeline, now = findings.timeline, findings.now
    items = timeline.change("sampled") / max(1.0, timeline.change("draws"))
    again = now.redraws / max(1, now.sampled)
    remarks = {
        "sampled": f", {percent_text(again)} drawn again" if again >= 0.001 else "",
        "draws": f", of {items:.0f} items" if items else "",
    }
    counters = {"rows written": "head", "items drawn": "sampled", "batches drawn": "draws"}
    if now.queue is None:
        counters["TD errors"] = "feedback"
    for label, counter in counters.items():
        rate = timeline.rate(counter)
        so_far = f"{count_text(getattr(now, counter))} so far{remarks.get(counter, '')}"
        yield Row(label, f"{count_text(rate)}/s", timeline.rate(counter, 1.0), so_far)


def _waits(findings: Findings) -> Iterator[Row]:
    timeline, now = findings.timeline, findings.now
    remark = f"of their time; {_waiting(now.alive('writer'))}"
    yield _wait("explorers wait", timeline, Timeline.insert_wait_share, remark)
    learners = now.alive("learner")
    quiet = min((p.since_draw for p in learners if p.since_draw >= 0), default=-1.0)
    remark = "of their time" if now.queue is None else f"of their time; {_waiting(learners)}"
    remark += "" if quiet < 0 else f"; last batch {seconds_text(quiet)} ago"
    yield _wait("learners wait", timeline, Timeline.sample_wait_share, remark)


def _waiting(people: list[Participant]) -> str:
    return f"{sum(p.waiting for p in people)} of {len(people)} at this moment"


def _awaited(queue: QueueFacts) -> str:
    """Returns what writers wait for that have no room."""
    who = f"process {queue.needed_pid}" if queue.needed_pid else "a process"
    return {
        Need.NONE: "waits for room",
        Need.TO_DRAW: "waits for a draw",
        Need.HELD: f"waits for room, which {who} holds",
        Need.UNFINISHED: f"waits for room, which an episode of {who} has",
        Need.UNWRITTEN: f"waits for room, which a row of {who} has",
    }[queue.need]


def _wait(label: str, timeline: Timeline, share_of: Callable[[Timeline, float], float], remark: str) -> Row:
    share = share_of(timeline, 5.0)
    return Row(label, percent_text(share), share_of(timeline, 1.0), remark, WORSE if share >= WAITING else "bold")


def _charts(findings: Findings, width: int) -> Text:
    slots, capacity = findings.slots, findings.buffer.capacity
    if slots is None:
        return Text("nothing is known of the priorities yet", style=DIM)
    side_by_side = width + 4 >= NARROW
    bins = max(1, min(CHART_WIDTH, (width - GAP) // 2 if side_by_side else width))
    shares, low, high = slots.priority_histogram(bins)
    ends = (f"{low:.2g}", "log scale", f"{high:.2g}") if high else ("", "nothing can be drawn yet", "")
    half = f"half of the draws go to {percent_text(slots.half_of_draws)} of the items" if high else ""
    room = None if side_by_side else width
    left = _chart("priorities, |TD error| of the items", shares.tolist(), ends, half, room)
    rate = findings.timeline.rate("head")
    turn = f"a turn of the ring takes {seconds_text(capacity / rate)}" if rate > 0 else ""
    ages = slots.draws_by_age(bins, capacity).tolist()
    right = _chart(
        "draws, by the age of the item", ages, ("newest", "rows written since", count_text(capacity)), turn, room
    )
    if not side_by_side:
        return _lines([*left, *right])
    return _lines(Text.assemble(a, " " * (bins - len(a) + GAP), b) for a, b in zip(left, right, strict=True))


def _chart(title: str, shares: list[float], ends: tuple[str, str, str], remark: str, room: int | None) -> list[Text]:
    """Returns the lines of a chart; `room`: characters for its remark, which is wrapped there; None: one line."""
    width = len(shares)
    left, middle, right = ends
    between = width - len(left) - len(right)
    axis = f"{left}{(middle if len(middle) + 2 <= between else '').center(between)}{right}" if between > 0 else left
    bars = [Text(line, style=ACCENT) for line in bar_chart(shares, CHART_HEIGHT)]
    remarks = [remark[:width]] if room is None else textwrap.wrap(remark, max(1, room))
    below = [Text(line, style=DIM) for line in ("─" * width, axis[:width], *remarks)]
    return [Text(title, style=DIM), *bars, *below]


def _people(findings: Findings, width: int) -> Text:
    people = [p for p in findings.now.participants if p.role in ("writer", "learner")]
    if not people:
        return Text("nobody writes or draws", style=DIM)
    versions = {weights.pid: weights for weights in findings.weights}
    shown = sorted(people, key=lambda p: (p.role != "learner", -p.rows))[:PEOPLE]
    columns = _columns(width, findings.now.queue is not None)
    heading = "who       " + "".join(f"{name:>{size}}" for name, size in columns) + ("  state" if columns else "")
    lines = [Text(heading, style=DIM)]
    lines += [_person(p, findings, versions.get(p.pid), columns) for p in shown]
    if len(people) > len(shown):
        lines.append(Text(f"and {len(people) - len(shown)} more", style=DIM))
    return _lines(lines)


def _columns(width: int, of_queue: bool) -> tuple[tuple[str, int], ...]:
    """Returns the columns of participants for which a line has room: whole ones, from the left."""
    taken = 10 + STATE
    columns = []
    for name, size in COLUMNS:
        if name == "holds" and not of_queue:
            continue
        taken += size
        if taken > width:
            break
        columns.append((name, size))
    return tuple(columns)


def _person(
    p: Participant, findings: Findings, weights: WeightsInUse | None, columns: tuple[tuple[str, int], ...]
) -> Text:
    version = "" if weights is None or weights.version < 0 else f"{weights.version}"
    if weights is not None and weights.behind:
        version += f" (-{weights.behind})"
    queue = findings.now.queue
    held = queue.held_by(p.pid) if queue is not None and p.role == "learner" else 0
    cells = {
        "process": f"{p.pid}",
        "rows/s": count_text(findings.timeline.participant_rate(p.id)),
        "in all": count_text(p.rows),
        "last seen": seconds_text(p.heartbeat),
        "holds": count_text(held) if held else "",
        "weights": version,
    }
    text = "".join(f"{cells[name]:>{width}}" for name, width in columns)
    state, style = _state(p, findings)
    return Text.assemble(f"{p.role:<10}{text}  ", (state, style))


def _state(p: Participant, findings: Findings) -> tuple[str, str]:
    if not p.alive:
        return "died", BAD
    if findings.buffer.sees_processes and is_stopped(p.pid):
        return "stopped", BAD
    if p.waiting and p.role == "learner":
        return "waits for items", WORSE
    if p.waiting:
        return "waits for the learner" if findings.now.queue is None else _awaited(findings.now.queue), WORSE
    if p.heartbeat < 0:
        return "starting", DIM
    return ("silent", WORSE) if p.heartbeat > SILENT else ("works", GOOD)


def _advice(advice: list[Advice], width: int) -> Text:
    if not advice:
        return Text("✓ nothing looks wrong", style=GOOD)
    lines = []
    for one in advice:
        mark, mark_style, style = ("! ", BAD, "") if one.severity == "warning" else ("· ", DIM, DIM)
        for number, line in enumerate(textwrap.wrap(one.text, max(20, width - 2))):
            lines.append(Text.assemble((mark if number == 0 else "  ", mark_style), (line, style)))
    return _lines(lines)


def plain_line(findings: Findings, advice: list[Advice]) -> str:
    """Returns one line for a pipe or a log."""
    buffer, timeline, now = findings.buffer, findings.timeline, findings.now
    target = "" if now.target_ratio is None else f" (target {now.target_ratio:g})"
    writers, learners = len(now.alive("writer")), len(now.alive("learner"))
    queue = now.queue
    parts = [
        f"{buffer.name}: {buffer.fill(now):,}/{buffer.capacity:,} rows",
        *([f"values {_share_of_values(findings)}"] if buffer.ragged_bytes else []),
        f"{count_text(timeline.rate('head'))} rows/s",
        f"{count_text(timeline.rate('draws'))} batches/s",
        f"samples/insert {now.samples_per_insert:.3g}{target}"
        if queue is None
        else f"{now.to_draw:,} items to draw, {queue.held_items:,} held, oldest {seconds_text(queue.oldest_age)}",
        f"explorers wait {percent_text(timeline.insert_wait_share())}",
        f"learners wait {percent_text(timeline.sample_wait_share())}",
        f"late TD errors {percent_text(timeline.share('stale_updates', 'feedback'))}"
        if queue is None
        else f"{queue.dropped_items:,} dropped",
        f"{writers} writer{'' if writers == 1 else 's'}, {learners} learner{'' if learners == 1 else 's'}",
    ]
    return " | ".join([", ".join(parts), *(one.text for one in advice if one.severity == "warning")])
