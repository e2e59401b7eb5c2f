"""What is said once in a process of a use of a buffer that runs, and most likely is a mistake."""

from __future__ import annotations

import os
import traceback
import warnings
from itertools import takewhile
from pathlib import Path

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"

_said: set[tuple[str, int]] = set()


def warn_of_ignored(nonce: int, called: str, sampler: str) -> None:
    """Warns that the TD errors that were fed back change nothing.

    Args:
        nonce: The buffer's identity.
        called: The buffer, in words.
        sampler: The name of its kind.
    """
    stays = "draws stay uniform" if sampler == "Uniform" else "the oldest items stay the first"
    text = (
        f"TD errors are fed back to {called}, and its sampler is {sampler}(), which ignores them: {stays}. "
        "Give the buffer sampler=tr.Prioritized(), or leave update_priorities out"
    )
    _warn_once("ignored", nonce, text)


def warn_of_copies(nonce: int, called: str, batch_size: int, items: int) -> None:
    """Warns that a batch holds items several times, as there are fewer than it takes.

    Args:
        nonce: The buffer's identity.
        called: The buffer, in words.
        batch_size: Of the batch.
        items: That could be drawn.
    """
    text = (
        f"a batch of {batch_size:,} is drawn from {items:,} {'item' if items == 1 else 'items'} of {called}, so "
        f"it holds copies. Begin when buffer.num_items is as large, or give the buffer "
        f"limiter=tr.MinSize({batch_size}), if others write meanwhile"
    )
    _warn_once("copies", nonce, text)


def warn_of_budget(nonce: int, called: str, field: str, elements: int, most: int) -> None:
    """Warns that an item alone is more than a budget, and makes a batch all the same.

    Args:
        nonce: The buffer's identity.
        called: The buffer, in words.
        field: The name of the ragged field.
        elements: That the item has.
        most: That the budget says.
    """
    text = (
        f"an item of {called} has {elements:,} elements of {field!r}, and the budget is {most:,}: the batch has that "
        f"item alone. Give a larger budget, or cut such values before they are written"
    )
    _warn_once("budget", nonce, text, RuntimeWarning)


def _warn_once(kind: str, nonce: int, text: str, category: type[Warning] = UserWarning) -> None:
    if (kind, nonce) not in _said:
        _said.add((kind, nonce))
        warnings.warn(text, category, stacklevel=_users_level())


def _users_level() -> int:
    """Returns the `stacklevel` at which the caller names the user's line: the first one outside of this package."""
    callers = reversed(traceback.extract_stack())
    return sum(1 for _ in takewhile(lambda caller: caller.filename.startswith(PACKAGE), callers))
