"""`torchreplay inspect`: the card of a checkpoint or of a buffer in a file."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchreplay.cli.refusal import refusals
from torchreplay.files.card import Card, card_of
from torchreplay.files.source import stored_rows
from torchreplay.files.verify import Verification, verify
from torchreplay.segment.reservation import size_text


@click.command("inspect", short_help="What a checkpoint or a buffer's file holds.")
@click.argument("path", type=click.Path())
@click.option("--verify", "every_row", is_flag=True, help="Read every row: checksums, keys, links, odd values.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(path: str, every_row: bool, as_json: bool) -> None:
    """Say what is in a checkpoint, an archive of one, or the file of a buffer.

    PATH is what buffer.save(...) wrote, or the path= of a ReplayBuffer, which may be in use. It is only read. With
    --verify the exit code is 1 where something is damaged.
    """
    with refusals():
        card = card_of(path)
        found = verify(stored_rows(path)) if every_row else None
    if as_json:
        click.echo(json.dumps(asdict(card) | ({} if found is None else {"verified": asdict(found)})))
    else:
        _show(Console(highlight=False), card, found)
    if found is not None and found.problems:
        raise SystemExit(1)


def _show(console: Console, card: Card, found: Verification | None) -> None:
    console.print(f"[bold]{escape(card.path)}[/bold]", soft_wrap=True)
    about = Table.grid(padding=(0, 2))
    for name, text in _lines(card).items():
        about.add_row(f"[dim]{name}[/dim]", escape(text))
    console.print(about)
    console.print(_field_table(card))
    if found is not None:
        _show_verification(console, found)


def _lines(card: Card) -> dict[str, str]:
    keys = "none" if card.oldest_key is None else f"{card.oldest_key:,} to {card.newest_key:,}"
    full = 100 * card.rows / card.capacity
    lines = {
        "kind": f"{card.kind}, format {card.format}",
        "state": card.state,
        "size": f"{size_text(card.nbytes)} on the disk",
        "rows": f"{card.rows:,} of {card.capacity:,} ({full:.0f} %)",
        "keys": f"{keys}; the next is {card.next_key:,}",
        "counts": f"{card.inserted:,} items inserted, {card.sampled:,} drawn in {card.draws:,} batches",
        "feedback": f"{card.updated:,} TD errors applied, {card.stale_updates:,} came too late",
        "largest |td|": f"{card.priority_max:g}",
        "view": card.view,
        "sampler": card.sampler,
        "limiter": card.limiter,
        "seed": str(card.seed),
    }
    if card.ragged_bytes:
        held, room = size_text(card.ragged_held), size_text(card.ragged_bytes)
        lines["ragged"] = f"{held} of {room} for values of any length"
    if card.name is not None:
        lines = {"name": card.name} | lines
    if card.dropped_rows:
        lines["dropped"] = f"{card.dropped_rows:,} rows that were being written when all processes had died"
    return lines


def _field_table(card: Card) -> Table:
    table = Table(title=None, box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    table.add_column("field")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("bytes", justify="right")
    for field in card.fields:
        shape, nbytes = str(list(field.shape)), f"{field.nbytes:,}"
        if field.ragged:
            shape = f"[n{''.join(f', {size}' for size in field.shape)}]" + (f" like {field.like}" if field.like else "")
            nbytes += " x n"
        table.add_row(escape(field.name), escape(shape), field.dtype, nbytes)
    fixed = sum(field.nbytes for field in card.fields if not field.ragged)
    table.add_row("a row", "", "", f"{fixed:,}" + (" and its values" if card.ragged_bytes else ""), style="bold")
    return table


def _show_verification(console: Console, found: Verification) -> None:
    beside = f", {found.changed:,} of them were overwritten meanwhile" if found.changed else ""
    console.print(f"read {found.rows:,} rows{beside}")
    for text in found.problems:
        console.print(f"[red]damaged[/red]  {escape(text)}", soft_wrap=True)
    for text in found.remarks:
        console.print(f"[yellow]look at[/yellow]  {escape(text)}", soft_wrap=True)
    if not found.problems:
        console.print("[green]intact[/green]")
