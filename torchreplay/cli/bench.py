"""`torchreplay bench`: this machine's figures."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from torchreplay.checking.speed import Figure, measure
from torchreplay.cli.refusal import Refused
from torchreplay.cli.tables import print_whole


@click.command("bench", short_help="What calls cost on this machine.")
@click.option(
    "--seconds", type=click.FloatRange(1, 60), default=8.0, show_default=True, help="That it may take, about."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of text.")
def command(seconds: float, as_json: bool) -> None:
    """Measure what writing, drawing and feeding back cost here, beside a copy of the same bytes.

    One process, on one core. Rounds of all calls take turns. Other programs that run meanwhile make them slower: the
    spread from the 10th to the 90th percentile shows them.
    """
    try:
        figures = measure(seconds)
    except MemoryError as error:
        raise Refused(str(error)) from None
    if as_json:
        click.echo(json.dumps([asdict(figure) for figure in figures]))
    else:
        print_whole(_table(figures), Console(highlight=False))


def _table(figures: list[Figure]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("call", "microseconds", "spread", "rows/s", "GB/s"):
        table.add_column(name, justify="left" if name == "call" else "right", no_wrap=True)
    for figure in figures:
        rate = f"{figure.nbytes / figure.seconds / 1e9:.2f}" if figure.nbytes else ""
        table.add_row(
            figure.name,
            f"{figure.seconds * 1e6:,.1f}",
            f"± {100 * figure.spread:.0f} %",
            f"{figure.rows / figure.seconds:,.0f}",
            rate,
        )
    return table
