"""Saving a buffer while explorers write to it, and loading it again.

A checkpoint is a directory: `checkpoint.json` describes the buffer and names a subdirectory of safetensors files with
the rows.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchreplay import _C
from torchreplay.checkpoint.description import (
    ROW_COLUMNS,
    Description,
    RowsGone,
    column_names,
    require_alike,
    without_grid,
)
from torchreplay.checkpoint.directory import replace_checkpoint
from torchreplay.checkpoint.lost_items import LostItems
from torchreplay.checkpoint.safetensors_io import (
    BLOCK,
    header_of,
    read_shard,
    require_size,
    room_for,
    write_packed,
    write_shard,
)
from torchreplay.errors import CheckpointError
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import from_native
from torchreplay.schema.samplers import Prioritized, Sampler
from torchreplay.segment.progress import track
from torchreplay.segment.reservation import SPARE, page_tables, require_memory_beside, size_text
from torchreplay.segment.thread_pool import Future, ThreadPool

T = TypeVar("T")

ROW_PLACE = 64
"""Bytes in which all of them have a place."""
SHARD_BYTES = 4 << 20
"""Bytes of the rows in a file. Files of 32 MB save no faster, and a save has three in memory."""
WRITES, READS = 2, 3
"""Files written and read at a time: while one waits for the disk, another is copied and its checksum computed."""
PIECE = 1 << 20
"""Bytes of a row too long for that which are given to the disk at a time."""
READ_BYTES = 32 << 20
"""Bytes that files which are read at a time may have together, but for a single one: format 4 once had files of so
many."""


def save(segment: _C.Segment, config: Config, directory: str | os.PathLike[str]) -> None:
    """Saves a buffer; see `ReplayBuffer.save`.

    Raises:
        CheckpointError: It is being restored.
        MemoryError: There is too little memory to save with; nothing was written.
    """
    config.fixed_fields("save()")
    packing = _Packing(config)
    rooms = _rooms(WRITES + 1, packing.room_bytes, "saving the replay buffer", segment.nbytes)

    def write(data: Path) -> dict[str, Any]:
        imports = segment.imports
        written = _write_shards(segment, packing, data, rooms)
        shards = tuple((f"{data.name}/{file}", size, crc) for file, size, crc in written)
        counts, limiter = segment.counts()  # after the rows: every key that was saved is below the head
        stream, step = segment.draws_go_on
        if segment.imports != imports:
            raise BufferError("the buffer was restored meanwhile: save it again")
        now = replace(config, limiter=from_native(*limiter))
        version = segment.policy_version
        return Description(now, segment.seed, stream, step, counts, shards, policy_version=version).as_data()

    try:
        replace_checkpoint(Path(directory), "rows", write)
    except BufferError as error:
        raise CheckpointError(str(error)) from None


def _rooms(count: int, size: int, what: str, mapped: int) -> list[torch.Tensor]:
    """Returns all the memory that a save, or a load, takes beside a buffer of `mapped` bytes.

    Raises:
        MemoryError: There is too little.
    """
    need = count * size + page_tables(mapped) + SPARE
    require_memory_beside(need, what)
    try:
        return [room_for(size) for _ in range(count)]
    except MemoryError as error:  # under RLIMIT_AS
        raise MemoryError(f"{what} needs {size_text(need)} of memory: {error}") from None


class _Packing:
    """How the rows of a buffer lie in files.

    Attributes:
        columns: Type and shape of a row's values in each tensor.
        row_bytes: Of a row, in all tensors.
        slots: Of the rows in a file; 0: a row is too long for one, and is written piece by piece.
        header_bytes: With which each file begins, so that what follows is aligned.
        room_bytes: Memory from which a file is written.
    """

    def __init__(self, config: Config) -> None:
        fields = [(field.dtype, field.shape) for field in config.fields.values()]
        kept = [(dtype, ()) for dtype in ROW_COLUMNS.values()]
        self.columns = dict(zip(column_names(config), [*fields, *kept], strict=True))
        self.row_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.columns.values())
        self.slots = min(config.capacity, SHARD_BYTES // self.row_bytes)
        self.header_bytes = _whole_blocks(len(self.header(self.slots)))
        self.room_bytes = self.header_bytes + _whole_blocks(self.slots * self.row_bytes or PIECE)
        self.starts = range(0, config.capacity, max(1, self.slots))

    def header(self, rows: int, size: int = 0) -> bytes:
        """Returns what a file of so many rows begins with, of `size` bytes at least."""
        return header_of({name: (dtype, (rows, *shape)) for name, (dtype, shape) in self.columns.items()}, size)

    def pack(self, segment: _C.Segment, first: int, room: torch.Tensor) -> Callable[[Path], tuple[int, int]] | None:
        """Copies the rows of a file, from slot `first` on, to `room`; returns what writes it. None: there are none."""
        if not self.slots:
            return self._long_row(segment, first, room)
        end = min(first + self.slots, self.starts.stop)
        rows = segment.pack_rows(first, end, room[self.header_bytes :].numpy().data, True)
        if not rows:
            return None
        room.numpy().data[: self.header_bytes] = self.header(rows, self.header_bytes)
        return partial(write_packed, size=self.header_bytes + rows * self.row_bytes, room=room)

    def pack_whole(self, segment: _C.Segment, slot: int) -> Callable[[Path], tuple[int, int]] | None:
        """Does what `pack` does for a long row that others rewrite, in memory for a whole row: the copy is exact."""
        room = room_for(self.header_bytes + self.row_bytes)
        if not segment.pack_rows(slot, slot + 1, room[self.header_bytes :].numpy().data, True):
            return None
        room.numpy().data[: self.header_bytes] = self.header(1, self.header_bytes)
        return partial(write_packed, size=self.header_bytes + self.row_bytes, room=room)

    def is_there(self, segment: _C.Segment, slot: int, room: torch.Tensor) -> bool:
        """Returns whether the long row that was packed from `slot` was still there when it had been written."""
        key, *_ = self._beside(room[:ROW_PLACE])
        return bool(segment.pack_rows(slot, slot + 1, room[ROW_PLACE : 2 * ROW_PLACE].numpy().data, False)) and (
            torch.equal(key, self._beside(room[ROW_PLACE:])[0])
        )

    def _long_row(self, segment: _C.Segment, slot: int, room: torch.Tensor) -> Callable[[Path], tuple[int, int]] | None:
        if not segment.pack_rows(slot, slot + 1, room[:ROW_PLACE].numpy().data, False):
            return None
        fields = len(self.columns) - len(ROW_COLUMNS)
        row = [*(segment.column(field)[slot].unsqueeze(0) for field in range(fields)), *self._beside(room)]
        return partial(write_shard, tensors=dict(zip(self.columns, row, strict=True)), room=room[BLOCK:])

    @staticmethod
    def _beside(place: torch.Tensor) -> list[torch.Tensor]:
        """Returns what a row has beside its fields, from where it was packed to."""
        tensors, at = dict[str, torch.Tensor](), 0
        for name, dtype in sorted(ROW_COLUMNS.items(), key=lambda column: -column[1].itemsize):
            tensors[name] = place[at : at + dtype.itemsize].view(dtype)
            at += dtype.itemsize
        return [tensors[name] for name in ROW_COLUMNS]


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _write_shards(
    segment: _C.Segment, packing: _Packing, data: Path, rooms: list[torch.Tensor]
) -> list[tuple[str, int, int]]:
    """Copies rows out while those before them are on their way to the disk."""
    shards: list[tuple[str, int, int]] = []
    pending: deque[tuple[Path, int, torch.Tensor, int, Future[tuple[int, int]]]] = deque()
    free = list(rooms)

    def finish_first() -> None:
        path, first, room, rewrites, written = pending.popleft()
        size, checksum = writers.result(written)
        free.append(room)
        if not packing.slots:
            again = None
            if packing.is_there(segment, first, room):
                if rewrites % 2 == 0 and segment.rewrites == rewrites:
                    shards.append((path.name, size, checksum))
                    return
                again = packing.pack_whole(segment, first)  # what was written may be old and new values
            path.unlink()
            if again is None:
                return
            size, checksum = again(path)
        shards.append((path.name, size, checksum))

    with ThreadPool(WRITES) as writers:
        for number, first in enumerate(track(packing.starts, "saving the replay buffer")):
            if not free:
                finish_first()
            rewrites = segment.rewrites
            write = packing.pack(segment, first, free[-1])
            if write is not None:
                path = data / f"{number:05}.safetensors"
                pending.append((path, first, free.pop(), rewrites, writers.submit(write, path)))
        while pending:
            finish_first()
    return shards


def load_rows(
    segment: _C.Segment,
    config: Config,
    description: Description,
    directory: str | os.PathLike[str],
    wait_for_memory: Callable[[int], None] | None = None,
    rooms: Sequence[torch.Tensor] | None = None,
) -> None:
    """Places the rows of a checkpoint into a segment that holds none: all of them, or after an error or a death none.

    Args:
        segment: To place them into.
        config: The segment's.
        description: Of the checkpoint.
        directory: Where it is.
        wait_for_memory: Returns once there is memory for so many of the first slots; None: there is for all.
        rooms: What `reading_rooms` returned; None: it is asked.

    Raises:
        MemoryError: There is too little memory to read with.
        OSError: A file cannot be read, which says nothing about what is in it.
        CheckpointError: A file is missing or damaged, the segment is of another kind or holds rows, or somebody else
            restores it.
    """
    saved, root = description.config, Path(directory)
    require_alike(saved, config, root)
    names = description.columns
    rooms = reading_rooms(description, root, segment.nbytes) if rooms is None else rooms
    leaf_column, key_column = (len(saved.fields) + list(ROW_COLUMNS).index(name) for name in ("/leaf", "/key"))
    leaves = _leaves_for(config.sampler, saved.sampler)
    same_items = saved.view.native() == config.view.native() and saved.capacity <= config.capacity
    others = leaves is not None or not same_items  # than those of the checkpoint
    counts = without_grid(description.counts) if others else description.counts
    lost = LostItems(saved, config)
    try:
        rows = _C.Import(segment, int(description.counts[0]))
        try:
            for columns in _read_shards(description.shards, root, names, rooms):
                if leaves is not None:
                    columns[leaf_column] = leaves(columns[leaf_column])
                if wait_for_memory is not None:
                    wait_for_memory(_slots_of(columns[key_column], config.capacity))
                lost.add(columns)
                rows.place(columns)
            if complaint := lost.complaint():
                raise CheckpointError(f"the queue in {root} does not fit: {complaint}")
            if wait_for_memory is not None:
                wait_for_memory(config.capacity)
            segment.policy_version = max(segment.policy_version, description.policy_version)
            rows.finish(counts, saved.limiter.native(), description.seed, description.stream, description.step)
        finally:
            rows.abandon()
    except BufferError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint in {root} is damaged: {error}") from None


def _slots_of(keys: torch.Tensor, capacity: int) -> int:
    """Returns how many of the first slots hold the rows with such keys; all of what are no keys."""
    # By numpy: torch would do it in several threads, in which a forked child can hang.
    return int((keys.numpy() % capacity).max()) + 1 if keys.dtype == torch.int64 and keys.numel() else capacity


def _leaves_for(sampler: Sampler, saved: Sampler) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns what makes leaves of one sampler those of another, (|td| + eps)^alpha; None: they are the same.

    Args:
        sampler: Of the leaves wanted.
        saved: Of those given. Where all leaves are alike, no TD error is known: all items start anew.
    """

    def exponents(of: Sampler) -> tuple[float, float]:
        return (of.alpha, of.eps) if isinstance(of, Prioritized) else (0.0, 0.0)

    (alpha, eps), (alpha_before, eps_before) = exponents(sampler), exponents(saved)
    if (alpha, eps) == (alpha_before, eps_before):
        return None

    def convert(leaves: torch.Tensor) -> torch.Tensor:
        if not alpha_before:
            return torch.zeros_like(leaves)
        errors = (leaves.double() ** (1 / alpha_before) - eps_before).clamp(min=0.0)
        wanted = ((errors + eps) ** alpha).float().clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(leaves > 0, wanted, 0.0)

    return convert


