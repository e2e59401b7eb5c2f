"""Time steps of an episode that are there, as spans: parts may be lost, come again, or come in another order."""

from __future__ import annotations

Span = tuple[int, int]
"""Time steps of an episode: the first one, and the one after the last."""


def missing(spans: list[Span], wanted: Span) -> list[Span]:
    """Returns what of a span lies in none of the others, which are in order and apart."""
    found, (first, stop) = [], wanted
    for begin, end in spans:
        if first < min(begin, stop):
            found.append((first, min(begin, stop)))
        first = max(first, end)
    return [*found, (first, stop)] if first < stop else found


def joined(spans: list[Span]) -> list[Span]:
    """Returns spans in order, with those that touch as one."""
    found: list[Span] = []
    for first, stop in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return found


def steps_in(spans: list[Span]) -> int:
    """Returns how many steps spans have, which are apart."""
    return sum(stop - first for first, stop in spans)
