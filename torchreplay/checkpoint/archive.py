"""A checkpoint in one binary file: a tar archive of its directory, for what must carry its rows with it."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeGuard

from torchreplay.errors import CheckpointError

REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)


def is_file(given: Any, method: str) -> TypeGuard[IO[bytes]]:
    """Returns whether `given` is a file object that has `method`, and no path."""
    return callable(getattr(given, method, None))


def save_archive(file: IO[bytes], save: Callable[[Path], None]) -> None:
    """Writes to `file` what `save` puts into a directory. It takes as much room in the directory of temporary files.

    Args:
        file: A binary file that is open for writing; nothing is asked of it but `write`.
        save: Fills a directory.
    """
    with tempfile.TemporaryDirectory(prefix="torchreplay-") as directory:
        save(Path(directory))
        with tarfile.open(fileobj=file, mode="w|") as archive:
            for path in sorted(Path(directory).rglob("*")):
                archive.add(path, str(path.relative_to(directory)), recursive=False)


@contextmanager
def opened_archive(file: IO[bytes]) -> Iterator[Path]:
    """Unpacks what `save_archive` wrote, into a directory that is there for the time of the context.

    Raises:
        CheckpointError: It is no such archive, or truncated.
    """
    with tempfile.TemporaryDirectory(prefix="torchreplay-") as directory:
        root = Path(directory)
        try:
            with tarfile.open(fileobj=file, mode="r|") as archive:
                for member in archive:
                    _unpack(archive, member, root)
        except (tarfile.TarError, EOFError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise CheckpointError(f"the file holds no checkpoint, or only a part of one: {error}") from None
        yield root


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    """Unpacks files and directories below `root`, and nothing else: an archive may say anything."""
    path = root / member.name
    is_plain = member.isdir() or (member.type in REGULAR and not member.issparse())  # holes can be of any size
    if not is_plain or not path.resolve().is_relative_to(root.resolve()):
        raise CheckpointError(f"the file holds no checkpoint: it has the entry {member.name!r}")
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = archive.extractfile(member)
    assert content is not None  # a regular file has content
    with path.open("wb") as to:
        while block := content.read(1 << 20):
            to.write(block)
