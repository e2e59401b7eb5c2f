"""Files of tensors in the safetensors format, written and read as fast as a disk takes and gives them.

The format: 8 bytes with the length of a JSON object, that object (names to dtype, shape and place), and the values.
The safetensors package reads these files too; it would copy everything twice more.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.segment.regular_file import open_regular

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
NAMED_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
PIECE = 1 << 20
"""Bytes taken at a time: between their copy and their checksum they stay in the cache."""
BLOCK = 4096
"""Bytes that writes past the page cache come in multiples of, in memory and in the file."""


def created(path: Path) -> int:
    """Returns the descriptor of a new file, for its user alone."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives the errors of calls that know a descriptor only the name of its file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def room_for(size: int) -> torch.Tensor:
    """Returns uint8 `[size]` to write from past the page cache, or to read to: memory that begins with a page.

    Raises:
        MemoryError: There is too little memory.
    """
    try:
        # All pages at once: too little memory is an error before anything is written.
        memory = mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{size:,} bytes of memory were asked for, and cannot be had") from None
    return torch.frombuffer(memory, dtype=torch.uint8)


def header_of(columns: Mapping[str, tuple[torch.dtype, Sequence[int]]], size: int = 0) -> bytes:
    """Returns what a file begins with; the tensors follow, those of the widest elements first.

    Args:
        columns: Type and shape of each tensor.
        size: Bytes that it shall have at least.
    """
    # The widest first: every value is then aligned.
    names = sorted(columns, key=lambda name: -columns[name][0].itemsize)
    header, end = {}, 0
    for name in names:
        dtype, shape = columns[name]
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    length = max(len(text), size - 8)
    length += -length % 8
    return struct.pack("<Q", length) + text.ljust(length)


def write_packed(path: Path, size: int, room: torch.Tensor) -> tuple[int, int]:
    """Writes the first `size` bytes of `room` to the new file `path`, and waits until they are on the disk.

    Returns:
        Size and checksum of the file.
    """
    with naming(path), open(created(path), "wb", buffering=0) as file:
        writer = _DirectWriter(file.fileno(), room.numpy().data)
        writer.take(size)
        return writer.finish()


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], room: torch.Tensor) -> tuple[int, int]:
    """Writes contiguous tensors to the new file `path`, and waits until they are on the disk.

    Args:
        path: The file.
        tensors: By name.
        room: Memory from `room_for`, of as many bytes, a multiple of `BLOCK`, as the disk shall be given at a time.

    Returns:
        Size and checksum of the file.
    """
    columns = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    in_order = sorted(tensors.values(), key=lambda tensor: -tensor.element_size())
    with naming(path), open(created(path), "wb", buffering=0) as file:
        writer = _DirectWriter(file.fileno(), room.numpy().data)
        for values in (memoryview(header_of(columns)), *map(_bytes_of, in_order)):
            writer.write(values)
        return writer.finish()


class _DirectWriter:
    """Writes a new file from its start past the page cache, where the system can.

    Through the page cache the same bytes take ten times the processor time, more when memory is short. And other
    programs' pages make room for a file that nobody will read soon.
    """

    def __init__(self, fd: int, room: memoryview) -> None:
        self._fd, self._room = fd, room
        self._held = 0  # bytes in the room
        self._size = 0  # bytes given
        self._checksum = 0
        _set_direct(fd, True)

    def write(self, values: memoryview) -> None:
        at = 0
        while at < len(values):
            n = min(PIECE, len(values) - at, len(self._room) - self._held)
            self._hold(values[at : at + n])
            at += n
            if self._held == len(self._room):
                self._put(self._held)

    def take(self, size: int) -> None:
        """Has so many bytes written that lie in the room already."""
        for at in range(0, size, PIECE):
            self._checksum = _C.checksum(self._room[at : min(at + PIECE, size)], self._checksum)
        self._held, self._size = size, size

    def finish(self) -> tuple[int, int]:
        """Waits until all is on the disk; returns size and checksum of the file."""
        self._put(self._held)
        os.fsync(self._fd)
        return self._size, self._checksum

    def _hold(self, values: memoryview) -> None:
        end = self._held + len(values)
        piece = self._room[self._held : end]
        piece[:] = values
        self._checksum = _C.checksum(piece, self._checksum)
        self._held, self._size = end, self._size + len(values)

    def _put(self, size: int) -> None:
        at = 0
        while at < size:
            whole = (size - at) // BLOCK * BLOCK
            if not whole:
                _set_direct(self._fd, False)
            try:
                at += os.write(self._fd, self._room[at : at + (whole or size - at)])
            except OSError as error:
                if error.errno != errno.EINVAL or not _set_direct(self._fd, False):
                    raise
            if at % BLOCK:  # the disk is full, or a signal came
                _set_direct(self._fd, False)
        self._held = 0


