"""`WritableReplay`: what an explorer needs of a buffer. `Replay`: what a learner needs of one that it draws from."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
import torch

from torchreplay.buffer.last_items import LastItems
from torchreplay.buffer.notices import warn_of_budget
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config, Configured
from torchreplay.schema.samplers import Schedule
from torchreplay.schema.spec import ragged_fields
from torchreplay.segment.closeable import Closeable
from torchreplay.validation import checked_instance, checked_int

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from torchreplay.buffer.groups import Groups
    from torchreplay.buffer.stats import Stats
    from torchreplay.buffer.writer import Autoreset, Writer
    from torchreplay.cuda.staging import Staging
    from torchreplay.schema.limiters import Limiter
    from torchreplay.segment.waits import Wait


Pin = Literal["staging", "ring", "off"]
PINS: tuple[Pin, ...] = get_args(Pin)

MAX_BATCH = 1 << 24
"""Items in a batch, at most."""

MAX_ELEMENTS = (1 << 63) - 1
"""Elements that a budget allows, at most."""


class Batches(Protocol):
    """Batches one after the other, some of them drawn ahead. For one thread, which must close it."""

    def __iter__(self) -> Iterator[ReplayBatch]:
        """Returns itself."""

    def __next__(self) -> ReplayBatch:
        """Returns the next batch, waiting for it as `sample` does."""

    def drawn(self) -> list[dict[str, Any]]:
        """Returns what names the batches that are drawn and were not handed out, as far as they can be named."""

    @property
    def drawn_from(self) -> TreeSummary:
        """What the weights of the batch handed out last were computed from."""

    @property
    def ready(self) -> int:
        """How many batches are drawn, in memory of the staging, and not handed out."""

    @property
    def answered(self) -> int:
        """How many of the next batches come without a wait for draws or for other machines."""

    def close(self) -> None:
        """Ends it. What was drawn and is not handed out has not been drawn."""


class EpochsOver(StopIteration):
    """A draw was bounded to epochs that are over: so is the iteration that it is of."""


class QueueOver(StopIteration):
    """All items of a queue are drawn, and no writer is left: so the iteration is over."""


@dataclass(frozen=True, eq=False)
class StreamSpec:
    """Which batches a stream hands out, and how it draws them.

    Attributes:
        batch_size: Items in a batch.
        count: Batches; None for endlessly many.
        prefetch: Batches drawn ahead of the one asked for; 0: each is drawn when it is asked for.
        timeout: Seconds to wait for each at most, as in `sample`.
        waiting: How the wait for the first one looks.
        drawn: What `drawn()` of an earlier stream returned. These batches come first, and each leaves the queue then.
            Those whose rows are gone are left out. Empty for a `ShardedReplay`.
        staging: What gives each batch its place, and finishes it; None: memory of its own.
        last_epoch: The number of the epoch with which it ends, of draws without replacement. Then the last batch of
            each epoch may be shorter, and there is no staging. None: it does not end so.
        for_others: Batches of a queue that another process will hold: this one never ends what it holds.
        budget: The most elements that a batch may have of some ragged fields, by name; None: any number.
        groups: Of a queue: the groups of each batch; None: batches of single items.

    Raises:
        ValueError: `batch_size` is out of range.
    """

    batch_size: int
    count: int | None
    prefetch: int
    timeout: float | None
    waiting: type[Wait]
    drawn: deque[dict[str, Any]] = field(default_factory=deque)
    staging: Staging | None = None
    last_epoch: int | None = None
    for_others: bool = False
    budget: Mapping[str, int] | None = None
    groups: Groups | None = None

    def __post_init__(self) -> None:
        checked_int("batch_size", self.batch_size, 1, MAX_BATCH)

    def place(self) -> ReplayBatch | None:
        """Returns where the next batch goes; None: into memory of its own."""
        return None if self.staging is None else self.staging.place()


class BatchSource(LastItems, ABC):
    """What a `Replay` draws with: what datasets use, and users do not see.

    Attributes:
        config: What the replay was made of.
        nonce: Its identity, by which batches name it.
    """

    config: Config
    nonce: int

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of the draws, which a replay that is restored from a checkpoint has too."""

    @abstractmethod
    def unissued(self, keys: NDArray[np.int64]) -> int | None:
        """Returns the index of the first of `keys` that it never issued; raises RuntimeError if it is closed."""

    def checked_budget(self, budget: Any) -> dict[str, int]:
        """Returns the most elements that a batch may have of ragged fields, by name.

        Raises:
            ValueError: It names no ragged field of a batch, or a number is below 1.
            TypeError: It is no dict.
        """
        checked_instance("budget", budget, Mapping, 'a dict of the most elements, such as {"tokens": 65_536}')
        names = ragged_fields(self.config.outputs())
        for name in budget:
            if name not in names:
                known = (
                    f"expected some of {', '.join(map(repr, names))}" if names else "the batch has none; leave it out"
                )
                raise ValueError(f"budget names {name!r:.200}, which is no ragged field of a batch: {known}")
        return {name: checked_int(f"budget[{name!r}]", most, 1, MAX_ELEMENTS) for name, most in budget.items()}

    def warn_of_budget(self, budget: Mapping[str, int], batch: ReplayBatch) -> None:
        """Warns where a batch is one item, which has more elements than the budget says."""
        if batch.batch_size == 1:
            for name, most in budget.items():
                found = int(batch.lengths(name).sum())
                if found > most:
                    warn_of_budget(self.nonce, self.config.called, name, found, most)

    def epoch(self, begin: bool = False) -> tuple[int, int, int]:
        """Returns how many epochs have ended, the items that the one under way has not drawn, and all items.

        With `begin`, another epoch has begun where nothing was left to draw of one.
        """
        raise RuntimeError("shards keep no epochs")

    def give_back(self, *drawn: dict[str, Any]) -> None:  # nothing to do where draws are with replacement
        """Says that nobody got these items, as far as the epoch under way has drawn them.

        Args:
            *drawn: Batches, or what names those that a state says were drawn ahead.
        """

    @property
    def drawn_here(self) -> str | None:
        """What names this memory in this process, where draws take items: of an epoch, or for good; else None.

        What a process has drawn ahead is handed out or goes back, as long as it lives.
        """
        return None

    def with_draws(self, drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Adds `draws`, how often each item was drawn, to what names batches drawn ahead, where that is counted."""
        return drawn

    def held(self) -> dict[str, Any] | None:
        """Returns what names the items of a queue that this process was handed and is not done with; None: it is none.

        Returns:
            `queue`, its identity; `key` int64 `[n]`; `draws` int64 `[n]`, how often each was done before.
        """
        return None

    def end_held(self, held: Iterable[dict[str, Any]]) -> None:  # shards are no queue
        """Says that a learner is done with all that `held` has returned, in any process, as far as that is not."""

    def go_on_from(self, held: Iterable[dict[str, Any]]) -> None:
        """Does that for a learner that goes back to where it was then.

        With `Fifo(commit="manual")` what this process was handed since comes again.
        """
        self.end_held(held)

    @abstractmethod
    def batches(self, spec: StreamSpec) -> Batches:
        """Returns a stream of batches, as a `ReplayDataset` hands them out."""

    @abstractmethod
    def staging(
        self,
        batch_size: int,
        prefetch: int,
        device: torch.device,
        pin: Pin | None,
        budget: Mapping[str, int] | None = None,
    ) -> Staging | None:
        """Returns what takes batches to a CUDA device while the learner computes; None: each is copied by itself.

        Args:
            batch_size: Items in a batch.
            prefetch: Batches drawn ahead of the one asked for.
            device: Where they go.
            pin: What is page-locked, as for a `ReplayDataset`.
            budget: The most elements that a batch may have of some ragged fields, by name; None: any number.
        """


class WritableReplay(Configured, Closeable, ABC):
    """What explorers write to: a `Replay`, or what stands for the buffer of another node."""

    @abstractmethod
    def writer(self, envs: Any = None, autoreset: Autoreset | None = None, *, num_envs: int | None = None) -> Writer:
        """Returns a writer for the calling thread's rows: one for each explorer thread."""

    @abstractmethod
    def extend(self, /, *args: Any, priority: Any = None, **fields: Any) -> torch.Tensor | None:
        """Writes n rows or episodes; returns their keys, where they are known."""

    @abstractmethod
    def stats(self) -> Stats:
        """Returns what has happened so far, over all processes."""

    @abstractmethod
    def stop(self) -> None:
        """Stops the buffer: `stopped` is True in every process, and waiting calls raise `Stopped`."""

    @abstractmethod
    def close(self) -> None:
        """Detaches this object. Idempotent."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows held."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Rows that fit."""

    @property
    @abstractmethod
    def limiter(self) -> Limiter:
        """Who must wait."""

    @property
    @abstractmethod
    def stopped(self) -> bool:
        """Whether `stop()` was called, in any process."""


class Replay(WritableReplay):
    """What learners draw from and feed back to: a `ReplayBuffer`, or the shards of several machines."""

    _sampler: BatchSource

    @abstractmethod
    def expect_writers(self) -> Closeable:
        """Announces that writers will come, or come back: `sample` then waits for them instead of giving up."""

    @abstractmethod
    def sample(
        self,
        batch_size: int,
        beta: Schedule | None = None,
        timeout: float | None = None,
        *,
        device: torch.device | str | int | None = None,
    ) -> ReplayBatch:
        """Draws a batch, stratified and with replacement; waits until the limiter admits it."""

    @abstractmethod
    def update_priorities(self, batch_or_keys: ReplayBatch | Any, td: Any) -> None:
        """Feeds TD errors back to exactly the items they were computed from."""

    @abstractmethod
    def flush(self) -> None:
        """Waits for the TD errors that are on their way, and sees them applied."""

    @abstractmethod
    def rewrite(self, keys: ReplayBatch | Any, /, **fields: Any) -> int:
        """Sets fields of rows that are there; returns how many rows."""

    @abstractmethod
    def rows_of(self, batch_or_keys: ReplayBatch | Any) -> torch.Tensor:
        """Returns the keys of the rows that items consist of."""

    @abstractmethod
    def discard(self, batch_or_keys: ReplayBatch | Any) -> int:
        """Takes items out of all draws to come; returns how many."""

    @abstractmethod
    def discard_episode(self, key: int) -> int:
        """Takes the items of a whole episode out of all draws to come; returns of how many rows."""

    @abstractmethod
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Saves it while others go on writing and drawing."""

    @abstractmethod
    def restore(self, directory: str | os.PathLike[str]) -> None:
        """Fills one that was never written to with what `save` wrote."""

    @abstractmethod
    def histograms(self, bins: int = 64) -> dict[str, torch.Tensor]:
        """Returns histograms of raw priorities and of rows' ages. O(capacity)."""

    @property
    @abstractmethod
    def draws(self) -> int:
        """Batches that this object has drawn: the position in its own stream of draws. Set it to resume."""

    @draws.setter
    @abstractmethod
    def draws(self, step: int) -> None: ...

    @property
    @abstractmethod
    def stream(self) -> int:
        """The number of the stream of draws of this process. Set it to resume."""

    @stream.setter
    @abstractmethod
    def stream(self, number: int) -> None: ...


def source_of(replay: Replay) -> BatchSource:
    """Returns what `replay` draws with. For the other rooms of this package."""
    return replay._sampler
