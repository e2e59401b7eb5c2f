"""Saving a buffer while explorers write to it, and loading it again.

A checkpoint is a directory: `checkpoint.json` describes the buffer and names a subdirectory of safetensors files with
the rows. It is replaced in one step when everything else is on the disk, so that a save that is killed leaves the one
before.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .arguments import checked_int
from .config import DAMAGED, Config
from .errors import CheckpointError
from .progress import track
from .shards import announce, created, opened, read_shard, room_for, write_shard

if TYPE_CHECKING:
    from . import _C

FORMAT = 3
NAME = "checkpoint.json"
ROW_COLUMNS = ("row.key", "row.leaf", "row.link", "row.step", "row.priority")
SHARD_BYTES = 32 << 20
AT_A_TIME = 2
"""Files written or read at a time: while one waits for the disk, the other is copied and its checksum computed."""
PIECE = 2 << 20
"""Bytes given to the disk at a time."""
ANNOUNCED = 64
"""Files that the system is asked to fetch before they are read: while memory for the rows is made, too."""
MAX_DESCRIPTION = 64 << 20
MAX_COUNT = (1 << 64) - 1
SHARD_NAME = re.compile(r"rows-[0-9a-f]+/[0-9]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Description:
    """What `checkpoint.json` says.

    Attributes:
        config: The buffer's arguments.
        seed: Of its draws.
        step: Position in the saving process's stream of draws.
        counts: The segment's counters.
        shards: (file, bytes, checksum) of the files with rows.
    """

    config: Config
    seed: int
    step: int
    counts: tuple[int | float, ...]
    shards: tuple[tuple[str, int, int], ...]

    def to_text(self) -> str:
        """Returns the description as JSON, with a checksum of its own."""
        body = json.dumps(
            {
                "format": FORMAT,
                "config": json.loads(self.config.to_text()),
                "seed": self.seed,
                "step": self.step,
                "counts": self.counts,
                "shards": self.shards,
            }
        )
        return json.dumps({"crc32": zlib.crc32(body.encode()), "checkpoint": body})

    @classmethod
    def from_text(cls, text: str) -> Description:
        """Returns what `to_text` described.

        Raises:
            ValueError: It is damaged, or of another format.
        """
        outer = json.loads(text)
        body = outer["checkpoint"]
        if zlib.crc32(body.encode()) != outer["crc32"]:
            raise ValueError("its checksum does not match")
        parts = json.loads(body)
        if "kind" in parts:
            raise ValueError(f"it is of a {parts['kind']}: {parts['kind']}.load(directory) brings it back")
        if parts["format"] != FORMAT:
            raise ValueError(f"it has format {parts['format']}, this version of torchreplay reads format {FORMAT}")
        config = Config.from_text(json.dumps(parts["config"]))
        seed, step = (checked_int(name, parts[name], 0, MAX_COUNT) for name in ("seed", "step"))
        *counts, max_raw, priority_change, inserted_before, sampled_before = parts["counts"]
        counts = [checked_int("a counter", count, 0, MAX_COUNT) for count in (*counts, inserted_before, sampled_before)]
        counts[-2:-2] = [float(max_raw), float(priority_change)]
        shards = tuple((_shard_name(file), int(size), int(crc)) for file, size, crc in parts["shards"])
        return cls(config, seed, step, tuple(counts), shards)


def save(segment: _C.Segment, config: Config, directory: str | os.PathLike[str]) -> None:
    """Saves a buffer; see `ReplayBuffer.save`."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    with alone(root):
        _save(segment, config, root)


