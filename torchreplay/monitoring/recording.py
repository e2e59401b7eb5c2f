"""Recordings: what a buffer counted over time, in one small file.

A line says what the file is. One stream of zlib follows: a description in JSON, and then records of a fixed size, each
flushed by itself. A killed recorder, or a full disk, leaves all whole records. The end of the stream has a checksum: it
is written only where every record before it is whole.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchreplay.monitoring.slots import SlotSample
from torchreplay.monitoring.snapshot import LiveBuffer, Snapshot
from torchreplay.schema.config import DAMAGED, Config
from torchreplay.segment.closeable import Closeable
from torchreplay.segment.regular_file import NoRegularFile, open_regular

HEAD: Final = b"torchreplay recording 1\n"

COUNTERS: Final = (
    *("time", "head", "inserted", "sampled", "draws", "updated", "stale_updates", "unready_updates"),
    *("evicted_unsampled", "redraws", "insert_wait", "sample_wait", "drawable", "priority_max", "target_ratio"),
)
"""Fields of `Snapshot` that a record has; `target_ratio` is 0 where the limiter keeps none."""

PEOPLE: Final = ("fill", "writers", "learners", "waiting")
"""What else it has: rows held, those alive, and writers that wait for the limiter."""

QUANTILES: Final = (0.1, 0.5, 0.9)
"""Shares of the items, of whose priorities a record of priorities tells."""

PRIORITIES: Final = ("time", "p10", "p50", "p90", "half_of_draws")

QUEUE: Final = ("time", "drawable", "held_items", "dropped_items", "oldest_age")
"""Of a queue: items to draw, held and dropped so far, and seconds since the oldest was written; -1: there is none."""

_RECORDS: Final = {b"c": (*COUNTERS, *PEOPLE), b"p": PRIORITIES, b"q": QUEUE}
"""What each kind of record has, as float64; 2^53 rows are counted exactly."""

_LENGTH: Final = struct.Struct("<I")
_PIECE: Final = 1 << 16


class Recorder(Closeable):
    """Writes a recording. A context, which closes the file.

    Args:
        path: A new file.
        buffer: What is recorded.

    Attributes:
        records: How many looks at the counters it has.

    Raises:
        FileExistsError: There is a file already.
        OSError: It cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], buffer: LiveBuffer) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._compress = zlib.compressobj(6)
        self._buffer = buffer
        self.records = 0
        described = {"config": json.loads(buffer.config.to_text()), "name": buffer.name, "started": time.time()}
        text = json.dumps(described).encode()
        self._write(_LENGTH.pack(len(text)) + text, HEAD)

    def add(self, now: Snapshot) -> None:
        """Adds what the buffer has counted.

        Raises:
            OSError: The disk is full. The file is closed, and has all records before.
        """
        counted = [float(getattr(now, name) or 0) for name in COUNTERS]
        writers = now.alive("writer")
        waiting = sum(writer.waiting for writer in writers)
        people = [self._buffer.fill(now), len(writers), len(now.alive("learner")), waiting]
        self._add(b"c", [*counted, *map(float, people)])
        if (queue := now.queue) is not None:
            items = queue.to_draw, queue.held_items, queue.dropped_items
            self._add(b"q", [now.time, *map(float, items), queue.oldest_age])
        self.records += 1

    def add_slots(self, moment: float, slots: SlotSample) -> None:
        """Adds what its priorities are.

        Raises:
            OSError: As `add` does.
        """
        self._add(b"p", [moment, *slots.quantiles(*QUANTILES), slots.half_of_draws])

    def _add(self, kind: bytes, values: list[float]) -> None:
        self._write(kind + struct.pack(f"<{len(values)}d", *values))

    def _write(self, data: bytes, before: bytes = b"") -> None:
        """Writes data into the stream. What fails or is interrupted is the last: nothing that follows would fit."""
        try:
            self._put(before + self._compress.compress(data) + self._compress.flush(zlib.Z_SYNC_FLUSH))
        except BaseException:
            self._let_go()
            raise

    def _put(self, packed: bytes) -> None:
        left = memoryview(packed)
        while left:
            left = left[os.write(self._fd, left) :]

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def close(self) -> None:
        """Closes the file, with its end where all was written. Idempotent.

        Raises:
            OSError: The disk is full. The file is closed, and has all records.
        """
        if self._fd >= 0:
            try:
                self._put(self._compress.flush())
            finally:
                self._let_go()


