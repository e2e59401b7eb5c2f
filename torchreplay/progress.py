"""One live line for work that takes long, on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds after which work counts as long."""


def track(work: Sequence[T], description: str) -> Iterator[T]:
    """Yields the pieces of `work`; when that takes long, a terminal shows how far it has come.

    Args:
        work: What is to be done, piece by piece.
        description: What it is.
    """
    start = time.monotonic()
    for done, piece in enumerate(work):
        yield piece
        if time.monotonic() - start > PATIENCE and sys.stderr.isatty():
            yield from _shown(work, done + 1, description)
            return


def _shown(work: Sequence[T], done: int, description: str) -> Iterator[T]:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:  # the line is a courtesy
        yield from work[done:]
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=len(work), completed=done)
        for piece in work[done:]:
            yield piece
            progress.advance(task)
