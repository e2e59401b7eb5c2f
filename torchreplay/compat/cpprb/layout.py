"""What a layout is: how transitions, as cpprb has them, lie in the rows of a buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torchreplay as tr
from torchreplay.compat.cpprb.columns import Column

TERMINATED, TRUNCATED = "end terminated", "end truncated"
"""Fields of the flags that linked rows need, named as no column is."""

SPARE_ROWS = 4096
"""Rows beyond those of the transitions, at least where there are as many: each episode takes some."""


ORDINAL = "ordinal of the transition"
"""Field of what cpprb's indexes are made of, where transitions and rows are not one to one."""


@dataclass(slots=True)
class Tally:
    """How many transitions this process has added since it last cleared the buffer.

    Attributes:
        begun: All of them.
        complete: Those that can be drawn, or could.
    """

    begun: int = 0
    complete: int = 0


class Stream(ABC):
    """Writes the transitions of one thread of one process."""

    @abstractmethod
    def add(self, values: Mapping[str, Any], priorities: NDArray[Any] | None) -> tuple[int | None, int]:
        """Writes transitions.

        Args:
            values: By column, for one transition or several.
            priorities: float32 `[n]`, checked; None: the largest so far.

        Returns:
            What the index of the first transition is made of that can be drawn now and could not before: its key where
            rows are transitions, else its ordinal; None where there is none. And how many were written.

        Raises:
            KeyError: A column is missing.
            ValueError: Columns have different numbers of rows; nothing is written.
        """

    def add_finished(self, values: Mapping[str, Any]) -> None:
        """Writes transitions whose rewards are sums already; the episode under way ends before."""
        self.end_episode()
        self.add(values, None)
        self.end_episode()

    @abstractmethod
    def end_episode(self) -> None:
        """Ends the episode under way, without another transition."""


class Layout(ABC):
    """How transitions lie in rows.

    Attributes:
        columns: What is drawn.
    """

    columns: Sequence[Column]

    @abstractmethod
    def spec(self) -> dict[str, tr.Field]:
        """Returns the fields of a row."""

    @abstractmethod
    def view(self) -> Any:
        """Returns how rows become items."""

    @abstractmethod
    def rows(self, size: int) -> int:
        """Returns how many rows hold `size` transitions."""

    @abstractmethod
    def read(self, batch: tr.ReplayBatch) -> dict[str, NDArray[Any]]:
        """Returns the transitions of a batch, by column."""

    @abstractmethod
    def ordinals(self, batch: tr.ReplayBatch) -> NDArray[np.int64]:
        """Returns what the indexes of a batch's transitions are made of: keys where rows are transitions."""

    @abstractmethod
    def stream(self, buffer: tr.ReplayBuffer, tally: Tally) -> Stream:
        """Returns what writes to `buffer` from one thread, and counts in `tally`."""


def rows_with_spare(size: int, rows_of_an_episode: int) -> int:
    """Returns how many rows hold `size` transitions in episodes that each take some rows more.

    Up to 4,096 transitions fit in episodes of any length. Of more, a sixteenth may begin an episode.
    """
    return size + rows_of_an_episode * max(min(size, SPARE_ROWS), size // 16)
