"""The replay buffer: one piece of shared memory that explorers write and learners draw from."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch

from torchreplay import _C
from torchreplay.buffer.base import Pin, Replay
from torchreplay.buffer.copying import copy_rows
from torchreplay.buffer.inspection import Inspection
from torchreplay.buffer.pending_updates import PendingUpdates
from torchreplay.buffer.prefetch import PrefetchIterator
from torchreplay.buffer.sampling import Drawing
from torchreplay.buffer.writer import Autoreset, Writer
from torchreplay.checkpoint.buffer_checkpoint import Description, load_rows, reading_rooms, save, with_rows
from torchreplay.cuda.copies import DeviceCopies
from torchreplay.cuda.pinned_memory import CudaRegistry, PageLock, Registry
from torchreplay.cuda.staging import Staging
from torchreplay.errors import AttachError, CheckpointError, ReplayTimeout
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.batch_plan import GOALS
from torchreplay.schema.config import MAX_CAPACITY, Config
from torchreplay.schema.hindsight import Hindsight
from torchreplay.schema.limiters import Limiter, from_native
from torchreplay.schema.samplers import Sampler
from torchreplay.schema.spec import Spec, to_native
from torchreplay.schema.views import View
from torchreplay.segment.delivery_log import DeliveryLog
from torchreplay.segment.handle import Handle, lasting_handle, new_nonce, open_handle
from torchreplay.segment.process_hooks import open_buffers
from torchreplay.segment.ray_node import is_elsewhere
from torchreplay.segment.remote_handles import attach_remote
from torchreplay.segment.reservation import SPARE, Reservation, begin_reservation, page_tables
from torchreplay.segment.segment_file import NewFile, boot_number, open_file
from torchreplay.segment.waits import LOG_EVERY, SLICE_NS, Wait, logger
from torchreplay.segment.writer_lease import WriterLease
from torchreplay.validation import checked_int, checked_path

if TYPE_CHECKING:
    from types import TracebackType


class ReplayBuffer(Drawing, Inspection, Replay):
    """A prioritized replay buffer in shared memory.

    Rows live in a ring of `capacity` slots; the newest overwrite the oldest. Any number of processes write and draw at
    the same time. Pickle the buffer (as an argument of a Ray actor, a spawned process, a DataLoader worker) or inherit
    it by fork: it is the same memory. The memory goes with the last process that has it open; /dev/shm stays empty.
    With a `path` it is a file, which may be larger than the machine's memory, and stays for `open`.

    Args:
        spec: Names to `Field(shape, dtype)`; dicts nest. `key`, `weight`, `probability`, `priority` and `buffer` are
            reserved.
        capacity: Rows that fit, 1 to 2^31.
        sampler: `Uniform()` (the default) or `Prioritized(...)`.
        view: How rows become items: `Rows()` (the default), every row one; `Transitions(...)`, `Sequences(...)` and
            `Hindsight(...)` link the rows of an episode.
        limiter: `MinSize(n)` or `SamplesPerInsert(...)`; None: `MinSize(1)`. Can be changed later.
        path: A new file to hold the buffer, readable by this user only. None: it lies in memory.
        seed: Of the draws, 0 to 2^64 - 1; the same seed and the same writes give the same batches. None: a random one.

    Raises:
        ValueError: A bad spec, capacity or seed.
        MemoryError: The machine or the cgroup has too little memory left; nothing was touched.
        FileExistsError: There is a file at `path`.
        OSError: The disk has too little room for it, or a filesystem that cannot hold shared memory.
    """

    def __init__(
        self,
        spec: Spec,
        capacity: int,
        *,
        sampler: Sampler | None = None,
        view: View | None = None,
        limiter: Limiter | None = None,
        path: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> None:
        config = Config.of(spec, capacity, sampler, view, limiter)
        path = None if path is None else checked_path("path", path)
        seed = secrets.randbits(63) if seed is None else checked_int("seed", seed, 0, (1 << 64) - 1)
        with self._create(config, path, seed, by_and_by=False):
            pass

    @contextmanager
    def _create(self, config: Config, path: Path | None, seed: int, by_and_by: bool) -> Iterator[Reservation]:
        """Makes the segment; where a path is given, in a new file, which is there when the context has ended in order.

        Args:
            config: The buffer's.
            path: The file.
            seed: Of the draws.
            by_and_by: Whether large fields may be reserved in what is yielded, before rows are placed there.

        Raises:
            MemoryError: There is too little memory, or this process may not map as much.
        """
        nonce = new_nonce()
        native = to_native(config.fields)
        text, shape = config.to_text(), config.view.native()
        size, arrays = _C.segment_layout(config.capacity, native, shape, len(text.encode()))
        weighting, limits = config.weighting(), config.limiter.native()
        with nullcontext() if path is None else NewFile(path, size) as new:
            if new is None:
                placed = (arrays, config.capacity, SPARE + page_tables(size)) if by_and_by else ()
                reservation = begin_reservation(size, "replay buffer", *placed)
            else:
                reservation = Reservation(new.fd, 0, "replay buffer")
            with reservation:
                fd, boot = reservation.fd, 0 if path is None else boot_number()
                segment = _C.Segment(
                    fd, True, nonce, native, ReplayBatch, seed, config.capacity, weighting, limits, shape, text, boot
                )
                self._init_state(segment, nonce, config)
                yield reservation

    def _init_state(self, segment: _C.Segment, nonce: int, config: Config) -> None:
        self._segment = segment
        self._nonce = nonce
        self._config = config
        self._local = threading.local()
        self._origin: Handle | None = None  # by which it was attached
        self._ledger: DeliveryLog | Handle | None = None  # ours, or that of the process that the handle came from
        self._deferred = PendingUpdates(segment.update)
        self._page_lock: PageLock | None = None
        self._ended = False  # closed, and stopped before
        self._finish = config.view.finish if isinstance(config.view, Hindsight) else None
        plan = config.view.plan(config.fields)
        if plan is not None:
            goal = GOALS.index(plan.goal)
            segment.set_plan(to_native(plan.outputs), plan.native, plan.steps, plan.gamma, goal, plan.share)
        open_buffers.add(self)

    # Handles

    def handle(self) -> Handle:
        """Returns what another process of this machine needs to attach; pickling the buffer does the same by itself.

        Where Ray is running, processes on other nodes of the cluster can attach too, and write from there.
        """
        self._segment.mark_shared()
        handle = lasting_handle(self._segment.fd, self._nonce, self._origin)
        if handle.node and self._ledger is None:
            made = DeliveryLog()
            # Another thread may have been faster, and its handle is out.
            self._ledger = self._ledger or made  # type: ignore[redundant-expr]
        return replace(handle, ledger=self._ledger.handle() if isinstance(self._ledger, DeliveryLog) else self._ledger)

    @classmethod
    def attach(cls, handle: Handle, view: View | None = None) -> ReplayBuffer:
        """Returns the buffer that `handle` names, over the same memory.

        On another node of a Ray cluster it is a `torchreplay.ray.RemoteBuffer`: explorers write to it as they do
        everywhere, and their rows travel to the buffer's node.

        Args:
            handle: What `handle()` returned, in any process of this machine or on any node of the same Ray cluster.
            view: The buffer's own view, with functions that a handle does not carry: those of `Hindsight`.

        Raises:
            ValueError: `view` is not the buffer's, or has not the same functions.
            AttachError: Its owner is gone, on another machine, of another user, or runs another version of torchreplay;
                or the memory is damaged.
        """
        if is_elsewhere(getattr(handle, "node", "")):
            return cast(ReplayBuffer, attach_remote("buffer", handle, view))
        try:
            self = cls._attach_fd(open_handle(handle, "replay buffer"), handle.nonce, view)
        except ConnectionError as error:
            raise AttachError(str(error)) from None
        self._origin, self._ledger = handle, handle.ledger
        return self

    @classmethod
    def _attach_fd(cls, fd: int, nonce: int, view: View | None) -> ReplayBuffer:
        """Returns the buffer in the segment that others made, and closes its descriptor `fd`."""
        try:
            segment = _C.Segment(fd, False, nonce, None, ReplayBatch)
            config = Config.from_text(segment.text)
            segment.describe(to_native(config.fields), config.capacity, config.view.native())
            from_native(*segment.limiter)  # which is no part of the description: it may change at any time
        except ValueError as error:
            raise ConnectionError(str(error)) from None
        finally:
            os.close(fd)
        config = config.with_functions(view)
        self = cls.__new__(cls)
        self._init_state(segment, nonce, config)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        view = self.view.travelling() if isinstance(self.view, Hindsight) else None
        return attached, (type(self), self.handle(), *(() if view is None else (view,)))

    # Copies

    def copy(self, capacity: int | None = None) -> Self:
        """Returns a new buffer in memory with the same rows, keys, priorities and counters, while others go on writing.

        What is done to one is not seen by the other. Sampler, view, limiter and seed are the same. The draws go on
        where those of this process are: the copy draws what this buffer would draw. Rows are exact, each by itself;
        those written meanwhile may be in it or not. Writers are not copied, and a copy of a stopped buffer is not
        stopped. `copy.deepcopy` does the same. `copy.copy` and `pickle` make another object over the same rows.

        Args:
            capacity: Rows that fit; None: as many as here. Of more rows than fit the newest are copied.

        Raises:
            ValueError: `capacity` does not fit; or TD errors from a device are NaN or infinite, as `flush` says.
            MemoryError: The machine or the cgroup has too little memory left.
            RuntimeError: The buffer is closed, or is being restored.
        """
        config = self._config
        if capacity is not None:
            config = replace(config, capacity=checked_int("capacity", capacity, 1, MAX_CAPACITY))
        self.flush()
        made = type(self).__new__(type(self))
        with made._create(config, None, self._segment.seed, by_and_by=False):
            copy_rows(self._segment, made._segment, self._config)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = self.copy()
        return made

    # Files

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, view: View | None = None, sampler: Sampler | None = None
    ) -> ReplayBuffer:
        """Returns the buffer in a file that was made with `path=`, as it was left, however its processes ended.

        Rows, keys, priorities, counters and the stream of draws are as they were. Of writers that were killed, the row
        that each was writing is dropped, which is logged and counted (`stats().dropped_rows`); their episodes have no
        end. When other processes of this machine have the file open, the buffer is theirs, as with `attach`; when
        nobody has, it takes O(capacity).

        A file outlives its processes, killed ones too. It outlives the machine only after its last process has closed
        it or ended. If the machine goes down before, the disk has parts of different moments.

        Args:
            path: The file.
            view: The buffer's own view, with functions that a file does not hold: those of `Hindsight`.
            sampler: The buffer's own sampler, with a function for its beta, which a file does not hold.

        Raises:
            FileNotFoundError: There is none.
            PermissionError: It belongs to another user.
            CheckpointError: It is no replay buffer, of another version, truncated, damaged, or was in use when the
                machine went down.
            ValueError: `view` or `sampler` is not the buffer's, or `view` has not the same functions.
        """
        found = open_file(checked_path("path", path))
        try:
            self = cls._attach_fd(found.fd, found.nonce, view)
        except ConnectionError as error:
            raise CheckpointError(f"{path} cannot be opened as a replay buffer: {error}") from None
        self._config = self._config.with_schedule(sampler)
        if found.found_alone:
            self._segment.own()
        else:
            self._segment.mark_shared()
        if found.dropped_rows:
            logger.warning(
                "%s: dropped %d rows that were being written when its processes died", path, found.dropped_rows
            )
        return self

    # Writing

    def writer(self, num_envs: int | None = None, autoreset: Autoreset = "next_step") -> Writer:
        """Returns a writer for the calling thread's rows: one for each explorer thread.

        Args:
            num_envs: Environments of a vector environment whose episodes it writes: `reset` and `step` then take
                values `[num_envs, ...]`. None: one environment, without that dimension.
            autoreset: What the vector environment does when an episode ends: `"next_step"`, `"same_step"` or
                `"disabled"`, or Gymnasium's `AutoresetMode` of it, or that one's value.

        Raises:
            ValueError: `num_envs` is out of range or asked for under `Rows()`, `autoreset` is unknown or given
                without it, or a field is named as the argument that it brings, `final_obs` or `mask`.
            RuntimeError: The buffer is closed, or has 4,095 writers and learners.
        """
        return Writer(self._segment, self._config, num_envs, autoreset)

    def extend(self, /, *args: Any, priority: Any = None, **fields: Any) -> torch.Tensor:
        """Writes n rows, whose values have a leading dimension n.

        Under a view that links rows it writes one whole episode of T steps: observation fields `[T + 1, *shape]`, the
        others `[T, *shape]`. With one dimension more, `[T + 1, num_envs, *shape]` and `[T, num_envs, *shape]`, it
        writes a block of the streams of so many environments. There the observation after an end is the next episode's
        first one.

        Args:
            *args: None: fields go by their names, rows in a dict as `extend(**rows)`.
            priority: Raw TD errors: None (the largest seen so far), one number for all rows, or one for each (under a
                view that links rows: for each step).
            **fields: One value for each field of the spec.

        Returns:
            The keys of the rows, int64 `[n]`; `[T + 1]` or `[T + 1, num_envs]` under a view that links rows.

        Raises:
            ValueError: A field is missing, unknown, of another shape or of a dtype that does not cast; or it has a
                masked value, or a number that its dtype does not hold. Nothing is written.
            TypeError: Something is given by its position.
            Stopped, WouldBlockForever, ReplayTimeout: As `Writer.append`; rows written before stay written.
        """
        num_envs = self._config.num_envs_of(fields)
        if num_envs is not None:
            with self.writer(num_envs) as block_writer:
                keys = block_writer.extend(*args, priority=priority, **fields)
        else:
            try:
                writer: Writer = self._local.writer
            except AttributeError:
                writer = self._local.writer = self.writer()
            keys = writer.extend(*args, priority=priority, **fields)  # which refuses what has no name
        self._rows_extended += keys.numel()
        return keys

    # Drawing

    def batches(
        self,
        batch_size: int,
        count: int | None,
        prefetch: int,
        timeout: float | None,
        waiting: type[Wait],
        drawn: deque[dict[str, Any]],
        staging: Staging | None = None,
    ) -> PrefetchIterator:
        """Returns a stream of batches; a native thread draws `prefetch` of them ahead."""
        return PrefetchIterator(self, batch_size, count, prefetch, timeout, waiting, drawn, staging)

    def staging(self, batch_size: int, prefetch: int, device: torch.device, pin: Pin | None) -> Staging | None:
        """Returns what takes batches to a CUDA device while the learner computes; None: each is copied by itself."""
        if pin == "off":
            return None
        copies = DeviceCopies(device)
        if pin == "ring":
            self._lock_pages(CudaRegistry(copies.device))
        return Staging(self, batch_size, prefetch, copies)

    # Checkpoints

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Saves the buffer while others go on writing and drawing.

        The directory gets a small JSON file and safetensors files with the rows. Rows are exact, each by itself; those
        written during the save may be in it or not. TD errors on their way from a device are waited for. A save that is
        killed leaves the one before as it was, and two saves into one directory follow each other.

        Args:
            directory: Where to; made if need be. A checkpoint that is there is replaced.

        Raises:
            CheckpointError: The buffer is being restored, or was meanwhile.
            MemoryError: There is less than the 16 MiB that a save needs beside the buffer; nothing was written.
            OSError: The disk is full, or the directory cannot be written.
            ValueError: TD errors from a device are NaN or infinite, as `flush` says; nothing is saved.
        """
        root = checked_path("directory", directory)
        self.flush()
        save(self._segment, self._config, root)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        capacity: int | None = None,
        *,
        view: View | None = None,
        path: str | os.PathLike[str] | None = None,
        sampler: Sampler | None = None,
    ) -> ReplayBuffer:
        """Returns a new buffer with the rows, keys, priorities and counters of a saved one.

        Training goes on as if nothing had happened: old batches' keys are still valid, and the draws follow on those
        that the saving process had made.

        Args:
            directory: What `save` wrote.
            capacity: Rows that fit; None: as before. Of more rows than fit the newest are loaded.
            view: The buffer's own view, with functions that a checkpoint does not hold: those of `Hindsight`.
            path: A new file to hold the buffer; None: it lies in memory.
            sampler: The buffer's own sampler, with a function for its beta, which a checkpoint does not hold.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged.
            MemoryError: The machine or the cgroup has too little memory left, or this process may not map as much. A
                load needs 20 MiB beside the buffer, or the longest row if that is more.
            OSError: A file cannot be read, which does not mean that it is damaged; or `path` cannot be made, or is
                there already.
            ValueError: `capacity`, `view` or `sampler` does not fit, or `view` has not the same functions.
        """
        directory = checked_path("directory", directory)
        path = None if path is None else checked_path("path", path)

        def load(saved: Description) -> ReplayBuffer:
            config = saved.config.with_functions(view).with_schedule(sampler)
            if capacity is not None:
                config = replace(config, capacity=checked_int("capacity", capacity, 1, MAX_CAPACITY))
            self = cls.__new__(cls)
            rooms = reading_rooms(saved, directory)  # first: what is left then is for the buffer
            with self._create(config, path, saved.seed, by_and_by=True) as reservation:
                wait = None if reservation.complete else reservation.wait
                load_rows(self._segment, self._config, saved, directory, wait, rooms)
            return self

        return with_rows(directory, load)

    def restore(self, directory: str | os.PathLike[str]) -> None:
        """Does what `load` does to a buffer that is there and was never written to.

        Nobody sees a row before all are there. Of a restore that fails, or whose process dies, none stays; their keys
        are not given again, and another restore may follow. What explorers write meanwhile can be drawn when it is
        over, and is newer than what was saved. Ctrl-C may come too late to keep it from being done.

        Args:
            directory: What `save` wrote, of a buffer with the same spec and view; the capacity may be another.

        Raises:
            CheckpointError: There is no checkpoint, it is damaged or of another kind, the buffer holds rows already,
                or somebody else restores it.
            MemoryError: There is too little memory to read with: see `load`.
            OSError: A file cannot be read, which does not mean that it is damaged.
        """
        root = checked_path("directory", directory)
        with_rows(root, lambda saved: load_rows(self._segment, self._config, saved, root))

    # Life cycle

    def _become_shared(self) -> None:
        """Called before a fork: the child can write, and waits for rows must not conclude that nobody else could."""
        self._segment.mark_shared()

    def _become_childs(self) -> None:
        """Called in a forked child: what is on its way from a device, and page-locked, is the parent's."""
        self._deferred = PendingUpdates(self._segment.update)
        self._page_lock = None

    def _end(self) -> None:
        """Called at the end of the process, before a file is left."""
        if not self._segment.closed and self._segment.in_file:
            self._flush(time.monotonic_ns() + 4 * SLICE_NS)
            if self._page_lock is not None:
                self._page_lock.release()

    def stop(self) -> None:
        """Stops the buffer: `stopped` is True in every process, and waiting calls raise `Stopped`."""
        self._segment.stop()

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called, in any process. One atomic read."""
        return self._segment.stopped

    def close(self) -> None:
        """Detaches this object; other processes keep the buffer. Using it again is a `RuntimeError`. Idempotent.

        What it was made of (`spec`, `capacity`, `sampler`, `view`) is still known, and `flush` has nothing to do.
        Its writers write no more: their calls are a `RuntimeError` as well. They and `storage`, while they are held,
        keep the memory mapped. The last process to leave a file waits until everything is on the disk. Explorers on
        other nodes of a Ray cluster need the process that made the buffer: once it has closed it, none can begin to
        write from there.

        Raises:
            ValueError: TD errors from a device are NaN or infinite, as `flush` says; the buffer is closed.
        """
        try:
            self._flush(time.monotonic_ns() + 4 * SLICE_NS)  # who holds the lock may have been stopped
        finally:
            self._local = threading.local()
            self._ledger = None
            if self._page_lock is not None:
                self._page_lock.release()
            self._ended = self._ended or (not self._segment.closed and self._segment.stopped)
            self._segment.close()
            open_buffers.discard(self)

    def _lock_pages(self, registry: Registry) -> PageLock:
        """Page-locks the whole memory for copies to devices, once, if the system allows it."""
        if self._page_lock is None:
            segment = self._segment
            self._page_lock = PageLock(self, segment.address, segment.nbytes, registry)
        return self._page_lock

    def expect_writers(self) -> WriterLease:
        """Announces that writers will come, or come back: `sample` then waits for them instead of giving up.

        Returns:
            An object to `close()` when no more will come; it ends with the process as well.
        """
        return WriterLease(self._segment)

    def __enter__(self) -> ReplayBuffer:
        if self._segment.closed:
            raise RuntimeError("the replay buffer is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def attached(kind: type[ReplayBuffer], *given: Any) -> ReplayBuffer:
    """Returns `kind.attach(*given)`. Pickles name it: cloudpickle, and so Ray, writes a method out as its code."""
    return kind.attach(*given)


def _astype(array: Any, dtype: str) -> Any:
    """Returns `array` in another dtype; raises FloatingPointError where a finite number becomes infinite."""
    with np.errstate(over="raise"):
        return array.astype(dtype)


# By way of NumPy, which makes float64 of Python floats.
_C.init_arrays(
    torch.Tensor,
    lambda values: torch.as_tensor(np.asarray(values), device="cpu"),
    torch.get_num_threads,
    np.ndarray,
    _astype,
)
_C.init_waits(ReplayTimeout, logger.warning, LOG_EVERY)
