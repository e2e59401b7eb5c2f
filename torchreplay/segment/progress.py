"""One live line for work and waits that take long, on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.live import Live

T = TypeVar("T")

LONG_AFTER = 1.0
"""Seconds after which work, or a wait, counts as long."""


def track(work: Sequence[T], description: str) -> Iterator[T]:
    """Yields the pieces of `work`; when that takes long, a terminal shows how far it has come.

    Args:
        work: What is to be done, piece by piece.
        description: What it is.
    """
    start = time.monotonic()
    for done, piece in enumerate(work):
        yield piece
        if time.monotonic() - start > LONG_AFTER and sys.stderr.isatty():
            yield from _shown(work, done + 1, description)
            return


def _shown(work: Sequence[T], done: int, description: str) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=len(work), completed=done)
        for piece in work[done:]:
            yield piece
            progress.advance(task)


class LiveLine:
    """A line of text at the bottom of the terminal, replaced at every change and gone in the end.

    No thread redraws it: waits count the threads that might end them.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        live.start()

    @classmethod
    def on_terminal(cls) -> LiveLine | None:
        """Returns a line on standard error, or None where that is no terminal."""
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.live import Live

        return cls(Live(console=Console(stderr=True), auto_refresh=False, transient=True))

    def show(self, text: str) -> None:
        """Replaces the text, cut to the width of the terminal."""
        from rich.text import Text

        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Takes the line away."""
        self._live.stop()
