"""`torchreplay watch`: a live buffer on the screen, while its program runs."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from torchreplay.cli.explorers import ExplorerWeights
from torchreplay.cli.looking import RATE, looks, opened, step_back
from torchreplay.cli.screen import WIDEST, Screen, plain_line
from torchreplay.monitoring.advice import Findings, advise
from torchreplay.monitoring.slots import SlotSample, sample_slots
from torchreplay.monitoring.snapshot import LiveBuffer
from torchreplay.monitoring.timeline import Timeline

SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""How a picture is written: with the fonts of the machine that shows it."""

FIRST = 1.0
"""Seconds after which the first line comes in a pipe, at most."""


class Watcher:
    """What is known of a buffer, look by look.

    Args:
        buffer: The buffer.
        weights: Of the explorers.
    """

    def __init__(self, buffer: LiveBuffer, weights: ExplorerWeights) -> None:
        self._buffer, self._weights = buffer, weights
        self._timeline = Timeline()
        self._slots: SlotSample | None = None

    def look(self) -> None:
        """Takes a snapshot."""
        self._timeline.add(self._buffer.snapshot())

    def findings(self) -> Findings:
        """Returns all that is known now, after a look at priorities and weights."""
        now = self._timeline.now
        self._slots = sample_slots(self._buffer, now.head)
        writers = {p.pid for p in now.alive("writer")} if self._buffer.sees_processes else set()
        return Findings(self._buffer, self._timeline, self._slots, self._weights.of(writers))


def _save(findings: Findings, screen: Screen, path: Path) -> None:
    console = Console(record=True, width=WIDEST, file=io.StringIO(), force_terminal=True)
    console.print(screen.panel(findings, advise(findings), WIDEST))
    if path.suffix == ".svg":
        console.save_svg(str(path), title="torchreplay watch", code_format=SVG)
    else:
        console.save_text(str(path))


@click.command("watch")
@click.argument("buffer", required=False)
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between screens.")
@click.option("--rate", default=RATE, show_default=True, type=click.FloatRange(0.1, 100), help="Looks a second.")
@click.option("--plain", is_flag=True, help="One line for each screen, as in a pipe.")
@click.option("--seconds", type=click.FloatRange(0), help="End after so long. By default: when the buffer is gone.")
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Save the last screen there, .svg or .txt."
)
def command(
    buffer: str | None, interval: float, rate: float, plain: bool, seconds: float | None, picture: Path | None
) -> None:
    """Watch a live BUFFER: its rates, waits and priorities, and what looks wrong.

    BUFFER is a name, a file, a process id or an inode of `torchreplay list`; it may be left out when there is only one.
    The program that is watched is not changed: it has no line for it, and takes no notice.
    """
    if picture is not None and not picture.absolute().parent.is_dir():
        raise click.ClickException(f"{picture} cannot be written: there is no directory {picture.absolute().parent}")
    with opened(buffer) as live, ExplorerWeights() as weights:
        step_back()
        watcher, screen, console = Watcher(live, weights), Screen(), Console()
        on_screen = console.is_terminal and not plain
        # A line is read by itself: its rates need some time.
        first = 0.0 if on_screen else min(interval, FIRST, FIRST if seconds is None else seconds / 2)
        moments = _screens(watcher, screen, first, interval, looks(live, rate, seconds))
        with suppress(KeyboardInterrupt):
            if on_screen:
                _show(moments, screen, console)
            else:
                for findings in moments:
                    click.echo(f"{time.strftime('%H:%M:%S')} {plain_line(findings, advise(findings))}")
        watcher.look()
        findings = watcher.findings()
        screen.note(findings)
        if on_screen:
            console.print(screen.panel(findings, advise(findings), console.width))
        if picture is not None:
            _save(findings, screen, picture)
            click.echo(f"saved {picture}")
        if not live.in_use():
            click.echo(f"{live.name} is gone: the last process that had it has ended or closed it")


def _screens(
    watcher: Watcher, screen: Screen, first: float, interval: float, moments: Iterator[float]
) -> Iterator[Findings]:
    """Looks at each moment, and yields what is known when the next screen is due. The first one needs two looks."""
    due = first
    for elapsed in moments:
        watcher.look()
        if elapsed > 0 and elapsed >= due:
            due = elapsed + interval
            findings = watcher.findings()
            screen.note(findings)
            yield findings


def _show(moments: Iterator[Findings], screen: Screen, console: Console) -> None:
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for findings in moments:
            width, height = console.size
            live.update(screen.panel(findings, advise(findings), width, height), refresh=True)
