"""What `torchreplay watch` shows: a panel of a live buffer, or one plain line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchreplay.cli.figures import bar_chart, bytes_text, count_text, meter, percent_text, seconds_text, spark
from torchreplay.monitoring.advice import LATE, SILENT, WAITING, Advice, Findings
from torchreplay.monitoring.snapshot import Participant
from torchreplay.monitoring.timeline import Timeline
from torchreplay.schema.samplers import Prioritized

SPARK = 40
"""Characters of a sparkline: the last so many seconds."""

PEOPLE = 12
"""Participants shown."""

CHART_HEIGHT = 4
CHART_WIDTH = 44
NARROW = 96
"""Characters of a terminal below which charts stand one under the other."""

DIM, GOOD, BAD, ACCENT = "grey58", "green", "bold red", "cyan"


def panel(findings: Findings, advice: list[Advice], width: int) -> RenderableType:
    """Returns the whole panel.

    Args:
        findings: What is known of the buffer.
        advice: What is wrong.
        width: Characters of a line.
    """
    parts: list[RenderableType] = [_head(findings), Text(), _figures(findings, width), Text(), _charts(findings, width)]
    parts += [Text(), _people(findings), Text(), _advice(advice)]
    return Panel(Group(*parts), title=_title(findings), title_align="left", border_style=DIM, padding=(0, 1))


def _title(findings: Findings) -> Text:
    return Text.assemble((f" {findings.buffer.name} ", f"bold {ACCENT}"), ("torchreplay watch ", DIM))


def _head(findings: Findings) -> Text:
    buffer, now = findings.buffer, findings.now
    pid, program = buffer.owner(now)
    rows, share = buffer.fill(now), buffer.fill(now) / buffer.capacity
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(meter(share, 24), style=ACCENT)
    line.append(f"  {rows:,} of {buffer.capacity:,} rows", style="bold")
    line.append(f"  {percent_text(share)}, {bytes_text(buffer.nbytes)}")
    line.append(f"\nprocess {pid}", style=DIM)
    line.append(f"  {program}" if program else "", style=DIM)
    line.append(f"  {type(buffer.config.view).__name__}, {_sampler(findings)}", style=DIM)
    line.append(f"  {seconds_text(now.age)} old", style=DIM)
    line.append("  stopped" if now.stopped else "", style=BAD)
    return line


def _sampler(findings: Findings) -> str:
    sampler = findings.buffer.config.sampler
    return f"Prioritized(alpha={sampler.alpha:g})" if isinstance(sampler, Prioritized) else "Uniform"


def _figures(findings: Findings, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    points = max(10, min(SPARK, width - 60))
    for label, value, series, remark, style in _rows(findings):
        line = spark(findings.timeline.series(series, points), points) if series else ""
        table.add_row(Text(label, style=DIM), Text(value, style=style or "bold"), Text(line, style=ACCENT), remark)
    return table


Row = tuple[str, str, Callable[[Timeline], float] | None, str, str]


def _rows(findings: Findings) -> Iterator[Row]:
    timeline, now = findings.timeline, findings.now
    for label, counter in (
        ("rows written", "head"),
        ("items drawn", "sampled"),
        ("batches drawn", "draws"),
        ("TD errors", "feedback"),
    ):
        yield label, f"{count_text(timeline.rate(counter))}/s", _rate_of(counter), _total(findings, counter), ""
    target = "" if now.target_ratio is None else f"target {count_text(now.target_ratio)}"
    ratio = "-" if not now.inserted else count_text(now.samples_per_insert)
    yield "samples per insert", ratio, lambda t: t.now.samples_per_insert, target, ""
    yield from _waits(findings)
    late, dropped = (timeline.share(part, "feedback") for part in ("stale_updates", "unready_updates"))
    remark = f"{percent_text(dropped)} of incomplete items; {now.stale_updates + now.unready_updates:,} so far"
    yield "late TD errors", percent_text(late), _late, remark, BAD if late >= LATE else ""


def _rate_of(counter: str) -> Callable[[Timeline], float]:
    return lambda timeline: timeline.rate(counter)


def _late(timeline: Timeline) -> float:
    return timeline.share("stale_updates", "feedback")


def _total(findings: Findings, counter: str) -> str:
    timeline, now = findings.timeline, findings.now
    total = f"{count_text(getattr(now, counter))} so far"
    if counter == "draws" and timeline.change("draws"):
        return f"{total}, of {timeline.change('sampled') / timeline.change('draws'):.0f} items"
    if counter == "sampled" and now.redraws:
        return f"{total}, {percent_text(now.redraws / max(1, now.sampled))} drawn again"
    return total


def _waits(findings: Findings) -> Iterator[Row]:
    timeline, now = findings.timeline, findings.now
    waiting = sum(writer.waiting for writer in now.alive("writer"))
    inserting, sampling = timeline.insert_wait_share(), timeline.sample_wait_share()
    text = f"of their time; {waiting} of {len(now.alive('writer'))} at this moment"
    yield "explorers wait", percent_text(inserting), Timeline.insert_wait_share, text, _alarm(inserting)
    quiet = min((p.since_draw for p in now.alive("learner") if p.since_draw >= 0), default=-1.0)
    text = "of their time" if quiet < 0 else f"of their time; last batch {seconds_text(quiet)} ago"
    yield "learners wait", percent_text(sampling), Timeline.sample_wait_share, text, _alarm(sampling)


def _alarm(share: float) -> str:
    return "bold yellow" if share >= WAITING else ""


def _charts(findings: Findings, width: int) -> RenderableType:
    slots = findings.slots
    if slots is None:
        return Text()
    bins = max(16, min(CHART_WIDTH, (width - 12) // 2 if width >= NARROW else width - 8))
    shares, low, high = slots.priority_histogram(bins)
    ends = (f"{low:.2g}", "log scale", f"{high:.2g}") if high else ("", "nothing can be drawn yet", "")
    half = f"half of the draws go to {percent_text(slots.half_of_draws)} of the items" if high else ""
    priorities = _chart("priorities, |TD error| of the items", shares.tolist(), ends, half)
    capacity = findings.buffer.capacity
    ages = slots.draws_by_age(bins, capacity).tolist()
    age_ends = ("newest", "rows written since", count_text(capacity))
    both = priorities, _chart("draws, by the age of the item", ages, age_ends, _turn(findings))
    if width < NARROW:
        return Group(*both)
    grid = Table.grid(padding=(0, 4))
    grid.add_row(*both)
    return grid


def _turn(findings: Findings) -> str:
    rate = findings.timeline.rate("head")
    return f"a turn of the ring takes {seconds_text(findings.buffer.capacity / rate)}" if rate > 0 else ""


def _chart(title: str, shares: list[float], ends: tuple[str, str, str], remark: str) -> Text:
    width = len(shares)
    left, middle, right = ends
    axis = f"{left} {middle.center(max(0, width - len(left) - len(right) - 2))} {right}"
    text = Text(no_wrap=True)
    text.append(f"{title}\n", style=DIM)
    for line in bar_chart(shares, CHART_HEIGHT):
        text.append(f"{line}\n", style=ACCENT)
    text.append("─" * width + "\n", style=DIM)
    text.append(f"{axis}\n", style=DIM)
    text.append(remark, style=DIM)
    return text


def _people(findings: Findings) -> RenderableType:
    now = findings.now
    people = [p for p in now.participants if p.role in ("writer", "learner")]
    if not people:
        return Text("nobody writes or draws", style=DIM)
    table = Table(box=None, padding=(0, 2), header_style=DIM, show_edge=False, pad_edge=False)
    table.add_column("who")
    for header in ("process", "rows/s", "in all", "last seen", "weights"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    versions = {weights.pid: weights for weights in findings.weights}
    shown = sorted(people, key=lambda p: (p.role != "learner", -p.rows))[:PEOPLE]
    for p in shown:
        weights = versions.get(p.pid)
        version = "" if weights is None or weights.version < 0 else f"{weights.version}"
        version += f" (-{weights.behind})" if weights is not None and weights.behind else ""
        rate = count_text(findings.timeline.participant_rate(p.id))
        state, style = _state(p)
        table.add_row(
            p.role, f"{p.pid}", rate, count_text(p.rows), seconds_text(p.heartbeat), version, Text(state, style=style)
        )
    if len(people) > len(shown):
        table.add_row(Text(f"and {len(people) - len(shown)} more", style=DIM))
    return table


def _state(p: Participant) -> tuple[str, str]:
    if not p.alive:
        return "died", BAD
    if p.waiting:
        return "waits for the learner", "yellow"
    if p.heartbeat < 0:
        return "starting", DIM
    return ("silent", "yellow") if p.heartbeat > SILENT else ("works", GOOD)


def _advice(advice: list[Advice]) -> Text:
    if not advice:
        return Text("✓ nothing looks wrong", style=GOOD)
    text = Text()
    for number, one in enumerate(advice):
        mark, style = ("!", BAD) if one.severity == "warning" else ("·", DIM)
        text.append("\n" if number else "")
        text.append(f"{mark} ", style=style)
        text.append(one.text, style="" if one.severity == "warning" else DIM)
    return text


def plain_line(findings: Findings, advice: list[Advice]) -> str:
    """Returns one line for a pipe or a log."""
    buffer, timeline, now = findings.buffer, findings.timeline, findings.now
    target = "" if now.target_ratio is None else f" (target {now.target_ratio:g})"
    parts = [
        f"{buffer.name}: {buffer.fill(now):,}/{buffer.capacity:,} rows",
        f"{count_text(timeline.rate('head'))} rows/s",
        f"{count_text(timeline.rate('draws'))} batches/s",
        f"samples/insert {now.samples_per_insert:.3g}{target}",
        f"explorers wait {percent_text(timeline.insert_wait_share())}",
        f"learners wait {percent_text(timeline.sample_wait_share())}",
        f"late TD errors {percent_text(timeline.share('stale_updates', 'feedback'))}",
        f"{len(now.alive('writer'))} writers, {len(now.alive('learner'))} learners",
    ]
    return " | ".join([", ".join(parts), *(one.text for one in advice if one.severity == "warning")])
