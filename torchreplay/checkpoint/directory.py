"""The directory of a checkpoint: a description, and a subdirectory with the data that it names.

The description is replaced in one step when everything else is on the disk, so that a save that is killed, or fails,
leaves the checkpoint before.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from torchreplay.checkpoint.safetensors_io import created, naming
from torchreplay.errors import CheckpointError
from torchreplay.schema.config import DAMAGED
from torchreplay.segment.file_lock import lock
from torchreplay.segment.regular_file import NoRegularFile, open_regular
from torchreplay.segment.waits import logger

T = TypeVar("T")


class Told(Protocol):
    """What a checkpoint says of itself."""

    @property
    def shards(self) -> object:
        """The names of its data, which every save changes."""


D = TypeVar("D", bound=Told)

NAME: Final = "checkpoint.json"
MAX_DESCRIPTION: Final = 64 << 20
TOKEN: Final = "[0-9a-f]{16}"
"""What follows the names of what is new, as a regular expression."""

_SAVING: Final[dict[tuple[int, ...], int]] = {}
"""Who saves where: process, thread, device and inode of the directory. And the descriptor that is locked."""


def is_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Returns whether `directory` holds a checkpoint, intact or not."""
    return (Path(directory) / NAME).is_file()


def replace_checkpoint(root: Path, kind: str, write: Callable[[Path], Mapping[str, Any]]) -> None:
    """Puts a new checkpoint into the place of the one that is there, if one is; other saves there wait meanwhile.

    Except a save by a signal handler during this one: it is made first, and then this one replaces it.

    Args:
        root: The directory, made if need be. What else is in it stays as it is.
        kind: What the names of subdirectories begin with.
        write: Fills a subdirectory, and sees to it that its files are on the disk; returns the description, which names
            it.

    Raises:
        OSError: The disk is full, or the directory cannot be written.
    """
    data = f"{kind}-{_token()}"

    def put(outermost: bool) -> None:
        _replace(root, [data], lambda: sealed(_filled(root / data, write)), outermost)

    _put(root, put)


def link_checkpoint(source: Path, root: Path) -> None:
    """Puts the checkpoint in `source` into the place of the one in `root`, as `replace_checkpoint` does.

    No file of a checkpoint is ever changed. So both have the same files, or copies where the filesystem has no links.

    Raises:
        OSError: `source` is gone, or was saved to meanwhile; the disk is full, or `root` cannot be written.
    """

    def put(outermost: bool) -> None:
        content = (source / NAME).read_bytes()
        names = [path.name for path in _named(source, "[a-z]+-") if path.is_dir() and path.name.encode() in content]
        if (root / NAME).exists() and (root / NAME).read_bytes() == content:
            return

        def fill() -> bytes:
            for name in names:
                shutil.rmtree(root / name, ignore_errors=True)  # of a link that was killed
                _link_tree(source / name, root / name)
            return content

        _replace(root, names, fill, outermost)

    _put(root, put)


def _put(root: Path, put: Callable[[bool], None]) -> None:
    """Has `put` fill a directory that is locked, and made if need be; it hears whether the lock is its own."""
    made: list[Path] = []
    while True:
        made += _make(root)
        with _alone(root) as outermost:
            if not _is_locked(root):
                continue  # another save, which failed, has taken the directory back that it had made
            try:
                put(outermost)
            except BaseException:
                for directory in made:
                    with suppress(OSError):  # something is in it
                        directory.rmdir()
                raise
            return


def _replace(root: Path, names: Sequence[str], fill: Callable[[], bytes], outermost: bool) -> None:
    """Replaces the description with what `fill` returns, which has made the subdirectories `names`."""
    try:
        content = fill()
        _sync(root)  # what a description names is there, whenever the machine goes down
        replace_file(root / NAME, content)
    except BaseException:
        for name in names:
            if not _may_name(root / NAME, root / name):  # Ctrl-C may come when all is done
                shutil.rmtree(root / name, ignore_errors=True)
        raise
    if not outermost:
        return
    # What the checkpoint before had, and what saves that were killed left.
    for other in _named(root, "[a-z]+-"):
        if not _may_name(root / NAME, other):
            shutil.rmtree(other, ignore_errors=True)
    remove_unfinished(root, re.escape(NAME))


def _filled(data: Path, write: Callable[[Path], Mapping[str, Any]]) -> Mapping[str, Any]:
    data.mkdir()
    told = write(data)
    _sync(data)
    return told


def _link_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_link)
    for directory, _, _ in os.walk(target):
        _sync(Path(directory))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # the filesystem has no links, or no more to this file
        with open(source, "rb") as original, open(created(Path(target)), "wb") as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())


