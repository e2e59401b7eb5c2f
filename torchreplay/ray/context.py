"""What an explorer's function receives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchreplay.ray.board import WINDOW, Board

_LOOKS_PER_REPORT: Final = 64
"""Looks at `stopped`, once a step in most functions, from one count of the rows written to the next."""

if TYPE_CHECKING:
    from torchreplay.buffer import ReplayBuffer
    from torchreplay.weights import SharedWeights
    from torchreplay.writer import Autoreset, Writer


class ExplorerContext:
    """Everything an explorer's function `explore(ctx)` needs to know and to use.

    An `ExplorerPool` makes one for each run of an explorer. To try a function without Ray, make
    one yourself: `explore(ExplorerContext(buffer))`.

    Args:
        buffer: The replay buffer to write to.
        weights: The learner's weights to pull, if the pool has any.
        index: This explorer, `0 <= index < num_explorers`.
        num_explorers: How many explorers run beside each other.
        seed: A seed of this run alone, `0 <= seed < 2**32`: no other explorer and no other run
            after a restart gets the same stream.
        restarts: How often this explorer has been restarted.
        board: The pool's shared memory; None makes a private one.

    Attributes:
        buffer: The replay buffer, attached in this process.
        weights: The learner's weights, attached in this process, or None.
        index: This explorer.
        num_explorers: How many explorers there are.
        seed: Seed of this run.
        restarts: How often this explorer has been restarted.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        weights: SharedWeights | None = None,
        index: int = 0,
        num_explorers: int = 1,
        seed: int = 0,
        restarts: int = 0,
        board: Board | None = None,
    ) -> None:
        self.buffer = buffer
        self.weights = weights
        self.index = index
        self.num_explorers = num_explorers
        self.seed = seed
        self.restarts = restarts
        self._board = board or Board(num_explorers)
        self._entry = self._board.entries[index]
        self._rows = self._board.entries["rows"][index : index + 1]
        self._returns, self._lengths = self._entry["returns"], self._entry["lengths"]
        self._episodes, self._steps = int(self._entry["episodes"]), int(self._entry["steps"])
        self._closed_rows = int(self._entry["rows"])  # of earlier runs, and of writers closed in this one
        self._writers: set[Writer] = set()
        self._noticed_stop = False
        self._looks = 0

    def writer(self, lanes: int | None = None, autoreset: Autoreset = "next_step") -> Writer:
        """A writer of the buffer, closed when the explorer's function ends, however it ends.

        Args:
            lanes: Environments of a vector environment, as for `ReplayBuffer.writer`.
            autoreset: What the vector environment does when an episode ends.
        """
        for closed in [writer for writer in self._writers if writer.closed]:
            self._closed_rows += closed.rows
            self._writers.discard(closed)
        writer = self.buffer.writer(lanes, autoreset)
        self._writers.add(writer)
        return writer

    @property
    def stopped(self) -> bool:
        """Whether to finish: the pool or the buffer was stopped. Costs half a microsecond, no call to Ray."""
        self._noticed_stop = self._board.stopped or self.buffer.stopped
        self._looks += 1
        if self._looks % _LOOKS_PER_REPORT == 0 or self._noticed_stop:
            self._publish_rows()
        return self._noticed_stop

    @property
    def noticed_stop(self) -> bool:
        """Whether `stopped` has told the function to finish: then it gets the time to do so."""
        return self._noticed_stop

    def record(self, *, episode_return: float, episode_length: int) -> None:
        """Reports a finished episode to the pool's statistics; costs about a microsecond, never waits.

        Args:
            episode_return: Sum of the episode's rewards.
            episode_length: Its number of steps.
        """
        place = self._episodes % WINDOW
        self._returns[place] = episode_return
        self._lengths[place] = episode_length
        self._episodes += 1
        self._steps += int(episode_length)
        self._entry["steps"] = self._steps
        # Last: who reads this count finds the episode's return in its place.
        self._entry["episodes"] = self._episodes
        self._publish_rows()

    def close(self) -> None:
        """Closes the writers that `writer` made."""
        for writer in self._writers:
            writer.close()
        self._publish_rows()

    def _publish_rows(self) -> None:
        self._rows[0] = self._closed_rows + sum(writer.rows for writer in self._writers)

    def __repr__(self) -> str:
        stopped = self._board.stopped or self.buffer.stopped
        return (
            f"ExplorerContext(explorer {self.index} of {self.num_explorers}, seed={self.seed}, "
            f"restarts={self.restarts}, episodes={self._episodes}, stopped={stopped})"
        )
