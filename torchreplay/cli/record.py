"""`torchreplay record`: what a live buffer counts over time, into one small file."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import click

from torchreplay.cli.figures import seconds_text
from torchreplay.cli.looking import RATE, looks, opened, step_back
from torchreplay.monitoring.recording import Recorder
from torchreplay.monitoring.slots import sample_slots
from torchreplay.monitoring.snapshot import LiveBuffer
from torchreplay.segment.reservation import size_text

SLOTS_SECONDS = 1.0
"""Between two looks at priorities."""


@click.command("record")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("buffer", required=False)
@click.option("--rate", default=RATE, show_default=True, type=click.FloatRange(0.1, 100), help="Looks a second.")
@click.option("--seconds", type=click.FloatRange(0), help="End after so long. By default: when the buffer is gone.")
def command(file: Path, buffer: str | None, rate: float, seconds: float | None) -> None:
    """Record what a live BUFFER counts into FILE, until it is gone or Ctrl-C comes.

    `torchreplay plot FILE` makes a picture of it. A recorder that is killed leaves all whole records.
    """
    with opened(buffer) as live:
        step_back()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the file gets its end
        try:
            recorder = Recorder(file, live)
        except FileExistsError:
            raise click.ClickException(f"there is a file at {file} already: delete it, or name another") from None
        except OSError as error:
            raise click.ClickException(f"{file} cannot be written: {error.strerror}") from None
        try:
            with recorder:
                elapsed = _follow(live, recorder, rate, seconds)
        except OSError as error:
            has = f"{recorder.records:,} records, which torchreplay plot shows"
            raise click.ClickException(
                f"{file} cannot be written any further: {error.strerror}. It has {has}"
            ) from None
        size = size_text(file.stat().st_size)
        click.echo(f"{recorder.records:,} records over {seconds_text(elapsed)}, {size}: torchreplay plot {file}")


def _follow(live: LiveBuffer, recorder: Recorder, rate: float, seconds: float | None) -> float:
    """Records until the buffer is gone, the time is over or Ctrl-C comes. Returns after how many seconds."""
    elapsed, slots_at = 0.0, 0.0
    with suppress(KeyboardInterrupt):
        click.echo(f"recording {live.name}; end with Ctrl-C")
        for elapsed in looks(live, rate, seconds):
            now = live.snapshot()
            recorder.add(now)
            if elapsed >= slots_at and live.fifo is None:  # a queue's items have no priorities
                slots_at = elapsed + SLOTS_SECONDS
                recorder.add_slots(now.time, sample_slots(live, now.head))
    return elapsed
