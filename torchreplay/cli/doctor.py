"""`torchreplay doctor`: what this machine gives, and what to change."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from torchreplay.checking.machine import examine


@click.command("doctor", short_help="What this machine gives, and what to change.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of text.")
def command(as_json: bool) -> None:
    """Say what this machine gives to shared replay: each line is ok, or has what to change and why.

    The exit code is 1 where something is to be changed.
    """
    found = examine()
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found]))
    else:
        table = Table.grid(padding=(0, 2))
        for finding in found:
            mark = "[green]ok[/green]" if finding.ok else "[yellow]warn[/yellow]"
            advice = f"\n[dim]{finding.advice}[/dim]" if finding.advice else ""
            table.add_row(mark, finding.topic, f"{finding.value}{advice}")
        Console(highlight=False).print(table)
    if not all(finding.ok for finding in found):
        raise SystemExit(1)
