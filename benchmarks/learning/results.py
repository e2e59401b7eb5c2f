"""One CSV file a cell, and all of them in one."""

import csv
import os
import subprocess
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.learning.cell import Cell, Point
from benchmarks.machine import describe


class Result(NamedTuple):
    """A line of the CSV file: a point of a run, and when, where and with what code it was played.

    Files from before these were noted have lines without the last three.
    """

    question: str
    task: str
    variant: str
    seed: int
    x: float
    y: float
    seconds: float
    date: str = ""
    commit: str = ""  # with a + where files were changed since; "" outside of a repository
    machine: str = ""


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
    commit = revision()  # before the run: it may take an hour
    values = [Point(*(round(value, 4) for value in point)) for point in points]
    date, machine = datetime.now(UTC).date().isoformat(), "{cores} x {processor}".format(**describe())
    write(path_of(cell, directory), [Result(*where, *point, date, commit, machine) for point in values])


def read(path: Path) -> Iterator[Result]:
    """Yields the lines of a CSV file that `write` wrote."""
    with path.open(newline="") as file:
        for question, task, variant, seed, x, y, seconds, *played in list(csv.reader(file))[1:]:
            yield Result(question, task, variant, int(seed), float(x), float(y), float(seconds), *played)


def collect(cells: Iterable[Cell], directory: Path) -> list[Result]:
    """Returns the results of the cells that were played."""
    return [result for cell in cells if (path := path_of(cell, directory)).exists() for result in read(path)]


def revision() -> str:
    """Returns the short name of the present commit, with a + where files differ from it; "" outside of a repository."""
    asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        answer = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return answer.stdout.strip()
