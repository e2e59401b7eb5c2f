"""The rows that are written: vectors small and wide, and Atari frames."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = dict[str, NDArray[Any]]
"""Rows by field, each with a leading dimension."""

Row = tuple[NDArray[Any], int, float, NDArray[Any], bool]
"""One row as an explorer has it after ``env.step``: obs, action, reward, next_obs, done."""


@dataclass(frozen=True)
class Workload:
    """A kind of row and how many of them a full buffer holds.

    Attributes:
        name: Section of the table.
        shape: Shape of ``obs`` and ``next_obs``.
        dtype: Their dtype.
        capacity: Rows in a full run.
    """

    name: str
    shape: tuple[int, ...]
    dtype: type[np.generic]
    capacity: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's values, without any bookkeeping."""
        return 2 * int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize + 8 + 4 + 1

    def rows(self, n: int, seed: int = 0) -> Rows:
        """Returns ``n`` random rows."""
        generator = np.random.default_rng(seed)
        return {
            "obs": self._observations(n, generator),
            "action": generator.integers(0, 4, n),
            "reward": generator.standard_normal(n, dtype=np.float32),
            "next_obs": self._observations(n, generator),
            "done": generator.random(n) < 0.01,
        }

    def single_rows(self, n: int, seed: int = 0) -> list[Row]:
        """Returns ``n`` random rows one by one, observations as arrays of their own and the rest as Python scalars."""
        rows = self.rows(n, seed)
        return [
            (obs.copy(), int(action), float(reward), next_obs.copy(), bool(done))
            for obs, action, reward, next_obs, done in zip(*rows.values(), strict=True)
        ]

    def _observations(self, n: int, generator: np.random.Generator) -> NDArray[Any]:
        if np.issubdtype(self.dtype, np.integer):
            return generator.integers(0, 256, (n, *self.shape), dtype=np.uint8).astype(self.dtype, copy=False)
        return generator.standard_normal((n, *self.shape), dtype=np.float32).astype(self.dtype, copy=False)


SMALL = Workload("small", (4,), np.float32, 1_000_000)
WIDE = Workload("wide", (376,), np.float32, 200_000)
ATARI = Workload("atari", (4, 84, 84), np.uint8, 30_000)
WORKLOADS: Sequence[Workload] = (SMALL, WIDE, ATARI)


def td_errors(n: int, seed: int = 0) -> NDArray[np.float32]:
    """Returns ``n`` random TD errors, exponentially distributed as priorities roughly are in practice."""
    return np.random.default_rng(seed).exponential(1.0, n).astype(np.float32)
