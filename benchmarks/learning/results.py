"""One CSV file a cell, and all of them in one."""

import csv
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.learning.cell import Cell, Point


class Result(NamedTuple):
    """A line of the CSV file."""

    question: str
    task: str
    variant: str
    seed: int
    x: float
    y: float
    seconds: float


def path_of(cell: Cell, directory: Path) -> Path:
    """Returns where the results of `cell` go. It is there once the cell was played to its end."""
    return directory / "cells" / f"{cell.name}.csv"


def write(path: Path, results: Iterable[Result]) -> None:
    """Writes a CSV file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("w", newline="") as file:
        csv.writer(file).writerows([Result._fields, *results])
    part.replace(path)


def write_cell(cell: Cell, points: Iterable[Point], directory: Path) -> None:
    """Writes what a cell has shown."""
    where = (cell.question, cell.task, cell.variant, cell.seed)
    write(path_of(cell, directory), [Result(*where, *(round(value, 4) for value in point)) for point in points])


def read(path: Path) -> Iterator[Result]:
    """Yields the lines of a CSV file that `write` wrote."""
    with path.open(newline="") as file:
        for question, task, variant, seed, *values in list(csv.reader(file))[1:]:
            yield Result(question, task, variant, int(seed), *map(float, values))


def collect(cells: Iterable[Cell], directory: Path) -> list[Result]:
    """Returns the results of the cells that were played."""
    return [result for cell in cells if (path := path_of(cell, directory)).exists() for result in read(path)]
