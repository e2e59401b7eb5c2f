"""The replay buffers that are compared, behind protocols that say what each of them can do."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Rows, Workload, td_errors

FILL_CHUNK_BYTES = 1 << 20


class Peer(Protocol):
    """One replay buffer under test.

    Where a buffer's own method takes what the protocol says, an adapter's is that very method: a wrapper would cost as
    much as a fast append.

    Attributes:
        name: Column of the table.
    """

    name: str

    def append(self, *, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> object:
        """Writes one row."""

    def extend(self, *, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> object:
        """Writes 50 rows: the fields have a leading dimension."""

    def fill(self) -> None:
        """Fills the whole capacity with rows, of random priorities where the buffer has priorities."""

    def sample(self, n: int, /) -> Any:
        """Draws a batch, in the form the buffer gives it."""

    def close(self) -> None:
        """Frees the buffer."""


@runtime_checkable
class PrioritizedPeer(Peer, Protocol):
    """A buffer whose ``sample`` is prioritized and which takes TD errors."""

    def keep(self, n: int, /) -> Any:
        """Draws a batch that later draws leave alone."""

    def update(self, batch: Any, td: Any, /) -> None:
        """Feeds TD errors back for a batch."""

    def td(self, n: int, seed: int) -> Any:
        """Returns random TD errors in the form the buffer's users have them."""


class SharedPeer(PrioritizedPeer, Protocol):
    """A prioritized buffer that processes forked later can write."""

    def writers(self) -> tuple[Callable[..., object], Callable[..., object]]:
        """Returns ``append`` and ``extend`` for the process that calls this."""


def fill_chunks(workload: Workload, capacity: int) -> Iterator[tuple[Rows, NDArray[np.float32]]]:
    """Yields rows and TD errors that add up to ``capacity``; the same random rows again and again."""
    chunk = int(max(1, min(capacity, FILL_CHUNK_BYTES // workload.row_bytes)))
    rows = workload.rows(chunk, seed=1)
    for start in range(0, capacity, chunk):
        n = min(chunk, capacity - start)
        yield {name: values[:n] for name, values in rows.items()}, td_errors(n, seed=start)