def reading_rooms(description: Description, root: Path, mapped: int = 0) -> list[torch.Tensor]:
    """Returns the memory that files of rows are read to: all that a load takes beside the buffer.

    Args:
        description: Of the checkpoint.
        root: Where it is.
        mapped: Bytes of the buffer; 0: it is made later, and takes care of itself.

    Raises:
        MemoryError: There is too little.
        CheckpointError: The largest file is missing or damaged.
    """
    shards = description.shards
    if not shards:
        return []
    name, size, _ = max(shards, key=lambda shard: shard[1])
    with _damage_named(root / name):
        require_size(root / name, size)  # which may be anything: it is what the description says
    size = max(size, 1)
    count = min(READS + 1, len(shards), max(1, READ_BYTES // size))
    return _rooms(count, size, "loading the replay buffer", mapped)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Makes a CheckpointError of what says that a file is damaged, and of nothing else."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RowsGone(f"{path} is damaged: {error!r}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from None


def _read_shards(
    shards: tuple[tuple[str, int, int], ...], root: Path, names: list[str], rooms: Sequence[torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    """Yields the columns of one file while the next are read. They last until the next are asked for."""

    def read(number: int) -> list[torch.Tensor]:
        name, size, checksum = shards[number]
        with _damage_named(root / name):
            return read_shard(root / name, size, checksum, names, rooms[number % len(rooms)])

    with ThreadPool(min(READS, len(rooms))) as readers:
        ahead = deque[Future[list[torch.Tensor]]]()
        for number in track(range(len(shards)), "loading the replay buffer"):
            while number + len(ahead) < min(number + len(rooms), len(shards)):
                ahead.append(readers.submit(read, number + len(ahead)))
            yield readers.result(ahead.popleft())
