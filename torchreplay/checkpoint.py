"""Saving a buffer while explorers write to it, and loading it again.

A checkpoint is a directory: `checkpoint.json` describes the buffer and names a subdirectory of safetensors files with
the rows.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import _C
from .arguments import checked_int
from .checkpoint_directory import read_description, replace_checkpoint, with_description
from .config import Config
from .crew import Crew
from .errors import CheckpointError
from .limiters import from_native
from .progress import track
from .samplers import Prioritized, Sampler
from .shards import read_shard, room_for, write_shard

T = TypeVar("T")

FORMAT = 5
FORMATS = (3, 4, FORMAT)
"""Those that are read."""
ROW_COLUMNS = ("/key", "/leaf", "/link", "/step", "/priority")
"""What rows have beside their fields, whose names hold no empty part."""
ROW_COLUMNS_3 = ("row.key", "row.leaf", "row.link", "row.step", "row.priority")
"""Their names in format 3, in which they took the place of fields that have the same."""
METADATA = "__metadata__"
"""What the safetensors format keeps for itself."""
SHARD_BYTES = 32 << 20
WRITES, READS = 2, 3
"""Files written and read at a time: while one waits for the disk, another is copied and its checksum computed."""
PIECE = 2 << 20
"""Bytes given to the disk at a time."""
MAX_COUNT = (1 << 64) - 1
MAX_STREAM = (1 << 32) - 1
MAX_GRID = (1 << 63) - 1
COUNTS = 15
GRID = 2
"""The last of them: the grid of the priorities, which formats 3 and 4 do not tell. All zeros: what fits the leaves."""
MAX_RAW = 9
"""Which of them is the largest |td| seen."""
SHARD_NAME = re.compile(r"rows-[0-9a-f]+/[0-9]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Description:
    """What `checkpoint.json` says.

    Attributes:
        config: The buffer's arguments.
        seed: Of its draws.
        stream: Number of the saving process's stream of draws.
        step: Its position there.
        counts: The segment's counters.
        shards: (file, bytes, checksum) of the files with rows.
        format: Of the files.
    """

    config: Config
    seed: int
    stream: int
    step: int
    counts: tuple[int | float, ...]
    shards: tuple[tuple[str, int, int], ...]
    format: int = FORMAT

    def as_data(self) -> dict[str, Any]:
        """Returns the description as what JSON can hold."""
        return {
            "format": self.format,
            "config": json.loads(self.config.to_text()),
            "seed": self.seed,
            "stream": self.stream,
            "step": self.step,
            "counts": self.counts,
            "shards": self.shards,
        }

    @classmethod
    def from_data(cls, parts: Mapping[str, Any]) -> Description:
        """Returns what `as_data` described.

        Raises:
            ValueError: It is damaged, or of another format.
        """
        if "kind" in parts:
            raise ValueError(f"it is of a {parts['kind']}: {parts['kind']}.load(directory) brings it back")
        if parts["format"] not in FORMATS:
            read = f"{', '.join(map(str, FORMATS[:-1]))} and {FORMAT}"
            raise ValueError(f"it has format {parts['format']}, this version of torchreplay reads formats {read}")
        config = Config.from_text(json.dumps(parts["config"]))
        seed, step = (checked_int(name, parts[name], 0, MAX_COUNT) for name in ("seed", "step"))
        stream = 0 if parts["format"] == 3 else checked_int("stream", parts["stream"], 0, MAX_STREAM)
        expected = COUNTS if parts["format"] == FORMAT else COUNTS - GRID
        if len(parts["counts"]) != expected:
            raise ValueError(f"it has {len(parts['counts'])} counters, not {expected}")
        counts = _counts(parts["counts"] if expected == COUNTS else [*parts["counts"], *(0,) * GRID])
        shards = tuple((_shard_name(file), int(size), int(crc)) for file, size, crc in parts["shards"])
        description = cls(config, seed, stream, step, counts, shards, parts["format"])
        if taken := {"/".join(path) for path in config.fields}.intersection(description.columns[-len(ROW_COLUMNS) :]):
            raise ValueError(f"format {description.format} did not keep the values of fields named {sorted(taken)}")
        return description

    @property
    def columns(self) -> list[str]:
        """The names of the tensors in the files."""
        if self.format == 3:
            return [*_names(self.config), *ROW_COLUMNS_3]
        return column_names(self.config)

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> Description:
        """Returns the description of a checkpoint.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        return read_description(Path(directory), cls.from_data, "replay checkpoint")


