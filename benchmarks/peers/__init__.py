"""The replay buffers that are compared, behind one protocol."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Rows, Workload, td_errors

FILL_CHUNK_BYTES = 1 << 20


class Peer(Protocol):
    """One replay buffer under test.

    Where a buffer's own method takes the row's fields by keyword, ``append`` and ``extend`` are that very method: an
    adapter's wrapper would cost as much as a fast append.

    Attributes:
        name: Column of the table.
        append: Writes one row, fields by keyword; None where the buffer has no such operation.
        extend: Writes 50 rows, fields by keyword with a leading dimension.
        prioritized: Whether ``sample`` is prioritized and ``update`` exists.
    """

    name: str
    append: Callable[..., object] | None
    extend: Callable[..., object] | None
    prioritized: bool

    def fill(self) -> None:
        """Fills the whole capacity with rows of random priorities."""

    def sample(self, n: int) -> Any:
        """Draws a batch, in the form the buffer gives it."""

    def keep(self, n: int) -> Any:
        """Draws a batch that later draws leave alone."""

    def update(self, batch: Any, td: Any) -> None:
        """Feeds TD errors back for a batch."""

    def td(self, n: int, seed: int) -> Any:
        """Returns random TD errors in the form the buffer's users have them."""

    def writers(self) -> tuple[Callable[..., object], Callable[..., object]]:
        """Returns ``append`` and ``extend`` for the process that calls this."""

    def close(self) -> None:
        """Frees the buffer."""


def fill_chunks(workload: Workload, capacity: int) -> Iterator[tuple[Rows, NDArray[np.float32]]]:
    """Yields rows and TD errors that add up to ``capacity``; the same random rows again and again."""
    chunk = int(max(1, min(capacity, FILL_CHUNK_BYTES // workload.row_bytes)))
    rows = workload.rows(chunk, seed=1)
    for start in range(0, capacity, chunk):
        n = min(chunk, capacity - start)
        yield {name: values[:n] for name, values in rows.items()}, td_errors(n, seed=start)
