"""What an explorer's function receives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchreplay.ray.board import WINDOW, Board

if TYPE_CHECKING:
    from torchreplay.buffer import ReplayBuffer
    from torchreplay.weights import SharedWeights
    from torchreplay.writer import Writer


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
        self._returns, self._lengths = self._entry["returns"], self._entry["lengths"]
        self._episodes, self._steps = int(self._entry["episodes"]), int(self._entry["steps"])
        self._closed_rows = int(self._entry["rows"])
        self._writers: list[Writer] = []

    def writer(self, **options: Any) -> Writer:
        """A writer of the buffer, closed when the explorer's function ends, however it ends.

        Args:
            **options: As for `ReplayBuffer.writer`.
        """
        writer = self.buffer.writer(**options)
        self._writers.append(writer)
        return writer

    @property
    def stopped(self) -> bool:
        """Whether to finish: the pool or the buffer was stopped. Costs two loads of shared memory."""
        return self._board.stopped or self.buffer.stopped

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

    def close(self) -> None:
        """Closes the writers that `writer` made."""
        while self._writers:
            self._writers.pop().close()

    def __repr__(self) -> str:
        return (
            f"ExplorerContext(explorer {self.index} of {self.num_explorers}, seed={self.seed}, "
            f"restarts={self.restarts}, episodes={self._episodes}, stopped={self.stopped})"
        )
