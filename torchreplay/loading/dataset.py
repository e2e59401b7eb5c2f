"""`ReplayDataset`: a replay buffer as a stream of ready batches for `DataLoader`, Lightning or a plain loop."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from torchreplay.buffer.base import MAX_BATCH, Batches, Pin, Replay, StreamSpec, source_of
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.cuda.staging import Staging
from torchreplay.errors import ReplayLost, Stopped
from torchreplay.loading.destination import refuse_worker, require_device, require_pin
from torchreplay.loading.saved_place import SavedPlace
from torchreplay.loading.stepped_dataset import SteppedDataset
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import Fifo, counts_draws, keeps_epochs
from torchreplay.segment.waits import ShownWait, Wait
from torchreplay.validation import checked_int, checked_timeout


@dataclass(slots=True, repr=False, eq=False)
class Iteration:
    """Where one process stands in a dataset.

    Attributes:
        position: Batches that the iteration that advanced last has handed out.
        resume_at: Where the next iteration starts, set by `load_state_dict` alone.
        drawn: What that one hands out first, set likewise.
        last_epoch: Of the iteration that advanced last, where its dataset has `epochs`; None: it has come to its end.
        epochs_left: After the epoch under way, of the next iteration; set by `load_state_dict` alone.
        length: Batches of the iteration under way, likewise.
        stream: Of the iteration that advanced last; it belongs to its process.
        process: Whose this is.
    """

    position: int = 0
    resume_at: int = 0
    drawn: deque[dict[str, Any]] = field(default_factory=deque)
    last_epoch: int | None = None
    epochs_left: int | None = None
    length: int | None = None
    stream: Batches | None = None
    process: int = field(default_factory=os.getpid)


class ReplayDataset(SteppedDataset[ReplayBatch]):
    """Batches drawn from a buffer, infinite, `steps` or `epochs` long.

    Each element is a whole `ReplayBatch`, so a `DataLoader` around it takes `batch_size=None`.

    - A native thread draws `prefetch` batches ahead and never holds the interpreter lock, so that a learner whose step
      takes longer than a draw does not wait. A batch misses the TD errors that are fed back between its draw and its
      handing out; `stats().staleness` says how many.
    - The same seed and the same calls give the same batches. Feedback and rows of the iterating thread come after the
      batches ordered before, unless such rows had to wait 0.2 s for a draw. Rows of others come when they come. TD
      errors that it feeds back in steps of 0.2 ms or more are applied by the native thread. The next call of the buffer
      finds them applied.
    - A new iteration continues the buffer's stream of draws; it does not start the same draws again. What an iteration
      has drawn ahead when it ends has not been drawn.
    - In `DataLoader` workers, under every start method, each worker draws from its own stream, and the workers
      share `steps` between them. Workers move every tensor through a descriptor (about 2 ms for a batch of seven
      fields). Drawing is native and needs no workers. So leave `num_workers` at 0 unless you transform the batch in
      Python. A queue takes a `QueueLoader` in place of the `DataLoader`.
    - torchdata's `StatefulDataLoader` takes its state along, with and without workers.
    - After `buffer.stop()` an iteration ends as any other iteration does, without an error.
    - No global random state is read or written.
    - With `device="cuda"` the next batch is copied to the device while the learner computes, by one transfer on a
      stream of its own. The host does not wait. `docs/performance.md` says how, and what to measure.

    Args:
        buffer: The buffer to draw from.
        batch_size: Items in a batch.
        steps: Batches in one iteration; None for an endless one.
        prefetch: Batches drawn ahead of the one asked for. 0: each is drawn when it is asked for, and knows all TD
            errors fed back before.
        device: Where the batch's tensors go (all but `batch["key"]`); None leaves them on the CPU. A batch on a CUDA
            device may be used on the stream that was current when it was handed out. With it, leave `num_workers` at 0.
        timeout: Seconds that one draw may wait for data before it raises `ReplayTimeout`; None waits for as long
            as a writer is alive.
        pin: How batches reach a CUDA device. `"staging"` (the default there): they are drawn into page-locked memory,
            at most `prefetch + 4` slots of a batch's size. Values of any length have memory of their own in each slot,
            which grows to the largest batch so far. `"ring"`: likewise, and the buffer's whole memory is
            page-locked until it is closed, so that copies from `buffer.storage` are fast too. `"off"`: they are copied
            one tensor at a time from pageable memory. Where memory cannot be page-locked, a warning says so, and the
            copies are slower.
        epochs: Instead of `steps`, and for a buffer with `Uniform(replacement=False)`: how often an iteration goes
            through the items. It begins with what is left of the epoch under way, if anything is. Each epoch's last
            batch may be shorter. Items that come belong to the epoch under way; `len` is that of the items so far.
            Several learners share the epochs, so that each gets a part. Such batches are not staged, and workers of a
            `DataLoader` refuse them.
        budget: Of ragged fields: the most elements that a batch may have, such as `{"tokens": 65_536}`, as for
            `ReplayBuffer.sample`. Batches then have `batch_size` items or fewer.

    Raises:
        ValueError: If an argument is of the wrong kind or out of range, there is no such CUDA device, `epochs` does not
            go with the sampler, `steps` or `pin`, or `budget` names no ragged field.
        TypeError: If `timeout` is neither a number nor a text, which is a ValueError.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100, sampler=tr.Prioritized())
        >>> keys = buffer.extend(obs=torch.zeros(50, 3))
        >>> dataset = tr.ReplayDataset(buffer, batch_size=32, steps=10)
        >>> for batch in DataLoader(dataset, batch_size=None):  # each element is a whole batch
        ...     buffer.update_priorities(batch, torch.ones(32))
    """

    _for_others = False
    """Whether another process takes over the batches of a queue."""

    def __init__(
        self,
        buffer: Replay,
        batch_size: int = 256,
        steps: int | None = None,
        prefetch: int = 2,
        device: torch.device | str | int | None = None,
        timeout: float | None = None,
        pin: Pin | None = None,
        *,
        epochs: int | None = None,
        budget: Mapping[str, int] | None = None,
    ) -> None:
        if not isinstance(buffer, Replay):
            raise ValueError(f"buffer is {type(buffer).__name__}; ReplayDataset needs a ReplayBuffer to draw from")
        self.buffer = buffer
        self.batch_size = checked_int("batch_size", batch_size, 1, MAX_BATCH)
        self.steps = None if steps is None else checked_int("steps", steps, 1)
        self.prefetch = checked_int("prefetch", prefetch, 0)
        self.device = None if device is None else require_device(device)
        self.timeout = checked_timeout(timeout)
        self.pin = require_pin(pin, self.device)
        self.epochs = None if epochs is None else checked_int("epochs", epochs, 1)
        if epochs is not None:
            self._require_epochs(pin)
        self.budget = None if budget is None else source_of(buffer).checked_budget(budget)
        self._iteration = Iteration()

    def _require_epochs(self, pin: Pin | None) -> None:
        if not keeps_epochs(self.buffer.sampler):
            raise ValueError(
                f"epochs is {self.epochs}, and the buffer's sampler is {self.buffer.sampler}, which knows no epochs; "
                f"give the buffer sampler=tr.Uniform(replacement=False), or steps=... here"
            )
        if self.steps is not None:
            raise ValueError(f"steps is {self.steps} and epochs is {self.epochs}; give one of the two")
        if pin not in (None, "off"):
            raise ValueError(f"pin is {pin!r}: batches of epochs may be shorter, and are not staged; leave pin out")

    def __len__(self) -> int:
        """Returns how many batches an iteration has: the one under way, or else the next.

        With `epochs` it counts the items that were there when the iteration began.

        Raises:
            TypeError: If the stream is endless; this is how loaders learn that there is no length. Or it has
                `epochs` and a `budget`: then the lengths of the values decide.
        """
        if self.epochs is None:
            return super().__len__()
        if self.budget is not None:
            raise TypeError(
                "the dataset has epochs and a budget: how many batches it has, the lengths of values decide"
            )
        here = self._here()
        if here.length is None:
            return here.resume_at + len(here.drawn) + self._next_epochs(begin=False)[1]
        return here.length

    def _next_epochs(self, begin: bool) -> tuple[int, int]:
        """Returns the number of the epoch with which the next iteration ends, and the batches that it draws.

        With `begin` that iteration begins now: where nothing is left of one epoch, with another.
        """
        assert self.epochs is not None
        left, size = self._here().epochs_left, self.batch_size
        ended, due, items = source_of(self.buffer).epoch(begin and left is None)
        if left is None:
            left, due = self.epochs - 1, due or items
        return ended + left, -(-due // size) + left * -(-items // size)

    def __iter__(self) -> Iterator[ReplayBatch]:
        """Hands out batch after batch.

        A long wait for the first one is shown: as a live line on a terminal, by a log line every ten seconds elsewhere.

        Yields:
            `ReplayBatch` of `batch_size` items, on `device`.

        Raises:
            ReplayTimeout: If a draw waits longer than `timeout`.
            WouldBlockForever: If a draw waits for data that nobody can write any more.
            ReplayLost: If a `ShardedReplay` is gone, and was not stopped.
            RuntimeError: In a worker of a `DataLoader`, with a CUDA device, of a queue, or with `max_draws`.
        """
        self._begin()
        return self._batches()

    def _batches(self) -> Iterator[ReplayBatch]:
        staging = self._make_staging()
        share = self._share_of_this_worker()
        here = self._here()
        if self.epochs is not None:
            here.last_epoch, drawn = self._next_epochs(begin=True)
            here.length = here.resume_at + len(here.drawn) + drawn
        last_epoch = here.last_epoch
        position, here.resume_at, here.epochs_left = here.resume_at, 0, None
        worker = get_worker_info()
        waiting: type[Wait] = ShownWait if worker is None or worker.id == 0 else Wait  # one line for all workers
        left = None if share is None else share - position
        spec = StreamSpec(
            self.batch_size,
            left,
            self.prefetch,
            self.timeout,
            waiting,
            here.drawn,
            staging,
            last_epoch,
            self._for_others,
            self.budget,
        )
        stream = source_of(self.buffer).batches(self._spec(spec))
        stays = staging is None and self.device is None and self.budget is None
        try:
            for batch in stream:
                position += 1
                here = self._here()
                here.position, here.stream, here.last_epoch = position, stream, last_epoch
                yield (
                    batch if stays else self._on_device(batch, staging, stream)
                )  # which nobody holds here while its user does
            if self.epochs is not None:
                here = self._here()
                here.position, here.last_epoch = 0, None
        except ReplayLost:  # nobody said that it is enough
            raise
        except Stopped:
            return
        finally:
            stream.close()
            self._here().length = None

    def _spec(self, spec: StreamSpec) -> StreamSpec:
        """Returns which batches those of this dataset are."""
        return spec

    @property
    def ready(self) -> int:
        """How many of the next batches this process has drawn: none when the learner is about to wait for one.

        Of a `ShardedReplay` of several nodes: how many a thread has made ahead. For a learner that comes back within
        half a millisecond it makes none.

        Example:
            >>> batches = iter(dataset)
            >>> batch = next(batches)
            >>> 0 <= dataset.ready <= dataset.prefetch
            True
        """
        stream = self._here().stream
        return 0 if stream is None else stream.answered

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream.

        The state holds no experience; the buffer keeps that. A batch that a loader has already pulled ahead counts as
        handed out; one that was copied to a device ahead does not. TD errors on their way from a device are applied
        first, as they are in what `buffer.save` writes.

        Returns:
            `draws`: batches made from the buffer and handed out. `position`: the place in the iteration. `drawn`: the
            batches drawn ahead. Each of them has the `step` of its draw, `key` int64 `[B]`, `weight` and `probability`
            float32 `[B]`. Its `drawn_from` says what the weights were computed from. In a worker of a `DataLoader`
            there is also `stream`, the number of the stream that it draws from. With `epochs` there is `epochs_left`:
            how many the iteration has still to begin; None when there is none under way. Of a queue there is `held`:
            the items that this process was handed, in all its loops, and that are not done. Its `key`, `draws` (how
            often each was done before) and `queue` (its identity) name them. With `max_draws` each batch in `drawn` has
            `draws`, how often its items were drawn. Then, and without replacement, `drawn_by` names the process and
            its buffer.

        Raises:
            ValueError: TD errors from a device are NaN or infinite, as `buffer.flush` says.

        Example:
            >>> batches = iter(dataset)
            >>> batch = next(batches)
            >>> dataset.state_dict()["position"]
            1
        """
        self.buffer.flush()
        return self._place_in_stream()

    def _place_in_stream(self) -> dict[str, Any]:
        # Workers get streams in the order in which they start; other processes keep to their own.
        stream = {} if get_worker_info() is None else {"stream": self.buffer.stream}
        here = self._here()
        position, again = here.position, list(here.drawn)
        source = source_of(self.buffer)
        ahead = [] if here.stream is None else source.with_draws(here.stream.drawn())
        if self.steps is not None:
            position %= self.steps
        if self._loop is not None and self._loop.is_over:  # as the next iteration, the one that resumes draws anew
            position, ahead = 0, []
        left: dict[str, Any] = {}
        if self.epochs is not None:
            left["epochs_left"] = self._epochs_left()
        held = source.held()
        if held is not None:
            left["held"] = held
        if source.drawn_here is not None:
            left["drawn_by"] = source.drawn_here
        return {"draws": self.buffer.draws - len(again), "position": position, "drawn": again + ahead} | left | stream

    def _epochs_left(self) -> int | None:
        """Returns how many epochs the iteration under way has still to begin; None: there is none under way."""
        here = self._here()
        if here.epochs_left is not None or here.last_epoch is None:
            return here.epochs_left
        left = here.last_epoch - source_of(self.buffer).epoch()[0]
        return max(left, 0)  # other learners may have gone on

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken: the next iteration hands out what was left of that one.

        With the buffer as it was then (`ReplayBuffer.load`), the batches are those that would have come. Batches drawn
        ahead whose rows the buffer does not hold are left out, and those of another size than `batch_size`. With
        `prefetch=0` nothing is drawn ahead.

        Where items leave after so many draws (`max_draws`), no item comes more often; without replacement none comes
        twice in an epoch. Over the same memory in the same process nothing comes again: what was drawn ahead is drawn
        anew, unless a loop got it since.

        Of a queue, what was held when the state was taken is done: the state goes with a model that has learnt from it.
        With `Fifo(commit="manual")` all else that was not committed comes again, in order.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If it is not such a state.

        Example:
            >>> first = next(iter(dataset))
            >>> resumed = tr.ReplayDataset(buffer, batch_size=32, steps=10)  # over a restored buffer, usually
            >>> resumed.load_state_dict(dataset.state_dict())
            >>> len(list(resumed))
            9
        """
        saved = SavedPlace.of(state_dict, self.epochs is not None)
        self.end()  # or its draws ahead would block the next ones
        source, ahead = source_of(self.buffer), saved.drawn
        if source.drawn_here is not None:
            source.give_back(*self._here().drawn)
            if saved.drawn_by == source.drawn_here:
                ahead = []  # nobody got it, and it is back or will be; or somebody did since
        drawn = deque(batch for batch in ahead if self._is_size(len(batch["key"])))
        source.give_back(*(batch for batch in ahead if not self._is_size(len(batch["key"]))))
        if saved.stream is not None and get_worker_info() is not None:
            self.buffer.stream = saved.stream
        self.buffer.draws = saved.draws + len(ahead)
        if saved.held is not None:
            source.go_on_from([saved.held])
        self._iteration = Iteration(saved.position, saved.position, drawn, epochs_left=saved.epochs_left)

    def update_priorities(self, batch_or_keys: ReplayBatch | Any, td: Any) -> None:
        """Feeds TD errors back, as `buffer.update_priorities` does.

        Example:
            >>> for batch in dataset:
            ...     dataset.update_priorities(batch, torch.ones(32))
            >>> buffer.stats().updated
            640
        """
        self.buffer.update_priorities(batch_or_keys, td)

    @property
    def _drawn_from(self) -> TreeSummary:
        """What the weights of the batch handed out last were computed from."""
        stream = self._here().stream
        assert stream is not None
        return stream.drawn_from

    def forget_drawn_of_other_sizes(self) -> None:
        """Leaves out what a state says was drawn ahead, where `batch_size` is another one now."""
        drawn = self._here().drawn
        if not all(self._is_size(len(batch["key"])) for batch in drawn):
            source_of(self.buffer).give_back(*drawn)
            drawn.clear()

    def _is_size(self, n: int) -> bool:
        """Returns whether a batch may have so many items."""
        shorter = self.epochs is not None or self.budget is not None
        return n == self.batch_size or (shorter and n < self.batch_size)

    def end(self) -> None:
        """Ends the iteration under way: its thread, and the draws that were not handed out."""
        stream = self._here().stream
        if stream is not None:
            stream.close()

    def _here(self) -> Iteration:
        """Returns where this process stands: what its parent has drawn ahead is the parent's to hand out."""
        if self._iteration.process != os.getpid():
            parents = self._iteration
            self._iteration = Iteration(parents.resume_at, parents.resume_at, epochs_left=parents.epochs_left)
        return self._iteration

    def __getstate__(self) -> dict[str, Any]:
        here = self._iteration
        return super().__getstate__() | {
            "_iteration": replace(here, drawn=here.drawn.copy(), stream=None, last_epoch=None, length=None)
        }

    def __repr__(self) -> str:
        length = "endless" if self.steps is None else f"steps={self.steps}"
        length = length if self.epochs is None else f"epochs={self.epochs}"
        return f"ReplayDataset(batch_size={self.batch_size}, {length}; use DataLoader(dataset, batch_size=None))"

    def _make_staging(self) -> Staging | None:
        """Returns what takes batches to the device, for one iteration; None where each tensor is copied by itself."""
        if self.device is None or self.device.type != "cuda":
            return None
        refuse_worker(self)
        if self.epochs is not None:
            return None
        return source_of(self.buffer).staging(self.batch_size, self.prefetch, self.device, self.pin, self.budget)

    def _on_device(self, batch: ReplayBatch, staging: Staging | None, stream: Batches) -> ReplayBatch:
        if staging is None:
            moved = batch if self.device is None else batch.to(self.device)
        else:
            moved = staging.hand_out(batch)
            source_of(self.buffer).note_items(moved)  # whose keys are a copy
            staging.copy_ahead(stream.ready)
        if self.budget is not None:
            source_of(self.buffer).warn_of_budget(self.budget, moved)
        return moved

    def _share_of_this_worker(self) -> int | None:
        worker = get_worker_info()
        if worker is not None and isinstance(self.buffer.sampler, Fifo) and not self._for_others:
            raise RuntimeError(
                "ReplayDataset over a queue in a worker of a DataLoader: a worker asks for more before the training "
                "loop has had its last batches, and so would lose what it held. Drawing is native: leave num_workers "
                "at 0. Where workers transform batches in Python, give the dataset to a torchreplay.QueueLoader"
            )
        if worker is not None and counts_draws(self.buffer.sampler):
            raise RuntimeError(
                f"ReplayDataset over a buffer with {self.buffer.sampler} in a worker of a DataLoader: each item leaves "
                f"after max_draws draws, and what a worker has drawn ahead is lost when the loop ends. Drawing is "
                f"native: leave num_workers at 0. Where workers transform batches in Python, take a queue, "
                f"tr.Fifo(max_draws=...), and a torchreplay.QueueLoader"
            )
        if self.steps is None or worker is None:
            if worker is not None and self.epochs is not None:
                raise RuntimeError(
                    f"ReplayDataset(epochs={self.epochs}) in a worker of a DataLoader: the workers would each begin "
                    f"epochs of the others' items. Drawing is native: leave num_workers at 0"
                )
            return self.steps
        return self.steps // worker.num_workers + (worker.id < self.steps % worker.num_workers)
