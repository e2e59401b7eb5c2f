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
from typing import Any, NamedTuple, TypeVar

import torch

from torchreplay import _C
from torchreplay.checkpoint.description import (
    HEAD,
    ROW_COLUMNS,
    Description,
    RowsGone,
    column_names,
    lengths_of,
    require_alike,
    without_grid,
)
from torchreplay.checkpoint.directory import replace_checkpoint
from torchreplay.checkpoint.joined_rows import JoinedRows, counts_of, joined
from torchreplay.checkpoint.lost_items import LostItems
from torchreplay.checkpoint.safetensors_io import (
    BLOCK,
    header_of,
    read_columns,
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
from torchreplay.schema.spec import Field, Ragged, length_names
from torchreplay.segment.progress import track
from torchreplay.segment.reservation import SPARE, page_tables, require_memory_beside, size_text
from torchreplay.segment.thread_pool import Future, ThreadPool
from torchreplay.segment.waits import logger

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
MAX_LENGTH = (1 << 31) - 1
"""Elements of the longest value."""
PLANNED_BYTES = 24
"""Bytes that a load keeps of each row with ragged fields: where its values will lie."""


def save(segment: _C.Segment, config: Config, directory: str | os.PathLike[str]) -> None:
    """Saves a buffer; see `ReplayBuffer.save`.

    Raises:
        CheckpointError: It is being restored.
        MemoryError: There is too little memory to save with; nothing was written.
    """
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


def _rooms(count: int, size: int, what: str, mapped: int, more: int = 0) -> list[torch.Tensor]:
    """Returns all the memory that a save, or a load, takes beside a buffer of `mapped` bytes, and `more` bytes.

    Raises:
        MemoryError: There is too little.
    """
    need = count * size + more + page_tables(mapped) + SPARE
    require_memory_beside(need, what)
    try:
        return [room_for(size) for _ in range(count)]
    except MemoryError as error:  # under RLIMIT_AS
        raise MemoryError(f"{what} needs {size_text(need)} of memory: {error}") from None


class _Packed(NamedTuple):
    """The rows of a file, copied to a room.

    Attributes:
        next: The first slot that is not looked at yet.
        write: Writes the file, and returns its size and checksum; None: there are no rows.
        long_row: Bytes of the only row, which is too long for the room: it is written from where it lies. 0: it is not.
    """

    next: int
    write: Callable[[Path], tuple[int, int]] | None
    long_row: int = 0


class _Packing:
    """How the rows of a buffer lie in files.

    Attributes:
        row_bytes: Of a row, in all tensors but those of ragged fields.
        slots: Of the rows in a file, at most; 0: a row is too long for one, and is written piece by piece.
        header_bytes: With which each file begins, so that what follows is aligned.
        room_bytes: Memory from which a file is written.
        starts: Slots in which files begin.
    """

    def __init__(self, config: Config) -> None:
        fields = list(config.fields.values())
        self._names, self._groups = column_names(config), len(length_names(config.fields))
        kept = [*[torch.uint32] * self._groups, *ROW_COLUMNS.values()]
        self._kinds = [*((field.dtype, field.shape) for field in fields), *((dtype, ()) for dtype in kept)]
        self._ragged = [place for place, field in enumerate(fields) if isinstance(field, Ragged)]
        self._leaders = [list(config.fields).index(tuple(name.split("/"))) for name in length_names(config.fields)]
        self.row_bytes = sum(field.nbytes for field in fields if isinstance(field, Field))
        self.row_bytes += sum(dtype.itemsize for dtype in kept)
        self.slots = min(config.capacity, SHARD_BYTES // self.row_bytes)
        self.header_bytes = _whole_blocks(len(self.header(self.slots, [MAX_LENGTH] * len(self._ragged))))
        values = SHARD_BYTES if self._ragged else self.slots * self.row_bytes
        self.room_bytes = self.header_bytes + _whole_blocks(values or PIECE)
        self.starts = range(0, config.capacity, max(1, self.slots))

    def header(self, rows: int, elements: Sequence[int] = (), size: int = 0) -> bytes:
        """Returns what a file begins with, of `size` bytes at least.

        Args:
            rows: In the file.
            elements: Of each ragged field.
            size: In bytes.
        """
        counts = [rows] * len(self._names)
        for place, count in zip(self._ragged, elements, strict=True):
            counts[place] = count
        columns = zip(self._names, self._kinds, counts, strict=True)
        return header_of({name: (dtype, (count, *shape)) for name, (dtype, shape), count in columns}, size)

    def pack(self, segment: _C.Segment, first: int, end: int, room: torch.Tensor) -> _Packed:
        """Copies the rows of a file to `room`: of slots from `first` on, before `end`."""
        long_row = self.row_bytes
        if self.slots or self._ragged:
            packed = self._fill(segment, first, end, room)
            if packed.next > first:
                return packed
            long_row = packed.long_row
        return _Packed(first + 1, self._long_row(segment, first, room), long_row)

    def pack_whole(self, segment: _C.Segment, slot: int, size: int) -> Callable[[Path], tuple[int, int]] | None:
        """Returns what writes a long row of so many bytes that others rewrite, of which it makes an exact copy."""
        return self._fill(segment, slot, slot + 1, room_for(self.header_bytes + size)).write

    def is_there(self, segment: _C.Segment, slot: int, room: torch.Tensor) -> bool:
        """Returns whether the long row that was packed from `slot` was still there when it had been written."""
        key, *_ = self._beside(room[:ROW_PLACE])
        _, there, _, _ = segment.pack_rows(slot, slot + 1, room[ROW_PLACE : 2 * ROW_PLACE].numpy().data, False)
        if not there or not torch.equal(key, self._beside(room[ROW_PLACE:])[0]):
            return False
        return not self._ragged or segment.is_whole(slot, int(key))

    def _fill(self, segment: _C.Segment, first: int, end: int, room: torch.Tensor) -> _Packed:
        end, rows, elements, size = segment.pack_rows(first, end, room[self.header_bytes :].numpy().data, True)
        if not rows:
            return _Packed(end, None, size)
        room.numpy().data[: self.header_bytes] = self.header(rows, elements, self.header_bytes)
        kinds = [self._kinds[place] for place in self._ragged]
        of_ragged = (n * _bytes_of(*kind) for n, kind in zip(elements, kinds, strict=True))
        size = self.header_bytes + rows * self.row_bytes + sum(of_ragged)
        return _Packed(end, partial(write_packed, size=size, room=room))

    def _long_row(self, segment: _C.Segment, slot: int, room: torch.Tensor) -> Callable[[Path], tuple[int, int]] | None:
        _, there, _, _ = segment.pack_rows(slot, slot + 1, room[:ROW_PLACE].numpy().data, False)
        if not there:
            return None
        if (fields := segment.row_values(slot)) is None:
            return None
        lengths = [torch.tensor([len(fields[place])], dtype=torch.uint32) for place in self._leaders]
        row = [*fields, *lengths, *self._beside(room)]
        return partial(write_shard, tensors=dict(zip(self._names, row, strict=True)), room=room[BLOCK:])

    @staticmethod
    def _beside(place: torch.Tensor) -> list[torch.Tensor]:
        """Returns what a row has beside its fields, from where it was packed to."""
        tensors, at = dict[str, torch.Tensor](), 0
        for name, dtype in sorted(ROW_COLUMNS.items(), key=lambda column: -column[1].itemsize):
            tensors[name] = place[at : at + dtype.itemsize].view(dtype)
            at += dtype.itemsize
        return [tensors[name] for name in ROW_COLUMNS]


def _bytes_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _write_shards(
    segment: _C.Segment, packing: _Packing, data: Path, rooms: list[torch.Tensor]
) -> list[tuple[str, int, int]]:
    """Copies rows out while those before them are on their way to the disk."""
    shards: list[tuple[str, int, int]] = []
    pending: deque[tuple[Path, int, _Packed, torch.Tensor, int, Future[tuple[int, int]]]] = deque()
    free = list(rooms)

    def finish_first() -> None:
        path, slot, packed, room, rewrites, written = pending.popleft()
        size, checksum = writers.result(written)
        free.append(room)
        if packed.long_row:
            again = None
            if packing.is_there(segment, slot, room):
                if rewrites % 2 == 0 and segment.rewrites == rewrites:
                    shards.append((path.name, size, checksum))
                    return
                again = packing.pack_whole(segment, slot, packed.long_row)  # what was written may be old and new values
            path.unlink()
            if again is None:
                return
            size, checksum = again(path)
        shards.append((path.name, size, checksum))

    def free_room() -> torch.Tensor:
        if not free:
            finish_first()
        return free[-1]

    with ThreadPool(WRITES) as writers:
        for number, (slot, rewrites, packed) in enumerate(_each_packed(segment, packing, free_room)):
            assert packed.write is not None
            path = data / f"{number:05}.safetensors"
            pending.append((path, slot, packed, free.pop(), rewrites, writers.submit(packed.write, path)))
        while pending:
            finish_first()
    return shards


def _each_packed(
    segment: _C.Segment, packing: _Packing, room: Callable[[], torch.Tensor]
) -> Iterator[tuple[int, int, _Packed]]:
    """Yields the rows of each file that has any, with their first slot, and the rewrites before they were copied.

    Args:
        segment: That is saved.
        packing: Of its rows.
        room: Returns memory for the next.
    """
    for start in track(packing.starts, "saving the replay buffer"):
        first, end = start, min(start + packing.starts.step, packing.starts.stop)
        while first < end:
            place, rewrites = room(), segment.rewrites
            packed = packing.pack(segment, first, end, place)
            if packed.write is not None:
                yield first, rewrites, packed
            first = packed.next


def load_rows(
    segment: _C.Segment,
    config: Config,
    description: Description,
    directory: str | os.PathLike[str],
    wait_for_memory: Callable[[int], None] | None = None,
    rooms: Sequence[torch.Tensor] | None = None,
    others: Sequence[Path] = (),
) -> None:
    """Places the rows of a checkpoint into a segment that holds none: all of them, or after an error or a death none.

    Args:
        segment: To place them into.
        config: The segment's.
        description: Of the checkpoint.
        directory: Where it is.
        wait_for_memory: Returns once there is memory for so many of the first slots; None: there is for all.
        rooms: What `reading_rooms` returned; None: it is asked.
        others: Where other checkpoints are whose rows come as well, behind those of this one and under other keys: see
            `joined`. Of no queue, and of a view and a sampler like this one's.

    Raises:
        MemoryError: There is too little memory to read with.
        OSError: A file cannot be read, which says nothing about what is in it.
        CheckpointError: A file is missing or damaged, the segment is of another kind or holds rows, or somebody else
            restores it.
        ValueError: The segment has too few slots or bytes: for a queue's items, or for the values of a row.
    """
    saved, root = description.config, Path(directory)
    require_alike(saved, config, root)
    with _damage_named(root):
        parts = joined(description, root, others, config.capacity) if others else []
    for each in parts:
        require_alike(each.description.config, config, each.root)
    sources: list[tuple[Description, Path, JoinedRows | None]] = [(description, root, None)]
    sources += [(part.description, part.root, part) for part in parts]
    leaves = _leaves_for(config.sampler, saved.sampler)
    same_items = saved.view.native() == config.view.native() and saved.capacity <= config.capacity and not parts
    counts = counts_of(description.counts, parts)
    counts = counts if leaves is None and same_items else without_grid(counts)
    lost = LostItems(saved, config)
    try:
        rows = _C.Import(segment)
        try:
            for source in sources:
                _expect_lengths(rows, *source)
            rows.begin(int(counts[HEAD]))
            for source in sources:
                for path, columns in _each_file(*source, segment.nbytes, rooms, leaves):
                    _place(rows, columns, path, config, wait_for_memory, lost)
            left_out = rows.left_out()
            if complaint := lost.complaint(left_out):
                raise _Unfit(complaint)
            if wait_for_memory is not None:
                wait_for_memory(config.capacity)
            counts = without_grid(counts) if len(left_out) else counts
            draws = description.seed, description.stream, description.step
            rows.finish(counts, saved.limiter.native(), *draws, description.policy_version)
        finally:
            rows.abandon()
    except _Unfit as error:
        raise ValueError(f"the checkpoint in {root} is intact, and does not fit: {error}") from None
    except BufferError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, TypeError) as error:
        raise _damaged(root, error) from None
    tell_left_out(f"the checkpoint in {root}", left_out, config)


def _place(
    rows: _C.Import,
    columns: list[torch.Tensor],
    path: Path,
    config: Config,
    wait_for_memory: Callable[[int], None] | None,
    lost: LostItems,
) -> None:
    """Places the rows of a file."""
    try:
        if wait_for_memory is not None:
            keys = columns[list(ROW_COLUMNS).index("/key") - len(ROW_COLUMNS)]
            wait_for_memory(_slots_of(keys, config.capacity))
        lost.add(columns)
        rows.place(columns)
    except (ValueError, TypeError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return (
        error
        if isinstance(error, CheckpointError)
        else CheckpointError(f"the checkpoint in {path} is damaged: {error}")
    )


class _Unfit(Exception):
    """The rows are sound, and need a larger buffer."""


def tell_left_out(source: str, keys: torch.Tensor, config: Config) -> None:
    """Logs a warning where rows have no place in a buffer, which has too few bytes for the values of all.

    Args:
        source: What they come from.
        keys: Of these rows.
        config: Of the buffer.
    """
    if len(keys):
        logger.warning(
            "%s: left out the oldest %s rows, up to key %s: ragged_bytes is %s, too few for the values of all",
            source,
            f"{len(keys):,}",
            f"{int(keys.numpy().max()):,}",
            f"{config.ragged_bytes:,}",
        )


def _expect_lengths(rows: _C.Import, description: Description, root: Path, part: JoinedRows | None) -> None:
    """Has an import expect the rows of a checkpoint with ragged fields: all, or those of a part.

    Raises:
        CheckpointError: A file is damaged.
        _Unfit: The values of a row need more bytes.
    """
    for name, beside in _lengths(description, root):
        if part is not None:
            stays, keys = part.places(beside[0].numpy())
            beside = [torch.from_numpy(column[stays]) for column in (keys, *(each.numpy() for each in beside[1:]))]
        try:
            unfit = rows.expect(beside, description.config.ragged_bytes or 0)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"the checkpoint in {root / name} is damaged: {error}") from None
        if unfit:
            raise _Unfit(unfit)


def _lengths(description: Description, root: Path) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields of each file with ragged fields its name, and the keys and all lengths of its rows."""
    if not description.config.ragged:
        return
    names = [description.columns[-len(ROW_COLUMNS)], *lengths_of(description.config)]
    for name, size, _ in description.shards:
        with _damage_named(root / name):
            columns = read_columns(root / name, size, names)
        yield name, columns


def _each_file(
    description: Description,
    root: Path,
    part: JoinedRows | None,
    mapped: int,
    rooms: Sequence[torch.Tensor] | None,
    leaves: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Iterator[tuple[Path, list[torch.Tensor]]]:
    """Yields each file of a checkpoint and its rows, or those of a part, with other leaves where `leaves` is given."""
    rooms = reading_rooms(description, root, mapped) if rooms is None or part is not None else rooms
    leaf_column = list(ROW_COLUMNS).index("/leaf") - len(ROW_COLUMNS)
    for (name, _, _), columns in zip(
        description.shards, _read_shards(description.shards, root, description.columns, rooms), strict=True
    ):
        if leaves is not None:
            columns[leaf_column] = leaves(columns[leaf_column])
        yield root / name, columns if part is None else part.moved(columns)


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
    rows = min(description.config.capacity, int(description.counts[0])) if description.config.ragged else 0
    return _rooms(count, size, "loading the replay buffer", mapped, rows * PLANNED_BYTES)


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
