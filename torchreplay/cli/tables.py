"""Tables on a terminal or in a pipe, whose numbers are never cut."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MOST = 10_000
"""Characters of a line, more than any table takes."""


def print_whole(table: Table, console: Console) -> None:
    """Prints a table, in lines that are wider than the terminal if its columns take that.

    Columns with a `ratio` take what is left, and may be cut down to their `min_width`.
    """
    options = console.options.update(max_width=MOST)
    for column in table.columns:
        if column.ratio is None:
            cells = (column.header, *column.cells)
            column.min_width = max(Measurement.get(console, options, cell).maximum for cell in cells)
    console.width = max(console.width, Measurement.get(console, options, table).minimum)
    console.print(table, crop=False)