def _save(segment: _C.Segment, config: Config, root: Path) -> None:
    step, name = segment.step, f"rows-{secrets.token_hex(8)}"
    data = root / name
    data.mkdir()
    try:
        shards = _write_shards(segment, config, data)
        # Counted after the rows: every key that was saved is below the head.
        description = Description(
            config, segment.seed, step, segment.counts(), tuple((f"{name}/{f}", n, c) for f, n, c in shards)
        )
        _sync_directory(data)
        replace_file(root / NAME, description.to_text().encode())
    except BaseException:
        shutil.rmtree(data, ignore_errors=True)
        raise
    # What the checkpoint before had, and what saves that were killed left.
    for other in root.glob("rows-*"):
        if other != data:
            shutil.rmtree(other, ignore_errors=True)
    for other in root.glob(f"{NAME}-*"):
        other.unlink(missing_ok=True)


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Keeps other saves out of the directory; the kernel gives it free when this process dies."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _write_shards(segment: _C.Segment, config: Config, data: Path) -> list[tuple[str, int, int]]:
    """Copies rows out while those before them are on their way to the disk."""
    names = [*_names(config), *ROW_COLUMNS]
    row_bytes = 32 + sum(field.nbytes for field in config.fields.values())
    slots = max(1, min(config.capacity, SHARD_BYTES // row_bytes))
    starts = range(0, config.capacity, slots)
    shards: list[tuple[str, int, int]] = []
    pending: deque[tuple[str, torch.Tensor, Future[tuple[int, int]]]] = deque()
    rooms = [room_for(PIECE) for _ in range(AT_A_TIME)]

    def finish_first() -> None:
        file, room, written = pending.popleft()
        shards.append((file, *written.result()))
        rooms.append(room)

    with ThreadPoolExecutor(AT_A_TIME) as writers:
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


def is_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Returns whether `directory` holds a saved buffer, intact or not."""
    return (Path(directory) / NAME).is_file()


def read_description(directory: str | os.PathLike[str]) -> Description:
    """Returns the description of a checkpoint.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = Path(directory) / NAME
    try:
        description = Description.from_text(read_file(path, MAX_DESCRIPTION).decode())
    except FileNotFoundError:
        raise CheckpointError(f"there is no replay checkpoint in {Path(directory)}: {NAME} is missing") from None
    except (*DAMAGED, OSError) as error:
        raise CheckpointError(f"{path} is no intact replay checkpoint: {error!r}") from None
    return description


def announce_rows(description: Description, directory: str | os.PathLike[str]) -> None:
    """Has the system begin to fetch the rows that `load_rows` will want."""
    for file, *_ in description.shards[:ANNOUNCED]:
        announce(Path(directory) / file)


def load_rows(segment: _C.Segment, config: Config, description: Description, directory: str | os.PathLike[str]) -> None:
    """Places the rows of a checkpoint into a segment that holds none.

    Raises:
        CheckpointError: A file is missing or damaged, the segment is of another kind, or holds rows.
    """
    saved = description.config
    require_alike(saved, config, directory)
    if segment.counts()[0]:
        raise CheckpointError("the buffer holds rows already: restore a new one, before its explorers start")
    names = [*_names(description.config), *ROW_COLUMNS]
    try:
        for columns in _read_shards(description.shards, Path(directory), names):
            segment.import_rows(columns)
        segment.finish_import(description.counts, description.seed)
        if saved.limiter != config.limiter:
            segment.set_limiter(
                config.limiter.native()
            )  # what was counted for the other one says nothing about this one
        segment.step = description.step
    except (ValueError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint in {Path(directory)} is damaged: {error}") from None


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
    rooms = [torch.empty(0, dtype=torch.uint8)] * (AT_A_TIME + 1)

    def read(number: int) -> list[torch.Tensor]:
        name, size, checksum = shards[number]
        try:
            if (root / name).stat().st_size == size > len(rooms[number % len(rooms)]):
                rooms[number % len(rooms)] = torch.empty(size, dtype=torch.uint8)
            for file, *_ in shards[number + ANNOUNCED : number + ANNOUNCED + 1]:
                announce(root / file)
            return read_shard(root / name, size, checksum, names, rooms[number % len(rooms)])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{root / name} is damaged: {error!r}") from None

    with ThreadPoolExecutor(AT_A_TIME) as readers:
        ahead = deque(readers.submit(read, number) for number in range(min(AT_A_TIME, len(shards))))
        for number in track(range(len(shards)), "loading the replay buffer"):
            columns = ahead.popleft().result()
            if number + AT_A_TIME < len(shards):
                ahead.append(readers.submit(read, number + AT_A_TIME))
            yield columns


def _names(config: Config) -> list[str]:
    return ["/".join(path) for path in config.fields]


def _write(path: Path, content: bytes) -> None:
    with open(created(path), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path, most: int) -> bytes:
    """Returns what is in a file no longer than `most`."""
    with open(opened(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size:,} bytes, more than {most:,}")
        return file.read()


def _shard_name(name: Any) -> str:
    """Returns the name of a file of rows: one in the checkpoint's own directory."""
    if not SHARD_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no file of rows")
    return str(name)


def replace_file(path: Path, content: bytes) -> None:
    """Puts `content` in the place of `path` at once: after a crash one finds the old or the new, whole."""
    fresh = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    try:
        _write(fresh, content)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def remove_unfinished(directory: Path, names: str) -> None:
    """Removes what a killed `replace_file` has left of files whose names match `names`, as in a shell."""
    for fresh in directory.glob(f"{names}-{'[0-9a-f]' * 16}"):
        fresh.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
