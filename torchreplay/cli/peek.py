"""`torchreplay peek`: prints rows, and writes their images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchreplay.cli.refusal import Refused, refusals
from torchreplay.files.images import as_text, holds_bytes, is_image, picture_kind, pixels, png_writer
from torchreplay.files.rows import Positions, StoredRows
from torchreplay.files.source import stored_rows

FEW = 6
"""Values that are printed one by one; of more, their shape and range are."""


@click.command("peek", short_help="Rows of such a file, and their images.")
@click.argument("source", type=click.Path())
@click.option("-n", "count", default=5, type=click.IntRange(1, 10_000), help="Rows, 5 by default.")
@click.option("--oldest", is_flag=True, help="The oldest rows instead of the newest.")
@click.option(
    "--key", "keys", multiple=True, type=int, help="Rows with these keys instead; may be given several times."
)
@click.option("--images", type=click.Path(path_type=Path), help="Write fields that are images there, as PNG.")
def command(source: str, count: int, oldest: bool, keys: tuple[int, ...], images: Path | None) -> None:
    """Print rows of SOURCE: a checkpoint, an archive of one, or the file of a buffer, which may be in use."""
    with refusals():
        rows = stored_rows(source)
        at = _chosen(rows, count, oldest, keys)
        columns = {name: _read(rows, name, at) for name in rows.fields}
        priorities, seen = rows.priorities(at), rows.seen(at)
        gone = rows.gone(at)
        if gone.any():
            click.echo(f"{int(gone.sum())} of these rows were overwritten while they were read", err=True)
        kept = np.flatnonzero(~gone)
        at, items = at[kept], [_item(float(priorities[int(i)]), bool(seen[i])) for i in kept]
        columns = {name: [column[int(i)] for i in kept] for name, column in columns.items()}
        _show(Console(highlight=False), rows, at, columns, items)
        if images is not None:
            _write_images(rows, at, columns, images)


def _read(rows: StoredRows, name: str, at: Positions) -> Sequence[torch.Tensor]:
    """Returns the value of a field in each of these rows."""
    return rows.read_ragged(name, at) if name in rows.config.ragged else list(rows.read(name, at))


def _chosen(rows: StoredRows, count: int, oldest: bool, keys: tuple[int, ...]) -> Positions:
    """Returns the positions of the rows wanted, the newest first unless others are asked for."""
    if keys:
        missing = sorted(set(keys) - set(rows.keys[np.isin(rows.keys, keys)].tolist()))
        if missing:
            held = f"{rows.keys[0]} to {rows.keys[-1]}" if len(rows) else "none"
            raise Refused(f"there is no row with key {missing[0]}: the keys held are {held}")
        return np.searchsorted(rows.keys, keys).astype(np.int64)
    everything = np.arange(len(rows))
    return everything[:count] if oldest else everything[::-1][:count]


def _show(
    console: Console,
    rows: StoredRows,
    at: Positions,
    columns: Mapping[str, Sequence[torch.Tensor]],
    items: Sequence[str],
) -> None:
    for (i, key), item in zip(enumerate(rows.keys[at].tolist()), items, strict=True):
        console.print(f"[bold]row {key}[/bold]  {item}")
        table = Table.grid(padding=(0, 2))
        for name, column in columns.items():
            show = _ragged_text if name in rows.config.ragged else _text
            table.add_row(f"  [dim]{escape(name)}[/dim]", show(column[i]))
        console.print(table)


def _item(priority: float, seen: bool) -> str:
    """Returns in words what is known of the item that starts at a row.

    Args:
        priority: Of the item; NaN: it cannot be drawn.
        seen: Whether somebody has looked at the row.
    """
    if priority == priority:
        return f"priority {priority:.4g}"
    return "its item cannot be drawn" if seen else "nobody has looked at it yet"


def _ragged_text(value: torch.Tensor) -> str:
    """Returns a value of any length in one line: bytes as a picture or as text, where they are such."""
    if value.dtype == torch.uint8 and value.dim() == 1:
        content = value.numpy().tobytes()
        if kind := picture_kind(content):
            return f"a {kind.upper()} picture  {_dim('uint8', value)}"
        text = as_text(content)
        if text is not None:
            return f"{escape(text)}  {_dim('uint8', value)}"
    return _text(value) if value.numel() else f"nothing  {_dim(str(value.dtype).removeprefix('torch.'), value)}"


def _text(value: torch.Tensor) -> str:
    """Returns a value in one line: a few numbers as they are, of more their shape and range."""
    dtype = str(value.dtype).removeprefix("torch.")
    if value.dim() == 0:
        return f"{_number(value)}"
    if value.numel() <= FEW:
        return f"{', '.join(map(_number, value.reshape(-1)))}  {_dim(dtype, value)}"
    numbers = value.double()
    low, high, mean = (float(number) for number in (numbers.min(), numbers.max(), numbers.mean()))
    return f"{low:.4g} to {high:.4g}, mean {mean:.4g}  {_dim(dtype, value)}"


def _dim(dtype: str, value: torch.Tensor) -> str:
    return f"[dim]{dtype} \\[{', '.join(map(str, value.shape))}][/dim]"


def _number(value: torch.Tensor) -> str:
    number = value.item()
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def _write_images(rows: StoredRows, at: Positions, columns: Mapping[str, Sequence[torch.Tensor]], images: Path) -> None:
    fields = dict(zip(rows.fields, rows.config.fields.values(), strict=True))
    names = [name for name, field in fields.items() if is_image(field)]
    encoded = [name for name, field in fields.items() if holds_bytes(field)]
    if not names and not encoded:
        raise Refused(
            f"no field is an image (uint8 of 2 or 3 dimensions, or ragged, with JPEG or PNG bytes): the fields are "
            f"{', '.join(fields)}"
        )
    write = None
    try:
        write = png_writer() if names else None
    except ImportError as error:
        raise Refused(str(error)) from None
    images.mkdir(parents=True, exist_ok=True)
    written = 0
    for i, key in enumerate(rows.keys[at].tolist()):
        for name in names:
            assert write is not None
            write(images / f"{key}-{name.replace('/', '-')}.png", pixels(columns[name][i]))
        for name in encoded:
            content = columns[name][i].numpy().tobytes()
            if kind := picture_kind(content):
                (images / f"{key}-{name.replace('/', '-')}.{kind}").write_bytes(content)
                written += 1
    click.echo(f"{len(at) * len(names) + written} images in {images}")