def _counts(given: Sequence[Any]) -> tuple[int | float, ...]:
    """Returns the counters as a segment takes them; ValueError when they are something else."""

    def checked(place: int, count: Any) -> int | float:
        if place in (MAX_RAW, MAX_RAW + 1):
            return float(count)
        return checked_int("a counter", count, 0, MAX_COUNT if place < COUNTS - GRID else MAX_GRID)

    return tuple(checked(place, count) for place, count in enumerate(given))


class RowsGone(CheckpointError):
    """A file of rows is missing."""


def with_rows(directory: str | os.PathLike[str], use: Callable[[Description], T]) -> T:
    """Returns what `use` makes of a checkpoint; of the next one, if a save has taken its files away meanwhile.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    return with_description(directory, lambda: Description.read(directory), use, RowsGone)


def save(segment: _C.Segment, config: Config, directory: str | os.PathLike[str]) -> None:
    """Saves a buffer; see `ReplayBuffer.save`.

    Raises:
        CheckpointError: It is being restored.
    """

    def write(data: Path) -> dict[str, Any]:
        imports = segment.imports
        written = _write_shards(segment, config, data)
        shards = tuple((f"{data.name}/{file}", size, crc) for file, size, crc in written)
        counts, limiter = segment.counts()  # after the rows: every key that was saved is below the head
        stream, step = segment.draws_go_on
        if segment.imports != imports:
            raise BufferError("the buffer was restored meanwhile: save it again")
        now = replace(config, limiter=from_native(*limiter))
        return Description(now, segment.seed, stream, step, counts, shards).as_data()

    try:
        replace_checkpoint(Path(directory), "rows", write)
    except BufferError as error:
        raise CheckpointError(str(error)) from None


def _write_shards(segment: _C.Segment, config: Config, data: Path) -> list[tuple[str, int, int]]:
    """Copies rows out while those before them are on their way to the disk."""
    names = column_names(config)
    row_bytes = 32 + sum(field.nbytes for field in config.fields.values())
    slots = max(1, min(config.capacity, SHARD_BYTES // row_bytes))
    starts = range(0, config.capacity, slots)
    shards: list[tuple[str, int, int]] = []
    pending: deque[tuple[str, torch.Tensor, Future[tuple[int, int]]]] = deque()
    rooms = [room_for(PIECE) for _ in range(WRITES)]

    def finish_first() -> None:
        file, room, written = pending.popleft()
        shards.append((file, *written.result()))
        rooms.append(room)

    with Crew(WRITES) as writers:
        for number, first in enumerate(track(starts, "saving the replay buffer")):
            columns = segment.export_rows(first, min(first + slots, config.capacity))
            if not len(columns[0]):
                continue
            if not rooms:
                finish_first()
            file, tensors, room = f"{number:05}.safetensors", dict(zip(names, columns, strict=True)), rooms.pop()
            pending.append((file, room, writers.submit(write_shard, data / file, tensors, room)))
            del columns, tensors  # their memory serves again as soon as it is written
        while pending:
            finish_first()
    return shards


def load_rows(
    segment: _C.Segment,
    config: Config,
    description: Description,
    directory: str | os.PathLike[str],
    wait_for_memory: Callable[[int], None] | None = None,
) -> None:
    """Places the rows of a checkpoint into a segment that holds none: all of them, or after an error or a death none.

    Args:
        segment: To place them into.
        config: The segment's.
        description: Of the checkpoint.
        directory: Where it is.
        wait_for_memory: Returns once there is memory for so many of the first slots; None: there is for all.

    Raises:
        CheckpointError: A file is missing or damaged, the segment is of another kind or holds rows, or somebody else
            restores it.
    """
    saved, root = description.config, Path(directory)
    require_alike(saved, config, root)
    names = description.columns
    leaf_column, key_column = (len(saved.fields) + ROW_COLUMNS.index(name) for name in ("/leaf", "/key"))
    leaves = _leaves_for(config.sampler, saved.sampler, float(description.counts[MAX_RAW]))
    counts = description.counts if leaves is None else (*description.counts[:-GRID], *(0,) * GRID)
    try:
        rows = _C.Import(segment, int(description.counts[0]))
        try:
            for columns in _read_shards(description.shards, root, names):
                if leaves is not None:
                    columns[leaf_column] = leaves(columns[leaf_column])
                if wait_for_memory is not None:
                    wait_for_memory(_slots_of(columns[key_column], config.capacity))
                rows.place(columns)
            if wait_for_memory is not None:
                wait_for_memory(config.capacity)
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


def _leaves_for(sampler: Sampler, saved: Sampler, largest: float) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns what makes leaves of one sampler those of another, (|td| + eps)^alpha; None: they are the same.

    Args:
        sampler: Of the leaves wanted.
        saved: Of those given. Where it tells no TD error from another, all count as the largest.
        largest: The largest |td| seen.
    """

    def exponents(of: Sampler) -> tuple[float, float]:
        return (of.alpha, of.eps) if isinstance(of, Prioritized) else (0.0, 0.0)

    (alpha, eps), (alpha_before, eps_before) = exponents(sampler), exponents(saved)
    if (alpha, eps) == (alpha_before, eps_before):
        return None

    def convert(leaves: torch.Tensor) -> torch.Tensor:
        errors = torch.full(leaves.shape, largest, dtype=torch.float64)
        if alpha_before:
            errors = (leaves.double() ** (1 / alpha_before) - eps_before).clamp(min=0.0)
        wanted = ((errors + eps) ** alpha).float().clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(leaves > 0, wanted, 0.0)

    return convert