@dataclass(frozen=True)
class Recording:
    """What a file of `Recorder` holds.

    Attributes:
        name: Of the buffer.
        config: What it was made of.
        started: When the recording began, seconds since 1970.
        counters: float64 `[n]` by name, those of `COUNTERS` and `PEOPLE`.
        priorities: float64 `[m]` by name, those of `PRIORITIES`; of a queue there are none.
        queue: float64 `[k]` by name, those of `QUEUE`; of other buffers, and in older files, there are none.
    """

    name: str
    config: Config
    started: float
    counters: dict[str, NDArray[np.float64]]
    priorities: dict[str, NDArray[np.float64]]
    queue: dict[str, NDArray[np.float64]]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recording:
        """Returns all whole records of a file.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is no recording, is damaged, or has no record.
        """
        try:
            with open(open_regular(path, os.O_RDONLY), "rb") as file:
                content = file.read()
        except NoRegularFile as error:
            raise ValueError(f"{path} is no recording: {error}") from None
        if not content.startswith(HEAD):
            raise ValueError(f"{path} is no recording of this version: expected a file of `torchreplay record`")
        data = _unpacked(content[len(HEAD) :])
        try:
            length = _LENGTH.unpack_from(data)[0]
            described: dict[str, Any] = json.loads(data[_LENGTH.size : _LENGTH.size + length])
            config = Config.from_text(json.dumps(described["config"]))
            name, started = str(described["name"]), float(described["started"])
        except (struct.error, *DAMAGED) as error:
            raise ValueError(f"the description in {path} is damaged: {error}") from None
        tables = _tables(data[_LENGTH.size + length :])
        if not len(tables[b"c"]):
            raise ValueError(f"{path} has no record: the recorder ended before its first look")
        series = {kind: dict(zip(columns, tables[kind].T, strict=True)) for kind, columns in _RECORDS.items()}
        return cls(name, config, started, series[b"c"], series[b"p"], series[b"q"])

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Of each record since the first one, float64 `[n]`."""
        since: NDArray[np.float64] = self.counters["time"] - self.counters["time"][0]
        return since


def _unpacked(packed: bytes) -> bytes:
    """Returns what the stream holds, as far as it goes: its writer may have been killed."""
    stream = zlib.decompressobj()
    parts = []
    for at in range(0, len(packed), _PIECE):
        piece, before = packed[at : at + _PIECE], stream.copy()
        try:
            parts.append(stream.decompress(piece))
        except zlib.error:  # which throws away what came before the damage
            return b"".join([*parts, *_until_damage(before, piece)])
    return b"".join(parts)


def _until_damage(stream: zlib._Decompress, piece: bytes) -> Iterator[bytes]:
    with suppress(zlib.error):
        for byte in range(len(piece)):
            yield stream.decompress(piece[byte : byte + 1])


def _tables(data: bytes) -> dict[bytes, NDArray[np.float64]]:
    """Returns the records of each kind, float64 `[n, columns]`; the last one may be cut off."""
    rows: dict[bytes, list[tuple[float, ...]]] = {kind: [] for kind in _RECORDS}
    at = 0
    while at < len(data) and data[at : at + 1] in _RECORDS:
        kind = data[at : at + 1]
        record = struct.Struct(f"<{len(_RECORDS[kind])}d")
        if at + 1 + record.size > len(data):
            break
        rows[kind].append(record.unpack_from(data, at + 1))
        at += 1 + record.size
    return {kind: np.array(found).reshape(-1, len(_RECORDS[kind])) for kind, found in rows.items()}
