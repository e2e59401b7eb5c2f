"""`torchreplay list`: the live buffers of this user."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchreplay.cli.figures import count_text, percent_text, seconds_text
from torchreplay.cli.tables import print_whole
from torchreplay.monitoring.survey import LOOK, Listed, survey
from torchreplay.segment.reservation import size_text

PIPE_WIDTH = 160
"""Characters of a line that goes to no terminal."""

NOTHING = (
    "No live buffer of this user on this machine. One is there as long as a program has a ReplayBuffer: start yours, "
    "such as examples/apex_cartpole.py, and call this again. Buffers of other users are not shown."
)


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with all figures.")
@click.option("--ray", "address", metavar="ADDRESS", help='The nodes of a Ray cluster, such as "auto" or host:port.')
@click.option(
    "--seconds", default=LOOK, show_default=True, type=click.FloatRange(0.01), help="Over which rates are taken."
)
def command(as_json: bool, address: str | None, seconds: float) -> None:
    """List the live buffers of this user, found through the kernel."""
    if address is None:
        found = survey(seconds)
    else:
        from torchreplay.cli.ray_nodes import survey_nodes

        found = survey_nodes(address, seconds)
    if as_json:
        click.echo(json.dumps([asdict(listed) for listed in found], indent=1))
    elif not found:
        click.echo(NOTHING if address is None else f"No live buffer of this user on the nodes of {address}.")
    else:
        console = Console()
        if not console.is_terminal:
            console.width = PIPE_WIDTH
        print_whole(_table(found, address is not None), console)
        for listed in found:
            if listed.trouble:
                console.print(Text(f"{listed.name} (process {listed.pid}): {listed.trouble}", style="bold red"))


def _table(found: Sequence[Listed], nodes: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="grey58")
    for header in (*(("node",) if nodes else ()), "name", "inode", "process"):
        table.add_column(header, no_wrap=True)
    table.add_column("program", ratio=1, min_width=12, no_wrap=True, overflow="ellipsis")
    queues, ragged = any(listed.to_draw >= 0 for listed in found), any(listed.ragged_bytes for listed in found)
    of_queues = ("to draw", "held") if queues else ()
    of_values = ("values",) if ragged else ()
    for header in ("rows", "full", *of_values, "rows/s", "batches/s", "writers", "learners", *of_queues, "age"):
        table.add_column(header, justify="right", no_wrap=True)
    for listed in found:
        node = (listed.node[:8],) if nodes else ()
        name = Text(listed.name, style="bold cyan")
        about = (name, f"#{listed.inode}", f"{listed.pid}", Text(listed.program))
        table.add_row(*node, *about, *_figures(listed, queues, ragged))
    return table


def _figures(listed: Listed, queues: bool, ragged: bool) -> tuple[str, ...]:
    if listed.trouble:
        return ("-",) * (7 + 2 * queues + ragged)
    values = f"{percent_text(listed.ragged_fill)} of {size_text(listed.ragged_bytes)}" if listed.ragged_bytes else "-"
    waiting = (count_text(listed.to_draw), count_text(listed.held_items)) if listed.to_draw >= 0 else ("-", "-")
    return (
        f"{count_text(listed.rows)} / {count_text(listed.capacity)}",
        percent_text(listed.rows / listed.capacity),
        *((values,) if ragged else ()),
        count_text(listed.rows_per_second),
        count_text(listed.batches_per_second),
        f"{listed.writers}",
        f"{listed.learners}",
        *(waiting if queues else ()),
        seconds_text(listed.age) + (", stopped" if listed.stopped else ""),
    )
