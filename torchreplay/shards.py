"""Files of tensors in the safetensors format, written and read as fast as a disk takes and gives them.

The format: 8 bytes with the length of a JSON object, that object (names to dtype, shape and place), and the values.
The safetensors package reads these files too; it would copy everything twice more.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from . import _C

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
PIECE = 1 << 20
"""Bytes taken at a time: between their checksum and their copy they stay in the cache."""


def created(path: Path) -> int:
    """Returns the descriptor of a new file, for its user alone."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def opened(path: Path) -> int:
    """Returns the descriptor of a file that must be one.

    Raises:
        ValueError: It is a device, a pipe or a directory.
    """
    # Without waiting for the other end of what turns out to be a pipe.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("it is no file")
    return fd


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Writes contiguous tensors to the new file `path`, and waits until they are on the disk.

    Returns:
        Size and checksum of the file.
    """
    # The widest first: every value is then aligned.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header, end = {}, 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = 0
    with open(created(path), "wb") as file:
        head = memoryview(struct.pack("<Q", len(text)) + text)
        for values in (head, *(_bytes_of(tensors[name]) for name in names)):
            for at in range(0, len(values), PIECE):
                piece = values[at : at + PIECE]
                checksum = _C.checksum(piece, checksum)
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), checksum


def announce(path: Path) -> None:
    """Has the system fetch a file that will be read soon, so that the disk does not rest meanwhile."""
    with suppress(OSError), path.open("rb", buffering=0) as file:  # reading it will say what is wrong
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def read_shard(path: Path, size: int, checksum: int, names: Sequence[str], room: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors called `names` of a file that `write_shard` wrote, over the memory of `room`.

    Args:
        path: The file.
        size: Its size.
        checksum: Its checksum.
        names: The tensors' names.
        room: uint8 `[size]` or more.

    Raises:
        ValueError: The file is not what was written.
        OSError: It cannot be read.
    """
    with open(opened(path), "rb", buffering=0) as file:
        if (found := os.fstat(file.fileno()).st_size) != size:
            raise ValueError(f"it has {found:,} of {size:,} bytes")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        values, at, found = room.numpy().data[:size], 0, 0
        while at < size:
            read = file.readinto(values[at : at + PIECE])
            if not read:
                raise ValueError(f"it ends after {at:,} of {size:,} bytes")
            found = _C.checksum(values[at : at + read], found)
            at += read
    if found != checksum:
        raise ValueError(f"its checksum is {found:08x}, not {checksum:08x}")
    try:
        return _tensors(room[:size], names)
    except (KeyError, TypeError, RuntimeError, struct.error) as error:
        raise ValueError(f"it is no file of these tensors ({error!r})") from None


def _tensors(content: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
    (length,) = struct.unpack_from("<Q", content.numpy().data)
    start = 8 + length
    header = json.loads(bytes(content[8:start].numpy()))
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    tensors = []
    for name in names:
        entry = header[name]
        begin, end = entry["data_offsets"]
        tensors.append(content[start + begin : start + end].view(dtypes[entry["dtype"]]).view(entry["shape"]))
    return tensors


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
