"""`Groups`: which of a queue's items belong together, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torchreplay import _C

GROUP = "group"
"""The entry of a batch that says which of its groups each item is of."""

MOST_NAMED = 8
"""Groups that a message names."""

LONGEST_MS = (1 << 32) - 1
"""The native core's clock of arrivals counts no further."""


@dataclass
class GroupCounts:
    """What became of the groups of one dataset in this process.

    Attributes:
        given: Groups that were given in batches, whole ones and others.
        incomplete: Of these, the ones with fewer than `size` members.
        dropped: Groups that waited longer than `timeout`, with too few members.
        dropped_items: Their members.
    """

    given: int = 0
    incomplete: int = 0
    dropped: int = 0
    dropped_items: int = 0


@dataclass(frozen=True)
class Groups:
    """Which groups a batch consists of.

    Attributes:
        column: The number of the field whose value the members of a group share.
        size: Members of a whole group.
        groups: Groups of a batch.
        min_size: Members with which a late group is given; None: it is dropped.
        timeout: Seconds after which a group is late; None: none is.
        counts: What became of them.
    """

    column: int
    size: int
    groups: int
    min_size: int | None
    timeout: float | None
    counts: GroupCounts = field(default_factory=GroupCounts)

    def native(self) -> tuple[int, int, int, int, int]:
        """Returns what the native core has to know."""
        milliseconds = -1 if self.timeout is None else int(min(1000 * self.timeout, LONGEST_MS))
        return self.column, self.size, self.groups, self.min_size or 0, milliseconds


def waiting_groups(segment: _C.Segment, groups: Groups) -> dict[int, int]:
    """Returns how many members each unfinished group has that can be drawn, the largest first. O(capacity)."""
    there = (segment.column(-1) > 0) & (segment.column(-2) > 0)
    names, members = torch.unique(segment.column(groups.column)[there], return_counts=True)
    found = {name: n % groups.size for name, n in zip(names.tolist(), members.tolist(), strict=True)}
    return dict(sorted(((name, n) for name, n in found.items() if n), key=lambda item: (-item[1], item[0])))


def described(waiting: dict[int, int], groups: Groups) -> str:
    """Returns unfinished groups in words: how many, and which have how many members."""
    named = ", ".join(f"{name} has {n}" for name, n in list(waiting.items())[:MOST_NAMED])
    more = "" if len(waiting) <= MOST_NAMED else ", ..."
    have = "group has" if len(waiting) == 1 else "groups have"
    return f"{len(waiting):,} {have} fewer than {groups.size} members ({named}{more})"
