"""Plain copies of a buffer's own memory, which draws of long values are compared with."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from benchmarks.line import OURS, Line
from benchmarks.plan import Plan
from torchreplay.checking.timing import Candidate, interleave

FRESH, REUSED = "memcpy, fresh", "memcpy, reused"
PLACES = 64
MICROSECONDS = 1e6


def draws_beside_copies(
    section: str, draw: str, fraction: str, candidates: Sequence[Candidate], plan: Plan
) -> Iterator[Line]:
    """Yields the times of draws and of copies, all in one thread, and how close torchreplay's draw comes to each copy.

    Args:
        section: Of the lines.
        draw: Name of the line of times.
        fraction: Beginning of the names of the lines of quotients.
        candidates: Draws, one of them torchreplay's, and ``copies`` of as many bytes.
        plan: Number and length of the rounds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = interleave(candidates, plan.rounds, plan.seconds)
    finally:
        torch.set_num_threads(threads)
    samples = {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}
    yield Line(section, draw, "us", samples)
    for name in (REUSED, FRESH):
        fractions = [copied / drawn for copied, drawn in zip(seconds[name], seconds[OURS], strict=True)]
        yield Line(section, f"{fraction} of {name}", "", {OURS: fractions}, higher_is_better=True)


def copies(columns: Sequence[torch.Tensor], rows: int) -> list[Candidate]:
    """Returns copies of ``rows`` contiguous rows of each column, at random places.

    They are single-threaded like each thread of a draw. One writes to memory of its own that it reuses, the other
    allocates its destination like a draw whose batches the caller may keep.
    """
    arrays = [column.numpy() for column in columns]
    generator = np.random.default_rng(0)
    starts = generator.integers(0, len(arrays[0]) - rows, (PLACES, len(columns))).tolist()
    reused = [np.ones_like(array[:rows]) for array in arrays]

    def copy(targets: Sequence[Any], places: Sequence[int]) -> None:
        for array, target, start in zip(arrays, targets, places, strict=True):
            np.copyto(target, array[start : start + rows])

    def copy_fresh(places: Sequence[int]) -> None:
        copy([torch.empty_like(column[:rows]).numpy() for column in columns], places)  # alive together, as in a draw

    return [
        Candidate(REUSED, repeat(lambda places: copy(reused, places), starts)),
        Candidate(FRESH, repeat(copy_fresh, starts)),
    ]


def repeat(work: Callable[[Any], object], arguments: Sequence[Any]) -> Callable[[int], None]:
    """Returns a loop over the arguments that goes on where the round before ended.

    A copy of the same rows again would find them in the caches.
    """
    endless = cycle(arguments)

    def run(n: int) -> None:
        for argument in islice(endless, n):
            work(argument)

    return run
