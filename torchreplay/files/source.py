"""What a path holds: a checkpoint, an archive of one, or a buffer."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from torchreplay.checkpoint.directory import NAME
from torchreplay.errors import CheckpointError
from torchreplay.files.buffer_rows import BufferRows
from torchreplay.files.checkpoint_rows import CheckpointRows, of_archive, of_directory
from torchreplay.validation import checked_path


def stored_rows(path: str | os.PathLike[str]) -> CheckpointRows | BufferRows:
    """Returns the rows of what lies at `path`. Nothing is changed, and nobody who uses it notices.

    Args:
        path: The directory of a checkpoint, a file that `buffer.save(file)` wrote, or the file of a buffer.

    Raises:
        FileNotFoundError: There is nothing.
        PermissionError: It belongs to another user.
        CheckpointError: It is something else, or damaged.
    """
    place = checked_path("path", path)
    if not place.exists():
        raise FileNotFoundError(f"there is nothing at {place}: expected a checkpoint's directory, or a buffer's file")
    if place.is_dir():
        if not (place / NAME).exists():
            raise CheckpointError(f"{place} is a directory without {NAME}: expected what buffer.save(directory) wrote")
        _refuse_sharded(place)
        return of_directory(place)
    return of_archive(place) if _is_archive(place) else BufferRows(place)


def _refuse_sharded(directory: Path) -> None:
    """Raises CheckpointError for the checkpoint of a sharded buffer, which has one of each shard in it."""
    shards = sorted(path.parent for path in directory.glob(f"shards-*/*/{NAME}"))
    if shards:
        raise CheckpointError(
            f"{directory} holds the {len(shards)} shards of a ShardedReplay: each is a checkpoint of its own, such as "
            f"{shards[0]}"
        )


def _is_archive(path: Path) -> bool:
    return path.is_file() and tarfile.is_tarfile(path)