def _make(directory: Path) -> list[Path]:
    """Makes a directory and those above it, so that they outlive the machine; returns the new ones, innermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _sync(path.parent)
    return missing


def _is_locked(directory: Path) -> bool:
    """Returns whether a directory is still the one that this thread has locked."""
    try:
        place = directory.stat()
    except FileNotFoundError:
        return False
    return (os.getpid(), threading.get_ident(), place.st_dev, place.st_ino) in _SAVING


def sealed(told: Mapping[str, Any]) -> bytes:
    """Returns a description as JSON, with a checksum."""
    body = json.dumps(told)
    return json.dumps({"crc32": zlib.crc32(body.encode()), "checkpoint": body}).encode()


def unsealed(content: bytes) -> dict[str, Any]:
    """Returns the description that `sealed` made `content` of.

    Raises:
        ValueError: It is damaged; so may be others of `DAMAGED`.
    """
    outer = json.loads(content.decode())
    body = outer["checkpoint"]
    if zlib.crc32(body.encode()) != outer["crc32"]:
        raise ValueError("its checksum does not match")
    parts: dict[str, Any] = json.loads(body)
    return parts


def read_description(root: Path, parse: Callable[[dict[str, Any]], T], what: str) -> T:
    """Returns what a checkpoint says of itself.

    Args:
        root: Its directory.
        parse: Builds the result and checks it; raises ValueError and the like for bad content.
        what: What it should be, for messages.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = root / NAME
    try:
        return parse(unsealed(read_file(path, MAX_DESCRIPTION)))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no replay checkpoint in {root}: {NAME} is missing") from None
    except DAMAGED as error:
        raise CheckpointError(f"{path} is no intact {what}: {error!r}") from None


def with_description(
    root: str | os.PathLike[str], read: Callable[[], D], use: Callable[[D], T], gone: type[CheckpointError]
) -> T:
    """Returns what `use` makes of a checkpoint; of the next one, if a save has taken its data away meanwhile.

    Args:
        root: Its directory.
        read: Returns what it says of itself.
        use: Makes something of that.
        gone: What `use` raises where data is missing.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    while True:
        told = read()
        try:
            return use(told)
        except gone:
            if read().shards == told.shards:
                raise
        logger.warning("%s was saved to while it was read: it is read again", root)


def read_file(path: Path, most: int) -> bytes:
    """Returns what is in a file no longer than `most`."""
    with naming(path), open(open_regular(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size:,} bytes, more than {most:,}")
        return file.read()


def replace_file(path: Path, content: bytes) -> None:
    """Puts `content` in the place of `path` at once: after a crash one finds the old or the new, whole."""
    fresh = path.with_name(f"{path.name}-{_token()}")
    try:
        _write(fresh, content)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or a directory with all that is in it, is on the disk under its name.

    Raises:
        OSError: It is gone, or the disk fails.
    """
    for part in (path, *path.rglob("*"), path.parent):
        _sync(part)


def remove_unfinished(directory: Path, names: str) -> None:
    """Removes what a killed `replace_file` has left of files whose names match `names`, a regular expression."""
    for fresh in _named(directory, f"{names}-"):
        fresh.unlink(missing_ok=True)


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Keeps other saves out of the directory; the kernel gives it free when this process dies.

    Yields:
        False in a signal handler that saves there during a save of its own thread, which cannot go on before.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    place = os.fstat(fd)
    who = (os.getpid(), threading.get_ident(), place.st_dev, place.st_ino)
    outer = _SAVING.setdefault(who, fd)
    try:
        lock(outer, fcntl.LOCK_EX, f"another save to {directory}")  # a handler's, before or after: it holds for both
        yield outer == fd
    finally:
        if who[0] == os.getpid():
            if outer == fd:
                fcntl.flock(fd, fcntl.LOCK_UN)
                del _SAVING[who]
            os.close(fd)


def _in_child() -> None:
    # A child would keep the lock beyond its parent's death.
    for fd in _SAVING.values():
        os.close(fd)
    _SAVING.clear()


os.register_at_fork(after_in_child=_in_child)


def _token() -> str:
    return secrets.token_hex(8)


def _named(directory: Path, start: str) -> list[Path]:
    """Returns what has a name as only we give them: a user may keep other things beside."""
    return [path for path in directory.iterdir() if re.fullmatch(start + TOKEN, path.name)]


def _may_name(path: Path, data: Path) -> bool:
    """Returns whether a description names a subdirectory, or cannot be asked."""
    try:
        return data.name.encode() in read_file(path, MAX_DESCRIPTION)
    except (FileNotFoundError, NoRegularFile):
        return False
    except (OSError, ValueError):
        return True


def _write(path: Path, content: bytes) -> None:
    with naming(path), open(created(path), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
