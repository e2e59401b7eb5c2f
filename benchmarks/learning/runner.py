"""Plays cells, each in a process of its own, and goes on where an earlier run was stopped."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from benchmarks.learning.cell import Cell
from benchmarks.learning.results import path_of, write_cell


def play_missing(cells: Sequence[Cell], directory: Path, jobs: int) -> int:
    """Plays the cells that have no results yet; returns how many there were.

    Args:
        cells: To be played, in this order.
        directory: Of the results.
        jobs: Cells that are played at a time.
    """
    missing = [cell for cell in cells if not path_of(cell, directory).exists()]
    print(f"{len(cells) - len(missing)} of {len(cells)} cells were played before", flush=True)
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = {pool.submit(_play, cell, directory): cell for cell in missing}
        failed = [
            runs[run] for done, run in enumerate(as_completed(runs), 1) if not _tell(run, runs[run], done, len(runs))
        ]
    if failed:
        raise RuntimeError(f"{len(failed)} cells failed, and are played by the next run: {[c.name for c in failed]}")
    return len(missing)


def _tell(run: "Future[float]", cell: Cell, done: int, of: int) -> bool:
    """Says how a cell went; returns False if it failed. Others are played all the same."""
    error = run.exception()
    print(f"{done} of {of}: {cell.name}, {repr(error) if error else f'{run.result():.1f} s'}", flush=True)
    return error is None


def _play(cell: Cell, directory: Path) -> float:
    import torch

    torch.set_num_threads(1)
    start = time.perf_counter()
    write_cell(cell, cell.play(cell.seed), directory)
    return time.perf_counter() - start
