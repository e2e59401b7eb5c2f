"""The replay buffer: one piece of shared memory that explorers write and learners draw from."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import torch

from torchreplay import _C
from torchreplay.buffer.base import Replay, WritableReplay
from torchreplay.buffer.creation import attached_segment, copy_rows, new_segment
from torchreplay.buffer.held_rows import HeldRows
from torchreplay.buffer.local_sampler import Limits, LocalSampler, Missing
from torchreplay.buffer.local_source import LocalSource
from torchreplay.buffer.notices import warn_of_ignored
from torchreplay.buffer.queue import Queue
from torchreplay.buffer.stats import Stats
from torchreplay.buffer.writer import Autoreset, Writer, streams_of
from torchreplay.checkpoint.archive import is_file, opened_archive, save_archive
from torchreplay.checkpoint.buffer_checkpoint import load_rows, reading_rooms, save
from torchreplay.checkpoint.description import Description, with_rows
from torchreplay.errors import AttachError, CheckpointError
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.casting import cast_values
from torchreplay.schema.config import Config
from torchreplay.schema.hindsight import Hindsight
from torchreplay.schema.limiters import LIMITERS, Limiter, MinSize, from_native
from torchreplay.schema.samplers import MOST_VERSIONS, Fifo, Sampler, Schedule, ignores_td
from torchreplay.schema.spec import Spec
from torchreplay.schema.views import View
from torchreplay.segment.delivery_log import DeliveryLog
from torchreplay.segment.handle import Handle, lasting_handle, open_handle
from torchreplay.segment.ray_node import RemoteKind, is_elsewhere
from torchreplay.segment.segment_file import open_file
from torchreplay.segment.waits import NEVER, Wait, logger
from torchreplay.segment.writer_lease import WriterLease
from torchreplay.validation import checked_instance, checked_int, checked_kind, checked_path

REMOTE_BUFFER: RemoteKind[[Handle, View | None], WritableReplay] = RemoteKind()
"""Attaches a buffer of another node."""


class ReplayBuffer(HeldRows, Queue, Replay):
    """A prioritized replay buffer in shared memory.

    Rows live in a ring of `capacity` slots; the newest overwrite the oldest. Any number of processes write and draw at
    the same time. Pickle the buffer (as an argument of a Ray actor, a spawned process, a DataLoader worker) or inherit
    it by fork: it is the same memory. The memory goes with the last process that has it open; /dev/shm stays empty.
    With a `path` it is a file, which may be larger than the machine's memory, and stays for `open`.

    Args:
        spec: Names to `Field(shape, dtype)`, or to `Ragged(dtype)` for values of any length; dicts nest. `key`,
            `weight`, `probability`, `priority`, `buffer` and `casting` are reserved, and beside ragged fields `offsets`
            and `lengths`. `policy_version`, an int64 scalar, says by which policy a row came about; writers fill it,
            and batches have `age` beside it.
        capacity: Rows that fit, 1 to 2^31.
        sampler: `Uniform()` (the default), `Uniform(replacement=False)` or `Prioritized(...)`; or `Fifo(...)`, which
            makes a queue of the buffer.
        view: How rows become items: `Rows()` (the default), every row one; `Transitions(...)`, `Sequences(...)` and
            `Hindsight(...)` link the rows of an episode.
        limiter: `MinSize(n)`, `SamplesPerInsert(...)` or `Admission(...)`; None: `MinSize(1)`. Can be changed
            later.
        path: A new file to hold the buffer, readable by this user only. None: it lies in memory.
        seed: Of the draws, 0 to 2^64 - 1; the same seed and the same writes give the same batches. None: a random one.
        name: What people call it, up to 64 characters, such as `"red team"`. Every process that attaches sees it. It is
            in errors, in checkpoints, and on the screen of `torchreplay list` and `torchreplay watch`.
        ragged_bytes: Bytes for the values of ragged fields, together. A row goes when its slot or its bytes are
            needed: there are at most `capacity` rows, and fewer where their values are long. One row takes at most a
            quarter. None: there are no such fields.

    Raises:
        ValueError: A bad spec, capacity, seed or name; or `ragged_bytes` is missing, too small, or given in vain.
        MemoryError: The machine or the cgroup has too little memory left; nothing was touched.
        FileExistsError: There is a file at `path`.
        OSError: The disk has too little room for it, or a filesystem that cannot hold shared memory.

    Example:
        >>> spec = {"obs": tr.Field(3), "action": tr.Field((), torch.int64), "reward": tr.Field()}
        >>> buffer = tr.ReplayBuffer(spec, capacity=100, sampler=tr.Prioritized())
        >>> keys = buffer.extend(obs=torch.zeros(5, 3), action=torch.arange(5), reward=torch.zeros(5))
        >>> batch = buffer.sample(4)
        >>> batch["obs"].shape
        torch.Size([4, 3])
        >>> buffer.update_priorities(batch, torch.ones(4))  # its TD errors
    """

    _sampler: LocalSource

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
        name: str | None = None,
        ragged_bytes: int | None = None,
    ) -> None:
        config = Config.of(spec, capacity, sampler, view, limiter, name, ragged_bytes)
        path = None if path is None else checked_path("path", path)
        seed = secrets.randbits(63) if seed is None else checked_int("seed", seed, 0, (1 << 64) - 1)
        with new_segment(config, path, seed, by_and_by=False) as (segment, nonce, _):
            self._init_state(segment, nonce, config)

    def _init_state(self, segment: _C.Segment, nonce: int, config: Config) -> None:
        self._segment, self._nonce, self._config = segment, nonce, config
        self._sampler = LocalSource(segment, nonce, config)
        self._local = threading.local()
        self._is_queue, self._has_versions = isinstance(config.sampler, Fifo), config.has_versions
        self._enough = 0  # items of the largest batch that was not larger than the items there were
        self._ignores_td = ignores_td(config.sampler)  # and nobody was told
        self._origin: Handle | None = None  # by which it was attached

    @classmethod
    def _over(cls, segment: _C.Segment, nonce: int, config: Config) -> Self:
        """Returns the buffer in memory that is there."""
        self = cls.__new__(cls)
        self._init_state(segment, nonce, config)
        return self

    # Handles

    def handle(self) -> Handle:
        """Returns what another process of this machine needs to attach; pickling the buffer does the same by itself.

        It is good while the process that it names has this buffer open: that which made the buffer, or this one when
        that has closed it. Where Ray is running, processes on other nodes of the cluster can attach too, and write
        from there.

        Example:
            >>> handle = buffer.handle()  # send it to the other process
            >>> tr.ReplayBuffer.attach(handle).keys().tolist()
            [0, 1, 2, 3, 4]
        """
        self._segment.mark_shared()
        handle = lasting_handle(self._sampler.attach_fd, self._nonce, self._origin)
        sampler = self._sampler
        if handle.node and sampler.delivery_log is None:
            made = DeliveryLog()
            # Another thread may have been faster, and its handle is out.
            sampler.delivery_log = sampler.delivery_log or made  # type: ignore[redundant-expr]
        log = sampler.delivery_log
        return replace(handle, delivery_log=log.handle() if isinstance(log, DeliveryLog) else log)

    @classmethod
    def attach(cls, handle: Handle, view: View | None = None) -> WritableReplay:
        """Returns the buffer that `handle` names, over the same memory.

        On the buffer's own node it is a `ReplayBuffer`. On another node of a Ray cluster it is a
        `torchreplay.ray.RemoteBuffer`: explorers write to it as they do everywhere, and their rows travel to the
        buffer's node. Both are a `WritableReplay`; ask `isinstance(buffer, ReplayBuffer)` before you draw.

        Args:
            handle: What `handle()` returned, in any process of this machine or on any node of the same Ray cluster.
            view: The buffer's own view, with functions that a handle does not carry: those of `Hindsight`.

        Raises:
            ValueError: `view` is not the buffer's, or has not the same functions.
            AttachError: Its owner is gone or has closed it, on another machine, of another user, or runs another
                version of torchreplay; or the memory is damaged.

        Example:
            >>> same = tr.ReplayBuffer.attach(buffer.handle())  # in another process, usually
            >>> rows = same.extend(obs=torch.zeros(2, 3), action=[0, 1], reward=[0.0, 1.0])
            >>> len(buffer)
            7
        """
        if is_elsewhere(getattr(handle, "node", "")):
            return REMOTE_BUFFER.attach(handle, view)
        return attached_here(cls, handle, view)

    def __reduce__(self) -> tuple[Any, ...]:
        view = self.view.travelling() if isinstance(self.view, Hindsight) else None
        return attached, (type(self), self.handle(), *(() if view is None else (view,)))

    # Copies

    def copy(self, capacity: int | None = None, ragged_bytes: int | None = None) -> Self:
        """Returns a new buffer in memory with the same rows, keys, priorities and counters, while others go on writing.

        What is done to one is not seen by the other. Sampler, view, limiter and seed are the same. The draws go on
        where those of this process are: the copy draws what this buffer would draw. Rows are exact, each by itself;
        those written meanwhile may be in it or not. Writers are not copied, and a copy of a stopped buffer is not
        stopped. `copy.deepcopy` does the same. `copy.copy` and `pickle` make another object over the same rows.

        Args:
            capacity: Rows that fit; None: as many as here. Of more rows than fit the newest are copied. A queue that
                waits loses no item so.
            ragged_bytes: For the values of ragged fields; None: as many as here. Where they are too few for all rows,
                the newest are copied, and a warning with the number of the others is logged.

        Raises:
            ValueError: `capacity` or `ragged_bytes` does not fit, or is too small for a queue's items, or for the
                values of a row; or TD errors from a device are NaN or infinite, as `flush` says.
            MemoryError: The machine or the cgroup has too little memory left.
            RuntimeError: The buffer is closed, or is being restored.

        Example:
            >>> larger = buffer.copy(capacity=1000)
            >>> larger.capacity, len(larger)
            (1000, 5)
        """
        config = self._config.resized(capacity, ragged_bytes)
        self.flush()
        with new_segment(config, None, self._segment.seed, by_and_by=False) as (segment, nonce, _):
            copy_rows(self._segment, segment, self._config, config)
        return self._over(segment, nonce, config)

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
            CheckpointError: It is no replay buffer, of another version, truncated, damaged, was in use when the machine
                went down, or is a copy that was made while the buffer was in use.
            OSError: It is a sparse copy, and the disk has no room for all of it.
            ValueError: `view` or `sampler` is not the buffer's, or `view` has not the same functions.

        Example:
            >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100, path="replay.bin")
            >>> keys = buffer.extend(obs=torch.zeros(5, 3))
            >>> buffer.close()
            >>> len(tr.ReplayBuffer.open("replay.bin"))  # in a later run, usually
            5
        """
        found = open_file(checked_path("path", path))
        try:
            segment, config = attached_segment(found.fd, found.nonce, view)
        except ConnectionError as error:
            raise CheckpointError(f"{path} cannot be opened as a replay buffer: {error}") from None
        self = cls._over(segment, found.nonce, config.with_schedule(sampler))
        if found.found_alone:
            segment.own()
        else:
            segment.mark_shared()
        if found.dropped_rows:
            logger.warning(
                "%s: dropped %d rows that were being written when its processes died", path, found.dropped_rows
            )
        return self

    # Writing

    def writer(self, envs: Any = None, autoreset: Autoreset | None = None, *, num_envs: int | None = None) -> Writer:
        """Returns a writer for the calling thread's rows: one for each explorer thread.

        Under a view that links rows, a writer of a vector environment takes values `[num_envs, ...]` in `reset` and
        `step`. Any other takes those of one environment, without that dimension.

        Args:
            envs: The environment, or the vector environment, whose steps it writes. Of a vector environment it reads
                `num_envs`, and `metadata["autoreset_mode"]` (without one: `"next_step"`). None: as the others say. A
                number: as `num_envs`.
            autoreset: What the vector environment does when an episode ends: `"next_step"`, `"same_step"` or
                `"disabled"`, or Gymnasium's `AutoresetMode` of it, or that one's value. None: what `envs` says.
            num_envs: Environments of the vector environment, where `envs` is not given.

        Raises:
            ValueError: The three contradict each other, or `envs` is no environment. Or `num_envs` is out of range, or
                asked for under `Rows()`. Or `autoreset` is unknown, is given without a number, or is missing for an
                `envs` that is none of Gymnasium's. Or a field is named `final_obs` or `mask`, as an argument is.
            RuntimeError: The buffer is closed, or has 4,095 writers and learners.

        Example:
            >>> with buffer.writer() as writer:
            ...     key = writer.append(obs=[0.0, 0.0, 1.0], action=1, reward=1.0)
            >>> key
            5
        """
        return Writer(self._segment, self._config, *streams_of(envs, num_envs, autoreset))

    def extend(self, /, *args: Any, priority: Any = None, casting: Any = "same_kind", **fields: Any) -> torch.Tensor:
        """Writes n rows, whose values have a leading dimension n.

        Under a view that links rows it writes one whole episode of T steps: observation fields `[T + 1, *shape]`, the
        others `[T, *shape]`. With one dimension more, `[T + 1, num_envs, *shape]` and `[T, num_envs, *shape]`, it
        writes a block of the streams of so many environments. There the step after an end is not taken: it brings the
        next episode's first observation. Episodes one after the other are no block: `tr.episodes_from_flat` cuts them.

        Args:
            *args: None: fields go by their names, rows in a dict as `extend(**rows)`.
            lengths: Of ragged fields: a dict of their names and int `[n]`, as `batch["lengths"]` is. The values of
                such a field are one array, one value after the other. Fields that are `like` each other need it once.
            priority: Raw TD errors, as for `update_priorities`: None (what `Prioritized(initial=)` says), one number
                for all rows, or one for each (under a view that links rows: for each step).
            casting: `"same_kind"`: a value whose dtype does not cast by NumPy's rule of that name is refused.
                `"unsafe"`: it is cast all the same, as `numpy.ndarray.astype` does: 1.0 to True, 1.9 to 1.
            **fields: One value for each field of the spec. Of a ragged field a list of n values `[length, *shape]`, or
                the tuple `(values, lengths)` of all elements, one value after the other, and the length of each.

        Returns:
            The keys of the rows, int64 `[n]`; `[T + 1]` or `[T + 1, num_envs]` under a view that links rows.

        Raises:
            ValueError: A field is missing, unknown, of another shape or of a dtype that does not cast; or it has a
                masked value, or a number that its dtype does not hold. Or an episode goes on after its end, or a step
                after an end in a block has a flag. Nothing is written.
            TypeError: Something is given by its position.
            Stopped, WouldBlockForever, ReplayTimeout: As `Writer.append`; rows written before stay written.

        Example:
            >>> buffer.extend(obs=torch.zeros(2, 3), action=[0, 1], reward=[0.0, 1.0], priority=[0.5, 2.0])
            tensor([5, 6])
        """
        fields = cast_values(self._config.fields, fields, casting)
        num_envs = self._config.num_envs_of(fields)
        if num_envs is not None:
            with self.writer(num_envs=num_envs) as block_writer:
                if self._has_versions:
                    self._tell_version(block_writer)
                keys = block_writer.extend(*args, priority=priority, **fields)
        else:
            try:
                writer: Writer = self._local.writer
            except AttributeError:
                writer = self._local.writer = self.writer()
            if self._has_versions:
                self._tell_version(writer)
            keys = writer.extend(*args, priority=priority, **fields)  # which refuses what has no name
        self._rows_extended += keys.numel()
        return keys

    def _tell_version(self, writer: Writer) -> None:
        writer.policy_version = self.policy_version if self._extends_as is None else self._extends_as

    # Drawing, and feeding back

    def sample(
        self,
        batch_size: int,
        beta: Schedule | None = None,
        timeout: float | None = None,
        *,
        out: ReplayBatch | None = None,
        device: torch.device | str | int | None = None,
        at_least: int | None = None,
        budget: Mapping[str, int] | None = None,
    ) -> ReplayBatch:
        """Draws a batch, stratified; waits until the limiter admits it.

        Draws are with replacement, unless the sampler is `Uniform(replacement=False)`. The items are in the order of
        their slots: roughly from old to new. Shuffle them before you cut a batch into minibatches.

        Of a queue it takes the oldest items that nobody has, in their order, and waits until there are so many. This
        thread is done with what it got before, unless `Fifo(commit="manual")` says otherwise.

        Args:
            batch_size: Number of items, B.
            beta: Exponent of the weights, instead of the sampler's own: a number, or a schedule of the batches drawn.
            timeout: Seconds to wait at most, for rows and for the lock; None: as long as someone is left who may write.
            out: A batch of as many items, whose tensors are overwritten: contiguous and on the CPU, such as those that
                `sample` returned before, page-locked or not. Autograd does not notice: a graph that still needs them
                must have been run backward. What a `Hindsight` view computes are new tensors.
            device: Where the batch goes; `key` stays on the CPU. None: it stays where it is. A `ReplayDataset` hides
                the time of the copy behind the learner's work.
            at_least: Of a queue: a batch may be as short, if no more items are there. None: it has `batch_size`.
            budget: Of ragged fields of a batch: the most elements that it may have, such as `{"tokens": 65_536}`. Of
                the items drawn, in a random order, the batch has the first ones within every budget, but always one.
                The item that would be too much is left out, and may be drawn by the next call. So long values are drawn
                a little less often: by the mean length over the budget at most. Of a queue it has the oldest, and it
                waits no longer than until those that are there use up a budget.

        Returns:
            The fields, each `[B, *shape]`, and ragged ones as `ReplayBatch` says; `key` int64 `[B]`, `weight` and
            `probability` float32 `[B]`. The memory is the batch's own, or that of `out`, which is returned.

        Raises:
            ValueError: `batch_size` is below 1 or too large, beta is negative, a tensor of `out` does not fit, or
                `at_least` is out of range or given without a queue; then nothing is drawn. Or `budget` names no ragged
                field. After another error `out` holds parts of items.
            OverflowError: The batch has more elements of a ragged field than int32 offsets can say.
            ReplayTimeout: The timeout passed; the text says what for, or which process holds the lock.
            WouldBlockForever: Too few rows, and nobody is left to write more; or a queue is full, and only the waiting
                learner itself could make room.
            Stopped: The buffer was stopped.

        Warns:
            UserWarning: The batch is larger than the number of items, so it holds copies. Said once.
            RuntimeWarning: One item alone has more elements than its budget; the batch has that item. Said once.

        Example:
            >>> batch = buffer.sample(4, beta=0.4)
            >>> batch["reward"].shape, batch["weight"].shape
            (torch.Size([4]), torch.Size([4]))
            >>> batch = buffer.sample(4, out=batch)  # into the same memory
        """
        if out is not None:
            checked_instance("out", out, ReplayBatch, "torchreplay.ReplayBatch")
        into: ReplayBatch | Limits | None = out
        if budget is not None:
            budget = self._sampler.checked_budget(budget)
            if out is not None:
                raise ValueError(
                    "out and budget: batches that are each of another size need memory of their own; drop out="
                )
            into = self._sampler.limits(budget)
        if self._is_queue or at_least is not None:
            batch = self._sample_queue(batch_size, beta, timeout, into, device, at_least)
        else:
            batch = self._sampler.draw(batch_size, beta, timeout, Wait, into)
            if batch_size > self._enough:
                self._look_for_copies(batch_size)
        if budget is not None:
            self._sampler.warn_of_budget(budget, batch)
        return batch if device is None else batch.to(device)

    def _look_for_copies(self, batch_size: int) -> None:
        left = self.num_items  # without those that this batch has used up
        self._enough = self._sampler.warn_of_copies(batch_size, batch_size if self.sampler.max_draws else left)

    def gather(self, keys: Any, missing: Missing = "drop") -> ReplayBatch:
        """Returns the items anchored at given rows.

        It counts as no draw: the limiter and the streams of draws do not notice. Under `Hindsight` items come as they
        were lived: nothing is relabelled.

        Args:
            keys: int64 `[n]`, or a batch of this buffer, whose `key` is taken.
            missing: What becomes of items that cannot be drawn, because their rows were overwritten or are not
                complete. `"drop"`: they are left out, and the batch is smaller. `"raise"`: there is no batch.

        Returns:
            A batch of the m <= n items there are, in the order of `keys`; `key` says which. `weight` (with the
            sampler's beta) and `probability` are those that a draw would give them.

        Raises:
            ValueError: The keys are not int64 `[n]`, the batch is of another buffer, or `missing` is neither.
            MissingItems: There are such items, and `missing` is `"raise"`: how many, and the first one's key.

        Example:
            >>> buffer.gather(keys[1:3])["action"]
            tensor([1, 2])
        """
        return self._sampler.gather(keys, missing)

    def update_priorities(self, batch_or_keys: ReplayBatch | Any, td: Any) -> None:
        """Feeds TD errors back to exactly the items they were computed from.

        TD errors of rows overwritten since are dropped and counted (`stats().stale_updates`). Of equal keys the last
        one wins. The next call of this object finds them applied. (Beside a `ReplayDataset` that draws ahead, its
        thread may apply them, after the batches that are ordered already: before others are to see them, call `flush`.
        Where the iteration ends while the buffer's lock does not come free, they are dropped and counted.)

        Those on a CUDA device are not waited for. They are copied beside the learner's work, as they are at this point
        of its stream. They are applied once they have come, in the order given, when this process next calls the buffer
        or has it draw; `flush` waits for them. So the draws meanwhile depend on how fast the device is. For the same
        draws in every run, call `flush` after each update, or feed back from the CPU.

        Args:
            batch_or_keys: A batch of this buffer, or a dict made of one with its `key`; or integer keys `[n]`.
            td: TD errors `[n]` of any real dtype, on any device. They may need a gradient (no `detach()`):
                their values are read, and their absolute values taken. One of more than 3.4e38, the largest float32,
                counts as that.

        Raises:
            ValueError: A shape does not fit, an error is NaN or infinite, a key was never issued, or the batch is of
                another buffer; nothing is applied. NaN or infinite errors from a CUDA device are raised by the next
                call, or by `flush`, which say which update it was.

        Warns:
            UserWarning: The sampler is `Uniform` or `Fifo`, which ignores them. Said once.

        Example:
            >>> buffer.update_priorities(keys, [0.5, 0.5, 0.5, 0.5, 2.0])
            >>> buffer.priorities(keys)[-1]
            tensor(2.)
        """
        on_device = isinstance(td, torch.Tensor) and td.is_cuda
        if on_device or self._sampler.pending.waiting or not self._segment.update(batch_or_keys, td):
            self._sampler.update_otherwise(batch_or_keys, td, on_device)
        if self._ignores_td:
            self._ignores_td = False
            warn_of_ignored(self._nonce, self._config.called, type(self.sampler).__name__)

    def flush(self) -> None:
        """Has all TD errors applied that this process has fed back; waits for those on their way from a device.

        Raises:
            ValueError: Some are NaN or infinite: they are dropped, and the others applied.

        Example:
            >>> batch = buffer.sample(4)
            >>> buffer.update_priorities(batch, torch.ones(4))  # of a model on a GPU, usually
            >>> buffer.flush()
            >>> buffer.stats().updated
            8
        """
        self._sampler.flush()

    # Looking into it

    def __len__(self) -> int:
        """Returns the number of rows held."""
        rows = self._segment.refresh(NEVER, False)
        assert rows is not None  # the buffer's end did not end the wait
        return rows

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self._config.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, or of the file."""
        return self._segment.nbytes

    @property
    def path(self) -> Path | None:
        """The file that holds the buffer; None when it lies in memory."""
        return Path(os.readlink(f"/proc/self/fd/{self._segment.fd}")) if self._segment.in_file else None

    @property
    def limiter(self) -> Limiter:
        """Who must wait. Set it to change it for every process at once. Processes that can go on under the new one do.

        None sets the default, `MinSize(1)`, as it does where a buffer is made.

        A new limiter counts from the moment at which it is set, as if its `min_size` items had just come and none had
        been drawn. Of the items inserted before, `min_size` count (or all, if there are fewer). Of the draws before,
        none count. So the balance of `SamplesPerInsert` starts in the middle of its bounds, and neither side has to
        make up for what was allowed before.

        Example:
            >>> buffer.limiter = tr.MinSize(1000)  # from now on draws wait for 1000 items
            >>> buffer.limiter
            MinSize(min_size=1000)
        """
        return from_native(*self._segment.limiter)

    @limiter.setter
    def limiter(self, limiter: Limiter | None) -> None:
        default: Limiter = MinSize()
        limiter = checked_kind("limiter", limiter, default, LIMITERS)
        self._config.require_replaces(limiter)
        self._segment.set_limiter(limiter.native())

    @property
    def policy_version(self) -> int:
        """The version of the learner's weights, 0 at first. All processes see it. It only grows: set it to what it is.

        `batch["age"]` and the sampler's `max_age` count from it. `SharedWeights.publish(module, buffer=buffer)` and
        `WeightPublisher(weights, buffer=buffer)` set it. Rows say theirs in a field `policy_version`.

        Example:
            >>> spec = {"obs": tr.Field(3), "policy_version": tr.Field((), torch.int64)}
            >>> rollouts = tr.ReplayBuffer(spec, capacity=100, sampler=tr.Fifo(max_age=1))
            >>> with rollouts.writer() as writer:
            ...     for version in (0, 1, 2):
            ...         writer.policy_version = version
            ...         key = writer.append(obs=torch.zeros(3))
            >>> rollouts.policy_version = 2
            >>> rollouts.sample(2)["age"]
            tensor([1, 0])
            >>> rollouts.stats().expired_items
            1
        """
        return self._segment.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._segment.policy_version = checked_int("policy_version", version, 0, MOST_VERSIONS)

    @property
    def draws(self) -> int:
        """Batches that this attached object has drawn: the position in its own stream of draws. Set it to resume."""
        return self._segment.step

    @draws.setter
    def draws(self, step: int) -> None:
        self._segment.step = checked_int("draws", step, 0, (1 << 48) - 1)

    @property
    def stream(self) -> int:
        """The number of this process's stream of draws. Set it to resume that of another process."""
        return self._segment.stream

    @stream.setter
    def stream(self, number: int) -> None:
        self._segment.stream = checked_int("stream", number, 0, (1 << 32) - 1)

    def stats(self) -> Stats:
        """Returns what has happened so far, over all processes.

        Example:
            >>> stats = buffer.stats()
            >>> stats.size, stats.inserted, stats.sampled, stats.updated
            (5, 5, 4, 4)
        """
        self._sampler.pending.apply_arrived()
        values = self._segment.stats()
        del values["smallest_leaf"]
        return Stats.of(values)

    def __repr__(self) -> str:
        named = "" if self.name is None else f"{self.name!r}, "
        if self._segment.closed:
            return f"ReplayBuffer({named}closed)"
        stats, names = self._segment.stats(), ", ".join("/".join(path) for path in self._config.fields)
        return (
            f"ReplayBuffer({named}{stats['size']:,}/{self.capacity:,} rows{_fill(stats)}, fields: {names}, "
            f"{self.nbytes / 2**20:,.1f} MiB {'shared' if self.path is None else f'in {self.path}'}, {self.view}, "
            f"{self.sampler}, {self.limiter}, {stats['writers']} writers{', stopped' if stats['stopped'] else ''})"
        )

    # Checkpoints

    def save(self, directory: str | os.PathLike[str] | IO[bytes]) -> None:
        """Saves the buffer while others go on writing and drawing.

        The directory gets a small JSON file and safetensors files with the rows. Rows are exact, each by itself; those
        written during the save may be in it or not. TD errors on their way from a device are waited for. A save that is
        killed leaves the one before as it was, and two saves into one directory follow each other.

        Within a loop over a `ReplayDataset` save its `state_dict()`, too: it alone has the batches drawn ahead. Without
        it the draws of a loaded buffer follow on the last batch handed out, by the priorities of then. What was drawn
        ahead counts as drawn: an epoch lacks these items, and with `max_draws` each has had a draw.

        Args:
            directory: Where to; made if need be. A checkpoint that is there is replaced. Or a binary file that is open
                for writing, such as an `io.BytesIO`: it gets the checkpoint as one archive, which lies in the directory
                of temporary files meanwhile.

        Raises:
            CheckpointError: The buffer is being restored, or was meanwhile.
            MemoryError: There is less than the 16 MiB that a save needs beside the buffer; nothing was written.
            OSError: The disk is full, or the directory cannot be written.
            ValueError: TD errors from a device are NaN or infinite, as `flush` says; nothing is saved.

        Example:
            >>> buffer.save("checkpoint")
            >>> len(tr.ReplayBuffer.load("checkpoint"))
            5
        """
        if is_file(directory, "write"):
            save_archive(directory, self.save)
            return
        root = checked_path("directory", directory)
        self.flush()
        save(self._segment, self._config, root)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str] | IO[bytes],
        capacity: int | None = None,
        *,
        view: View | None = None,
        path: str | os.PathLike[str] | None = None,
        sampler: Sampler | None = None,
        ragged_bytes: int | None = None,
    ) -> ReplayBuffer:
        """Returns a new buffer with the rows, keys, priorities and counters of a saved one.

        Training goes on as if nothing had happened: old batches' keys are still valid, and the draws follow on those
        that the saving process had made.

        With another view, such as another n, the same rows make other items. One that starts at the same row keeps its
        priority, any other starts as a new one. With another sampler the TD errors stay, as far as the priorities tell
        them; after `Uniform()` all items start as new ones.

        Args:
            directory: What `save` wrote; or a binary file that is open for reading, at the place where `save` began.
            capacity: Rows that fit; None: as before. Of more rows than fit the newest are loaded. A queue that waits
                loses no item so.
            view: Another view, of the same observations and flags; or the buffer's own with functions that a checkpoint
                does not hold, those of `Hindsight`. None: the buffer's own.
            path: A new file to hold the buffer; None: it lies in memory.
            sampler: Another sampler; or the buffer's own with a function for its beta, which a checkpoint does not
                hold. None: the buffer's own.
            ragged_bytes: For the values of ragged fields; None: as before. Where they are too few for all rows, the
                newest are loaded, and a warning with the number of the others is logged.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged.
            MemoryError: The machine or the cgroup has too little memory left, or this process may not map as much. A
                load needs 20 MiB beside the buffer, or the longest row if that is more.
            OSError: A file cannot be read, which does not mean that it is damaged; or `path` cannot be made, or is
                there already.
            ValueError: `capacity` or `ragged_bytes` is out of range, or too small for a queue's items or for the values
                of a row, which take a quarter at most. Or the rows lack what `view` needs, or `view` has not the same
                functions.
            TypeError: `view` is no view, or `sampler` no sampler.

        Example:
            >>> buffer.save("checkpoint")
            >>> loaded = tr.ReplayBuffer.load("checkpoint", capacity=1000, sampler=tr.Prioritized(alpha=0.8))
            >>> loaded.keys()
            tensor([0, 1, 2, 3, 4])
        """
        if is_file(directory, "read"):
            with opened_archive(directory) as unpacked:
                return cls.load(unpacked, capacity, view=view, path=path, sampler=sampler, ragged_bytes=ragged_bytes)
        directory = checked_path("directory", directory)
        path = None if path is None else checked_path("path", path)

        def load(saved: Description) -> ReplayBuffer:
            config = saved.config.loaded_with(view, sampler, capacity, ragged_bytes)
            rooms = reading_rooms(saved, directory)  # first: what is left then is for the buffer
            with new_segment(config, path, saved.seed, by_and_by=True) as (segment, nonce, reservation):
                wait = None if reservation.complete else reservation.wait
                load_rows(segment, config, saved, directory, wait, rooms)
            return cls._over(segment, nonce, config)

        return with_rows(directory, load)

    def restore(self, directory: str | os.PathLike[str]) -> None:
        """Does what `load` does to a buffer that is there and was never written to.

        Nobody sees a row before all are there. Of a restore that fails, or whose process dies, none stays; their keys
        are not given again, and another restore may follow. What explorers write meanwhile can be drawn when it is
        over, and is newer than what was saved. Ctrl-C may come too late to keep it from being done.

        Args:
            directory: What `save` wrote, of a buffer with the same spec. Capacity, view, sampler and `ragged_bytes`
                may be others, as for `load`.

        Raises:
            CheckpointError: There is no checkpoint, it is damaged or of another kind, the buffer holds rows already, or
                somebody else restores it.
            MemoryError: There is too little memory to read with: see `load`.
            OSError: A file cannot be read, which does not mean that it is damaged.
            ValueError: `capacity` or `ragged_bytes` is too small, as for `load`.

        Example:
            >>> buffer.save("checkpoint")
            >>> empty = tr.ReplayBuffer(spec, capacity=100)  # explorers may be attached already
            >>> empty.restore("checkpoint")
            >>> len(empty)
            5
        """
        root = checked_path("directory", directory)
        with_rows(root, lambda saved: load_rows(self._segment, self._config, saved, root))

    # Life cycle

    def stop(self) -> None:
        """Stops the buffer: `stopped` is True in every process, and waiting calls raise `Stopped`.

        Example:
            >>> buffer.stop()
            >>> buffer.stopped
            True
        """
        self._segment.stop()

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called, in any process. One atomic read."""
        return self._segment.stopped

    def close(self) -> None:
        """Detaches this object; other processes keep the buffer. Using it again is a `RuntimeError`. Idempotent.

        That error is `Stopped` where the buffer was stopped first: so it is in threads that wait or go on meanwhile.

        From now on nobody attaches by a handle that names this process. Another process that has the buffer gives
        handles that name itself.

        What it was made of (`spec`, `capacity`, `sampler`, `view`) is still known, and `flush` has nothing to do.
        Its writers write no more: their calls are a `RuntimeError` as well. They and `storage`, while they are held,
        keep the memory mapped. The last process to leave a file waits until everything is on the disk. Explorers on
        other nodes of a Ray cluster need the process that made the buffer: once it has closed it, none can begin to
        write from there.

        Raises:
            ValueError: TD errors from a device are NaN or infinite, as `flush` says; the buffer is closed.
            OSError: The disk does not take the file, whose last user this is; the buffer is closed. The file can be
                opened again until the machine restarts.

        Example:
            >>> with buffer:  # closes it at the end
            ...     batch = buffer.sample(4)
            >>> buffer
            ReplayBuffer(closed)
        """
        self._local = threading.local()
        self._sampler.close()

    def expect_writers(self) -> WriterLease:
        """Announces that writers will come, or come back: `sample` then waits for them instead of giving up.

        Returns:
            An object to `close()` when no more will come; it ends with the process as well.

        Example:
            >>> lease = buffer.expect_writers()  # explorers are about to be started
            >>> batch = buffer.sample(4, timeout=60)
            >>> lease.close()
        """
        return WriterLease(self._segment)

    def __enter__(self) -> ReplayBuffer:
        if self._segment.closed:
            raise RuntimeError(f"{self._config.called} is closed")
        return self


def _fill(stats: dict[str, Any]) -> str:
    """Returns what is to be said of the values of ragged fields, after the rows."""
    total = stats["ragged_bytes"]
    return f", {stats['ragged_fill']:.0%} of {total / 2**20:,.1f} MiB for ragged values" if total else ""


def local_sampler(buffer: ReplayBuffer) -> LocalSampler:
    """Returns what `buffer` draws with, which knows its memory. For the other rooms of this package."""
    return buffer._sampler


def collecting_buffer(config: Config) -> ReplayBuffer:
    """Returns a buffer that collects rows for another one: pages that are never used take no memory.

    For the other rooms of this package.
    """
    with new_segment(config, None, 0, by_and_by=False, pages_when_used=True) as (segment, nonce, _):
        return ReplayBuffer._over(segment, nonce, config)


def draw(buffer: ReplayBuffer, batch_size: int, beta: Schedule | None = None) -> ReplayBatch:
    """Returns what `buffer.sample` does, and warns of nothing: for calls of libraries that take what there is.

    Raises:
        ValueError: The buffer is a queue: these libraries draw as often as they like.
    """
    if buffer._is_queue:
        raise ValueError(f"the buffer's sampler is {buffer.sampler}: a queue is drawn from by its own sample() alone")
    return buffer._sampler.draw(batch_size, beta, None, Wait)


Buffer = TypeVar("Buffer", bound=ReplayBuffer)


def attached_here(kind: type[Buffer], handle: Handle, view: View | None = None) -> Buffer:
    """Does what `kind.attach` does, for a buffer that is on this node. For the other rooms of this package."""
    try:
        segment, config = attached_segment(open_handle(handle, "replay buffer"), handle.nonce, view)
    except ConnectionError as error:
        raise AttachError(str(error)) from None
    self = kind._over(segment, handle.nonce, config)
    self._origin, self._sampler.delivery_log = handle, handle.delivery_log
    return self


def attached(kind: type[ReplayBuffer], *given: Any) -> WritableReplay:
    """Returns `kind.attach(*given)`. Pickles name it: cloudpickle, and so Ray, writes a method out as its code."""
    return kind.attach(*given)