def _set_direct(fd: int, direct: bool) -> bool:
    """Has a file written past the page cache, or not; returns whether that is a change.

    Not every file system can do it.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) == direct:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags ^ os.O_DIRECT)
    except OSError:
        return False
    return True


def _is_cached(fd: int) -> bool:
    """Returns whether a file's beginning is in the page cache, as where it was copied to just now."""
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) > 0
    except OSError:  # it is not, or this file system does not say
        return False


def require_size(file: Path | int, size: int) -> None:
    """Raises ValueError unless a file, by its path or its descriptor, is so many bytes long."""
    if (found := os.stat(file).st_size) != size:
        raise ValueError(f"it has {found:,} of {size:,} bytes")


def read_shard(path: Path, size: int, checksum: int, names: Sequence[str], room: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors called `names` of a file that `write_shard` wrote, over the memory of `room`.

    Args:
        path: The file.
        size: Its size.
        checksum: Its checksum.
        names: The tensors' names.
        room: uint8, of `size` bytes or more.

    Raises:
        ValueError: The file is not what was written.
        OSError: It cannot be read.
    """
    with naming(path), open(open_regular(path, os.O_RDONLY), "rb", buffering=0) as file:
        require_size(file.fileno(), size)
        values, at, found = room.numpy().data, 0, 0
        # The system reads ahead; the page cache would otherwise want as much memory as the rows, which takes longer to
        # get than the copy from there. Past it, reads are slower: they wait for each other.
        leaves_cache = not _is_cached(file.fileno())
        while at < size:
            if not (read := file.readinto(values[at : min(at + PIECE, size)]) or 0):
                raise ValueError(f"it ends after {at:,} of {size:,} bytes")
            found = _C.checksum(values[at : at + read], found)
            at += read
            if leaves_cache:
                with suppress(OSError):  # it is advice, which not everyone may give
                    os.posix_fadvise(file.fileno(), 0, at, os.POSIX_FADV_DONTNEED)
    if found != checksum:
        raise ValueError(f"its checksum is {found:08x}, not {checksum:08x}")
    try:
        return _tensors(room[:size], names)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
        raise ValueError(f"it is no file of these tensors ({error!r})") from None


def read_columns(path: Path, size: int, names: Sequence[str]) -> list[torch.Tensor]:
    """Returns copies of a few of the tensors that `read_shard` reads. Their checksum is not looked at.

    Args:
        path: The file.
        size: Its size.
        names: The tensors' names.

    Raises:
        ValueError: The file is not what was written.
        OSError: It cannot be read.
    """

    def content(begin: int, end: int) -> NDArray[np.uint8]:
        if not 0 <= begin <= end <= size:
            raise ValueError(f"it names bytes {begin:,} to {end:,}, and has {size:,}")
        found, at = np.empty(end - begin, np.uint8), 0
        while at < len(found):
            if not (read := os.preadv(file.fileno(), [found.data[at:]], begin + at)):
                raise ValueError(f"it ends after {begin + at:,} of {size:,} bytes")
            at += read
        return found

    with naming(path), open(open_regular(path, os.O_RDONLY), "rb", buffering=0) as file:
        require_size(file.fileno(), size)
        try:
            (length,) = struct.unpack("<Q", content(0, 8).tobytes())
            start = 8 + length
            header = json.loads(content(8, start).tobytes())
            tensors = []
            for name in names:
                begin, end = header[name]["data_offsets"]
                tensors.append(_tensor(torch.from_numpy(content(start + begin, start + end)), header[name]))
            return tensors
        except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
            raise ValueError(f"it is no file of these tensors ({error!r})") from None


def _tensors(content: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
    (length,) = struct.unpack_from("<Q", content.numpy().data)
    start = 8 + length
    header = json.loads(bytes(content[8:start].numpy()))
    tensors = []
    for name in names:
        begin, end = header[name]["data_offsets"]
        tensors.append(_tensor(content[start + begin : start + end], header[name]))
    return tensors


def _tensor(values: torch.Tensor, told: Mapping[str, Any]) -> torch.Tensor:
    """Returns bytes as the tensor that a header tells of."""
    return values.view(NAMED_DTYPES[told["dtype"]]).view(told["shape"])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
