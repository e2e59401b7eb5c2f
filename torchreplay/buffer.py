"""The replay buffer: one piece of shared memory that explorers write and learners draw from."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import _C
from .arguments import checked_int, checked_kind
from .batch import ReplayBatch
from .config import Config
from .errors import AttachError, Stopped
from .hindsight import Hindsight
from .inspection import StorageView, histograms
from .limiters import Limiter, MinSize, SamplesPerInsert
from .plan import GOALS
from .samplers import Prioritized, Sampler, Schedule, Uniform, value_of
from .segment import Handle, make_handle, new_nonce, open_handle, reserve
from .spec import Spec, flatten, nest, to_native
from .stats import Stats
from .supervision import Supervision
from .views import VIEWS, Rows, View
from .waiting import Wait
from .writer import Autoreset, Writer

if TYPE_CHECKING:
    from types import TracebackType

MAX_BATCH = 1 << 24

_open_buffers: weakref.WeakSet[ReplayBuffer] = weakref.WeakSet()


class ReplayBuffer:
    """A prioritized replay buffer in shared memory.

    Rows live in a ring of `capacity` slots; the newest overwrite the oldest. Any number of processes write and draw at
    the same time. Pickle the buffer (as an argument of a Ray actor, a spawned process, a DataLoader worker) or inherit
    it by fork: it is the same memory. The memory goes with the last process that has it open; /dev/shm stays empty.

    Args:
        spec: Names to `Field(shape, dtype)`; dicts nest. `key`, `weight`, `probability` and `priority` are reserved.
        capacity: Rows that fit, 1 to 2^31.
        sampler: `Uniform()` (the default) or `Prioritized(...)`.
        view: How rows become items: `Rows()` (the default), every row one; `Transitions(...)`, `Sequences(...)` and
            `Hindsight(...)` link the rows of an episode.
        limiter: `MinSize(n)` (the default, with n = 1) or `SamplesPerInsert(...)`.
        seed: Of the draws; the same seed and the same writes give the same batches. None: a random one.

    Raises:
        ValueError: A bad spec, capacity or seed.
        MemoryError: The machine or the cgroup has too little memory left; nothing was touched.
    """

    def __init__(
        self,
        spec: Spec,
        capacity: int,
        *,
        sampler: Sampler | None = None,
        view: View | None = None,
        limiter: Limiter | None = None,
        seed: int | None = None,
    ) -> None:
        default_sampler: Sampler = Uniform()
        default_view: View = Rows()
        default_limiter: Limiter = MinSize()
        config = Config(
            checked_int("capacity", capacity, 1, 1 << 31),
            flatten(spec),
            checked_kind("sampler", sampler, default_sampler, (Uniform, Prioritized)),
            checked_kind("view", view, default_view, VIEWS),
            checked_kind("limiter", limiter, default_limiter, (MinSize, SamplesPerInsert)),
        )
        seed = secrets.randbits(63) if seed is None else checked_int("seed", seed, 0, (1 << 64) - 1)
        nonce = new_nonce()
        native = to_native(config.fields)
        text, shape = config.to_text(), config.view.native()
        fd = reserve(_C.segment_bytes(config.capacity, native, shape, len(text.encode())), "replay buffer")
        try:
            weighting, bounds = config.weighting(), config.limiter.bounds()
            segment = _C.Segment(
                fd, True, nonce, native, ReplayBatch, seed, config.capacity, weighting, bounds, shape, text
            )
        finally:
            os.close(fd)
        self._adopt(segment, nonce, config)

    def _adopt(self, segment: _C.Segment, nonce: int, config: Config) -> None:
        self._segment = segment
        self._nonce = nonce
        self._config = config
        self._local = threading.local()
        self._finish = config.view.finish if isinstance(config.view, Hindsight) else None
        plan = config.view.plan(config.fields)
        if plan is not None:
            goal = GOALS.index(plan.goal)
            segment.set_plan(to_native(plan.outputs), plan.native, plan.steps, plan.gamma, goal, plan.share)
        _open_buffers.add(self)

    # Handles

    def handle(self) -> Handle:
        """Returns what another process of this machine needs to attach; pickling the buffer does the same by itself."""
        self._segment.mark_shared()
        return make_handle(self._segment.fd, self._nonce)

    @classmethod
    def attach(cls, handle: Handle, view: View | None = None) -> ReplayBuffer:
        """Returns the buffer that `handle` names, over the same memory.

        Args:
            handle: What `handle()` returned, in any process of this machine.
            view: The buffer's own view, with functions that a handle does not carry: those of `Hindsight`.

        Raises:
            ValueError: `view` is not the buffer's.
            AttachError: Its owner is gone, on another machine, of another user, or runs another version of torchreplay.
        """
        fd = open_handle(handle, "replay buffer")
        try:
            segment = _C.Segment(fd, False, handle.nonce, None, ReplayBatch)
        except ConnectionError as error:
            raise AttachError(str(error)) from None
        finally:
            os.close(fd)
        config = Config.from_text(segment.text)
        if view is not None:
            if not isinstance(view, Hindsight) or view.as_data() != config.view:
                raise ValueError(f"view is {view}: expected the buffer's own, which is {config.view}")
            config = replace(config, view=view)
        segment.set_fields(to_native(config.fields))
        self = cls.__new__(cls)
        self._adopt(segment, handle.nonce, config)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        view = self.view.travelling() if isinstance(self.view, Hindsight) else None
        return ReplayBuffer.attach, (self.handle(), *(() if view is None else (view,)))

    # Writing

    def writer(self, lanes: int | None = None, autoreset: Autoreset = "next_step") -> Writer:
        """Returns a writer for the calling thread's rows: one for each explorer thread.

        Args:
            lanes: Environments of a vector environment whose episodes it writes: `reset` and `step` then take values
                with a leading dimension of lanes. None: one environment, without that dimension.
            autoreset: What the vector environment does when an episode ends, as Gymnasium names it: `"next_step"`,
                `"same_step"` or `"disabled"`.

        Raises:
            ValueError: `lanes` is out of range or asked for under `Rows()`, or `autoreset` is unknown.
        """
        return Writer(self._segment, self._config, lanes, autoreset)

    def extend(self, /, *, priority: Any = None, **fields: Any) -> torch.Tensor:
        """Writes n rows, whose values have a leading dimension n.

        Under a view that links rows it writes one whole episode of T steps: observation fields `[T + 1, *shape]`, the
        others `[T, *shape]`. With one dimension more, `[T + 1, lanes, *shape]` and `[T, lanes, *shape]`, it writes a
        block of so many environments' streams, in which the observation after an end is the next episode's first one.

        Args:
            priority: Raw TD errors: None (the largest seen so far), one number for all rows, or one for each (under a
                view that links rows: for each step).
            **fields: One value for each field of the spec.

        Returns:
            The keys of the rows, int64 `[n]`; `[T + 1]` or `[T + 1, lanes]` under a view that links rows.

        Raises:
            ValueError: A field is missing, unknown, of another shape or of a dtype that does not cast; nothing is
                written.
            Stopped: The buffer was stopped.
        """
        lanes = self._config.lanes_of(fields)
        if lanes is not None:
            with self.writer(lanes) as block_writer:
                return block_writer.extend(priority=priority, **fields)
        try:
            writer: Writer = self._local.writer
        except AttributeError:
            writer = self._local.writer = self.writer()
        return writer.extend(priority=priority, **fields)

    # Drawing and feedback

    def sample(self, batch_size: int, beta: Schedule | None = None, timeout: float | None = None) -> ReplayBatch:
        """Draws a batch, stratified and with replacement; waits until the limiter admits it.

        Args:
            batch_size: Number of items, B.
            beta: Exponent of the weights, instead of the sampler's own: a number, or a schedule of the batches drawn.
            timeout: Seconds to wait at most; None: as long as someone is left who may write.

        Returns:
            The fields, each `[B, *shape]`, with `key` int64 `[B]`, `weight` and `probability` float32 `[B]`. The memory
            is the batch's own.

        Raises:
            ValueError: `batch_size` is below 1 or too large, or beta is negative.
            ReplayTimeout: The timeout passed.
            WouldBlockForever: Too few rows, and nobody is left to write more.
            Stopped: The buffer was stopped.
        """
        if batch_size.__class__ is not int or not 0 < batch_size <= MAX_BATCH:
            batch_size = checked_int("batch_size", batch_size, 1, MAX_BATCH)
        exponent = self._config.sampler.beta if beta is None else beta
        if exponent.__class__ is not float:
            exponent = value_of(exponent, self._segment.draws)
        elif beta is not None:
            exponent = value_of(exponent, 0)
        wait = None if timeout is None else Wait(self._segment, timeout)
        result = self._segment.sample(batch_size, exponent)
        if result.__class__ is not ReplayBatch:
            try:
                result = self._sample_waiting(result, batch_size, exponent, wait or Wait(self._segment, None))
            except BaseException:
                self._segment.withdraw()  # or writers would go on running ahead for a learner that gave up
                raise
        if self._finish is not None:
            self._finish(result)
        return result

    def gather(self, keys: Any) -> ReplayBatch:
        """Returns the items anchored at given rows.

        Items that cannot be drawn, because their rows were overwritten or are not complete, are left out. It counts as
        no draw: the limiter and the streams of draws do not notice.

        Args:
            keys: int64 `[n]`.

        Returns:
            A batch of the m <= n items there are, in the order of `keys`; `key` says which. `weight` (with the
            sampler's beta) and `probability` are those that a draw would give them.
        """
        batch: ReplayBatch = self._segment.gather(keys, value_of(self._config.sampler.beta, self._segment.draws))
        if self._finish is not None:
            self._finish(batch)
        return batch

    def _sample_waiting(self, result: Any, batch_size: int, beta: float, wait: Wait) -> ReplayBatch:
        while True:
            if isinstance(result, ReplayBatch):
                return result
            if result == "stopped":
                raise Stopped("the replay buffer was stopped")
            if result == "barren":
                raise RuntimeError(
                    f"the ring turned without completing an item: {self.view} needs {self.view.rows_of_an_item} rows "
                    f"of one stream at a time, and all writers' lanes share the {self.capacity:,} rows. Choose a "
                    f"larger capacity or fewer lanes, and see that episodes end with a flag"
                )
            if result == "lapped":
                raise RuntimeError(
                    f"the ring turns faster than a batch is copied: {self.capacity:,} rows against batches of "
                    f"{batch_size:,}. Choose a larger capacity, or slow the explorers with SamplesPerInsert"
                )
            wait.check_rows(*result)
            self._segment.wait_rows(wait.slice_ns())
            result = self._segment.sample(batch_size, beta)

    def update_priorities(self, batch_or_keys: ReplayBatch | Any, td: Any) -> None:
        """Feeds TD errors back to exactly the items they were computed from.

        TD errors of rows overwritten since are dropped and counted (`stats().stale_updates`). Of equal keys the last
        one wins.

        Args:
            batch_or_keys: A batch of this buffer, or int64 keys `[n]`.
            td: TD errors `[n]` of any real dtype, on any device; their absolute values are taken.

        Raises:
            ValueError: A shape does not fit, an error is NaN or infinite, a key was never issued, or the batch is of
                another buffer; nothing is applied.
        """
        keys = batch_or_keys
        if isinstance(keys, ReplayBatch):
            if getattr(keys, "source", None) not in (None, self._nonce):
                raise ValueError("the batch was drawn from another buffer: feed its TD errors back to that one")
            keys = keys.get("key")
        self._segment.update(keys, td)

    # Life cycle

    def stop(self) -> None:
        """Tells everyone to finish: `stopped` is True in every process, and waiting calls raise `Stopped`."""
        self._segment.stop()

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called, in any process. One atomic read."""
        return self._segment.stopped

    def close(self) -> None:
        """Detaches this object; other processes keep the buffer. Using it again is a `RuntimeError`. Idempotent.

        Writers and `storage` that are still held keep the memory mapped, and go on working, until they are let go.
        """
        self._local = threading.local()
        self._segment.close()
        _open_buffers.discard(self)

    def expect_writers(self) -> Supervision:
        """Announces that writers will come, or come back: `sample` then waits for them instead of giving up.

        Returns:
            An object to `close()` when no more will come; it ends with the process as well.
        """
        return Supervision(self._segment)

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Looking at it

    def __len__(self) -> int:
        """Returns the number of rows held."""
        return self._segment.refresh()

    def __bool__(self) -> bool:
        return True  # `if buffer:` asks whether there is one, not whether it holds rows

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self._config.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self._segment.nbytes

    @property
    def spec(self) -> dict[str, Any]:
        """The fields, nested as they were given."""
        return nest(self._config.fields)

    @property
    def sampler(self) -> Sampler:
        """How items are drawn."""
        return self._config.sampler

    @property
    def view(self) -> View:
        """How rows become items."""
        return self._config.view

    @property
    def limiter(self) -> Limiter:
        """Who must wait."""
        return self._config.limiter

    @property
    def draws(self) -> int:
        """Batches that this attached object has drawn: the position in its own stream of draws. Set it to resume."""
        return self._segment.step

    @draws.setter
    def draws(self, step: int) -> None:
        self._segment.step = checked_int("draws", step, 0, (1 << 48) - 1)

    def stats(self) -> Stats:
        """Returns what has happened so far, over all processes."""
        counters = self._segment.counters()
        census = self._segment.census(False)
        return Stats(
            capacity=self.capacity,
            nbytes=self.nbytes,
            draws=self._segment.draws,
            samples_per_insert=counters["sampled"] / max(1, counters["inserted"]),
            writers=census["writers"],
            learners=census["learners"],
            last_write_age=census["since_write"],
            stopped=self.stopped,
            **counters,
        )

    def histograms(self, bins: int = 64) -> dict[str, torch.Tensor]:
        """Returns histograms of leaf priorities and of rows' ages. O(capacity).

        Args:
            bins: Number of bins.

        Returns:
            `priority_edges` (`[bins + 1]`, logarithmic), `priority` (`[bins]` counts of positive leaves), `age_edges`
            (`[bins + 1]`, in rows written since) and `age` (`[bins]` counts of rows).
        """
        counters = self._segment.counters()
        bins = checked_int("bins", bins, 1, 1 << 20)
        return histograms(self._segment.column(-1), self._segment.column(-2), counters["rows_written"], bins)

    @property
    def storage(self) -> dict[str, Any]:
        """Tensors `[capacity, *shape]` over the shared memory itself, nested as the spec, for inspection.

        They are live: a row may change while it is looked at, and writing to them bypasses every promise. They cannot
        be pickled.
        """
        return nest({path: StorageView.over(self._segment.column(i)) for i, path in enumerate(self._config.fields)})

    def __repr__(self) -> str:
        if self._segment.closed:
            return "ReplayBuffer(closed)"
        stats = self.stats()
        names = ", ".join("/".join(path) for path in self._config.fields)
        return (
            f"ReplayBuffer({stats.size:,}/{stats.capacity:,} rows, fields: {names}, "
            f"{stats.nbytes / 2**20:,.1f} MiB shared, {self.view}, {self.sampler}, {self.limiter}, "
            f"{stats.writers} writers{', stopped' if stats.stopped else ''})"
        )


def _before_fork() -> None:
    # A child can write: waits for rows must not conclude that nobody else could.
    for buffer in list(_open_buffers):
        buffer._segment.mark_shared()


os.register_at_fork(before=_before_fork)
# By way of NumPy, which makes float64 of Python floats.
_C.init_torch(torch.Tensor, lambda values: torch.as_tensor(np.asarray(values)))