def require_alike(saved: Config, config: Config, directory: str | os.PathLike[str]) -> None:
    """Raises CheckpointError unless the rows of a checkpoint fit into a buffer."""
    if saved.fields != config.fields or saved.view.native() != config.view.native():
        raise CheckpointError(
            f"the checkpoint in {Path(directory)} is of another spec or view: it has {_names(saved)} and {saved.view}, "
            f"the buffer {_names(config)} and {config.view}"
        )


def _read_shards(
    shards: tuple[tuple[str, int, int], ...], root: Path, names: list[str]
) -> Iterator[list[torch.Tensor]]:
    """Yields the columns of one file while the next are read. They last until the next are asked for."""
    rooms = [room_for(1)] * (READS + 1)

    def read(number: int) -> list[torch.Tensor]:
        name, size, checksum = shards[number]
        try:
            if (root / name).stat().st_size == size > len(rooms[number % len(rooms)]):
                rooms[number % len(rooms)] = room_for(size)
            return read_shard(root / name, size, checksum, names, rooms[number % len(rooms)])
        except (OSError, ValueError) as error:
            kind = RowsGone if isinstance(error, FileNotFoundError) else CheckpointError
            raise kind(f"{root / name} is damaged: {error!r}") from None

    with Crew(READS) as readers:
        ahead = deque(readers.submit(read, number) for number in range(min(READS, len(shards))))
        for number in track(range(len(shards)), "loading the replay buffer"):
            columns = ahead.popleft().result()
            if number + READS < len(shards):
                ahead.append(readers.submit(read, number + READS))
            yield columns


def column_names(config: Config) -> list[str]:
    """Returns the names of the tensors that a checkpoint's files hold: of the fields, then `ROW_COLUMNS`."""
    return [*(f"/{name}" if name == METADATA else name for name in _names(config)), *ROW_COLUMNS]


def _names(config: Config) -> list[str]:
    return ["/".join(path) for path in config.fields]


def _shard_name(name: Any) -> str:
    """Returns the name of a file of rows: one in the checkpoint's own directory."""
    if not SHARD_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no file of rows")
    return str(name)
