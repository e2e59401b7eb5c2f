"""How rows become training items."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """Every row is an item: a batch has the spec's fields, `[B, *shape]`."""
