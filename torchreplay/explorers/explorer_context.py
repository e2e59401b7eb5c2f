"""What an explorer's function receives."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from torch import nn

from torchreplay.buffer.admitted_items import AdmittedItems
from torchreplay.buffer.writer import Autoreset, Writer
from torchreplay.explorers.named import Fillable, OneOrNamed, chosen, named_buffers, named_weights
from torchreplay.schema.config import extend_as, rows_extended
from torchreplay.validation import checked_int
from torchreplay.weights.shared_weights import SharedWeights
from torchreplay.workers.worker_table import WINDOW, WorkerTable

REPORT_EVERY: Final = 0.1
"""Seconds from one report of what the function has done to the next, while it looks at `stopped`."""
MOST_EXPLORERS: Final = 1 << 16
MOST_ROWS: Final = 1 << 62
MOST_STEPS: Final = 1 << 48
"""Of an episode: what thousands of them add up to still fits the table."""


class ExplorerContext:
    """Everything an explorer's function `explore(ctx)` needs to know and to use.

    An `ExplorerPool` makes one for each run of an explorer. To try a function without a pool, make
    one yourself: `explore(ExplorerContext(buffer))`.

    Args:
        buffer: The replay buffer to write to, or several by name.
        weights: The learner's weights to pull, or several by name, if the pool has any.
        index: This explorer, `0 <= index < num_explorers`.
        num_explorers: How many explorers run beside each other.
        seed: A seed of this run alone, `0 <= seed < 2**32`: no other explorer and no other run
            after a restart gets the same stream.
        restarts: How often this explorer has been restarted.
        max_weight_sync_delay: Rows for which `pull_weights` leaves a module as it is.
        table: The pool's shared memory; None makes a private one.

    Attributes:
        buffer: The replay buffer, attached in this process, or a dict of several.
        weights: The learner's weights, attached in this process, or a dict of several, or None.
        index: This explorer.
        num_explorers: How many explorers there are.
        seed: Seed of this run.
        restarts: How often this explorer has been restarted.
    """

    def __init__(
        self,
        buffer: OneOrNamed[Fillable],
        weights: OneOrNamed[SharedWeights] | None = None,
        index: int = 0,
        num_explorers: int = 1,
        seed: int = 0,
        restarts: int = 0,
        *,
        max_weight_sync_delay: int = 0,
        table: WorkerTable | None = None,
    ) -> None:
        self.buffer = buffer
        self.weights = weights
        self.num_explorers = checked_int("num_explorers", num_explorers, 1, MOST_EXPLORERS)
        self.index = checked_int("index", index, 0, num_explorers - 1)
        self.seed = seed
        self.restarts = restarts
        self._buffers, self._weights = named_buffers(buffer), named_weights(weights)
        self._table = table or WorkerTable(num_explorers)
        self._entry = self._table.entries[index]
        self._returns, self._lengths = self._entry["returns"], self._entry["lengths"]
        # Views of one cell are set in a third of the time that a field of an entry takes.
        self._reported_rows, self._reported_items, self._reported_version, self._reported_at = (
            self._table.entries[column][index : index + 1]
            for column in ("rows", "items", "weight_version", "heartbeat")
        )
        self._episodes, self._steps = int(self._entry["episodes"]), int(self._entry["steps"])
        # Of earlier runs, and of writers closed in this one.
        self._closed_rows, self._closed_items = int(self._entry["rows"]), int(self._entry["items"])
        self._extended_before = self._rows_extended()  # by those who had the buffers before
        self._writers: dict[Writer, str | None] = {}  # and the names of their buffers
        self._noticed_stop = False
        self._max_weight_sync_delay = checked_int("max_weight_sync_delay", max_weight_sync_delay, 0, MOST_ROWS)
        self._pulled: dict[str | None, tuple[nn.Module, int]] = {}  # into what, and how many rows there were
        self._report(time.monotonic())

    def writer(
        self,
        envs: Any = None,
        autoreset: Autoreset | None = None,
        *,
        num_envs: int | None = None,
        name: str | None = None,
    ) -> Writer:
        """A writer of the buffer, closed when the explorer's function ends, however it ends.

        Args:
            envs: The environment, or the vector environment, whose steps it writes, as for `ReplayBuffer.writer`.
            autoreset: What the vector environment does when an episode ends; None: what `envs` says.
            num_envs: Environments of the vector environment, where `envs` is not given.
            name: Of the buffer, where the pool has several.

        Raises:
            ValueError: There is no buffer of that name; or as for `ReplayBuffer.writer`.
        """
        for closed in [writer for writer in tuple(self._writers) if writer.closed]:
            self._closed_rows += closed.rows
            self._closed_items += closed._completed
            self._writers.pop(closed, None)
        writer = chosen("the pool's buffers", self._buffers, name).writer(envs, autoreset, num_envs=num_envs)
        self._writers[writer] = name
        writer.policy_version = self._version_for(name)
        return writer

    def admit(self, n: int = 1, timeout: float | None = None) -> AdmittedItems:
        """Begins items of the context's only writer that will be drawn in time: `writer.admit(n, timeout)`.

        Args:
            n: Items that the block writes at most. They are admitted together.
            timeout: Seconds to wait at most; None: what the writer's `timeout` says.

        Returns:
            A context manager, as `Writer.admit` does.

        Raises:
            RuntimeError: The context has made no writer, or several: call `admit` of one of them.
            ValueError: As for `Writer.admit`.
        """
        writers = [writer for writer in tuple(self._writers) if not writer.closed]
        if len(writers) != 1:
            raise RuntimeError(
                f"ctx.admit() is for an explorer with one writer, and this one has {len(writers)}: make one by "
                f"ctx.writer() first, or call writer.admit() of the one that is to write"
            )
        return writers[0].admit(n, timeout)

    def _version_for(self, name: str | None) -> int:
        """Returns the version of the rows of a buffer: that of the weights of its name, else the oldest one pulled."""
        own = self._weights.get(name)
        pulled = [weights.pulled_version for weights in ([own] if own is not None else self._weights.values())]
        return min((version for version in pulled if version >= 0), default=0)

    @property
    def rows(self) -> int:
        """Rows that this explorer has written, by its writers and by `ctx.buffer.extend`, over all its runs."""
        by_writers = sum(writer.rows for writer in tuple(self._writers))  # another thread may add one
        return self._closed_rows + by_writers + self._rows_extended() - self._extended_before

    @property
    def _items(self) -> int:
        """Rows with which an item was complete; of those that `extend` wrote all count."""
        by_writers = sum(writer._completed for writer in tuple(self._writers))
        return self._closed_items + by_writers + self._rows_extended() - self._extended_before

    def pull_weights(self, module: nn.Module, *, name: str | None = None) -> bool:
        """Copies the learner's newest weights into the module, in place, when it is time to.

        It is when they are newer than those it has, and this explorer has written `max_weight_sync_delay` rows (an
        argument of the pool) since the last copy. Else it costs an atomic read. The first call copies.

        Rows that are written from then on have that version, where the spec has a field `policy_version`: those of the
        context's writers and of `buffer.extend`. Of several buffers each has that of the weights of its own name; where
        there are none of that name, the oldest version pulled.

        Args:
            module: Built like the one given to `SharedWeights`.
            name: Of the weights, where the pool has several.

        Returns:
            Whether the module has new weights.

        Raises:
            RuntimeError: The pool was given no weights.
            ValueError: The module's weights differ in name, shape or dtype from those shared, or there are none of
                that name.
        """
        if not self._weights:
            raise RuntimeError("there are no weights to pull: give them to the pool, ExplorerPool(..., weights=...)")
        weights, delay = chosen("the pool's weights", self._weights, name), self._max_weight_sync_delay
        if delay:
            pulled_into, rows = self._pulled.get(name, (None, 0))
            if pulled_into is module and self.rows - rows < delay:
                return False
        if not weights.pull(module):
            return False
        for writer, buffer_name in tuple(self._writers.items()):
            writer.policy_version = self._version_for(buffer_name)
        for buffer_name, buffer in self._buffers.items():
            extend_as(buffer, self._version_for(buffer_name))
        if delay:
            self._pulled[name] = module, self.rows
        self._entry["weight_syncs"] += 1
        self._report(time.monotonic())
        return True

    @property
    def stopped(self) -> bool:
        """Whether to finish: the pool or the buffer was stopped. Costs half a microsecond, no call to Ray."""
        self._noticed_stop = self._is_stopped()
        now = time.monotonic()
        if now - self._reported >= REPORT_EVERY or self._noticed_stop:
            self._report(now)
        return self._noticed_stop

    @property
    def noticed_stop(self) -> bool:
        """Whether the function has seen `stopped`: then it gets the time to finish."""
        return self._noticed_stop

    def record(self, *, episode_return: Any, episode_length: Any) -> None:
        """Reports finished episodes to the pool's statistics; costs two microseconds, never waits.

        Args:
            episode_return: Sum of the episode's rewards; an array or list `[n]` of n episodes, as vector environments
                end them.
            episode_length: Its number of steps, or an array or list `[n]`.

        Raises:
            ValueError: There are more returns than lengths, or fewer, one is no number, or a length is out of range;
                nothing is recorded.
        """
        if isinstance(episode_return, list | tuple):
            episode_return, episode_length = np.asarray(episode_return), np.asarray(episode_length)
        if not getattr(episode_return, "ndim", 0) and not getattr(episode_length, "ndim", 0):
            self._record(*_checked(episode_return, episode_length))
        else:
            shape, lengths = tuple(np.shape(episode_return)), tuple(np.shape(episode_length))
            if shape != lengths or len(shape) > 1:
                raise ValueError(
                    f"episode_return has shape {shape} and episode_length {lengths}: expected a number and a number, "
                    "or [n] and [n]"
                )
            for episode in list(map(_checked, episode_return, episode_length)):
                self._record(*episode)
        self._report(time.monotonic())

    def _record(self, result: float, length: int) -> None:
        place = self._episodes % WINDOW
        self._lengths[place] = length
        self._returns[place] = result
        self._episodes += 1
        self._steps += length
        self._entry["steps"] = self._steps
        # Last: a reader of this count finds the episode's return written.
        self._entry["episodes"] = self._episodes

    def close(self) -> None:
        """Closes the writers that `writer` made."""
        with ExitStack() as closing:  # each, also when another fails
            closing.callback(lambda: self._report(time.monotonic()))
            for writer in tuple(self._writers):
                closing.callback(writer.close)

    def keep_alive(self) -> None:
        """Reports that the explorer waits, and does not hang: called whenever a wait of its looks around."""
        now = time.monotonic()
        if now - self._reported >= REPORT_EVERY:
            self._report(now)

    def _rows_extended(self) -> int:
        return sum(rows_extended(buffer) for buffer in self._buffers.values())

    def _is_stopped(self) -> bool:
        if self._table.stopped:
            return True
        for buffer in self._buffers.values():  # noqa: SIM110  # any() takes as long again
            if buffer.stopped:
                return True
        return False

    def _report(self, now: float) -> None:
        self._reported_rows[0], self._reported_items[0] = self.rows, self._items
        self._reported_version[0] = min([w.pulled_version for w in self._weights.values()], default=-1)
        self._reported_at[0] = self._reported = now

    def __repr__(self) -> str:
        return (
            f"ExplorerContext(explorer {self.index} of {self.num_explorers}, seed={self.seed}, "
            f"restarts={self.restarts}, episodes={self._episodes}, stopped={self._is_stopped()})"
        )


def _checked(episode_return: Any, episode_length: Any) -> tuple[float, int]:
    try:
        result, length = float(episode_return), int(episode_length)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"an episode of return {episode_return!r:.100} and length {episode_length!r:.100}: expected numbers, "
            "or an array of each"
        ) from error
    return result, checked_int("episode_length", length, 0, MOST_STEPS)
