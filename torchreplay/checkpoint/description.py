"""What the checkpoint of a buffer says of itself: `checkpoint.json`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from torchreplay.checkpoint.directory import read_description, with_description
from torchreplay.errors import CheckpointError
from torchreplay.schema.config import Config
from torchreplay.schema.spec import length_names
from torchreplay.validation import checked_int, checked_number

T = TypeVar("T")

FORMAT = 8
FORMATS = (3, 4, 5, 6, 7, FORMAT)
"""Those that are read."""
RAGGED_FROM = 7
"""The first that has ragged fields."""
ROW_COLUMNS = {
    "/key": torch.int64,
    "/leaf": torch.float32,
    "/link": torch.int64,
    "/step": torch.int32,
    "/priority": torch.float32,
}
"""What rows have beside their fields, whose names hold no empty part, and the dtypes."""
ROW_COLUMNS_3 = ("row.key", "row.leaf", "row.link", "row.step", "row.priority")
"""Their names in format 3, in which they took the place of fields that have the same."""
LENGTHS = "/lengths/"
"""With it and a ragged field's name tensors are called that tell the lengths of its values, uint32 `[rows]`."""
METADATA = "__metadata__"
"""What the safetensors format keeps for itself."""
MAX_COUNT = (1 << 64) - 1
MAX_HEAD = (1 << 48) - 1
"""Of keys, with those that many writers took at a time near the last one, 2^47 - 1."""
MAX_DRAWS = (1 << 48) - 1
MAX_FLOAT32 = torch.finfo(torch.float32).max
MAX_COUNTER = 1 << 62
"""Of what a buffer counts."""
MAX_STREAM = (1 << 32) - 1
MAX_GRID = (1 << 63) - 1
COUNTS = 25
GRID = (13, 14)
"""Which of them are the grid of the priorities, which formats 3 and 4 do not tell. All zeros: what fits the leaves."""
HEAD, DRAWS, STREAMS = 0, 6, 8
"""Which of them are the keys issued, the batches drawn, and the streams of draws given out."""
CLEARED = 15
"""Which of them are the items before the last `clear`, which formats before 6 do not tell."""
DROPPED = 16
"""From this one on are those of dropped and expired items and of what was drawn, which formats before 8 do not tell."""
AGES, LARGEST_AGE = 23, 24
"""Which of them are the ages of all items drawn, added up, and the largest."""
MAX_RAW = 9
"""Which of them is the largest |td| seen."""
SHARD_NAME = re.compile(r"rows-[0-9a-f]+/[0-9]+\.safetensors")


class Description(NamedTuple):
    """What `checkpoint.json` says.

    Attributes:
        config: The buffer's arguments.
        seed: Of its draws.
        stream: Number of the saving process's stream of draws.
        step: Its position there.
        counts: The segment's counters.
        shards: (file, bytes, checksum) of the files with rows.
        format: Of the files.
        policy_version: The learner's, which older files do not tell: 0.
    """

    config: Config
    seed: int
    stream: int
    step: int
    counts: tuple[int | float, ...]
    shards: tuple[tuple[str, int, int], ...]
    format: int = FORMAT
    policy_version: int = 0

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
            "policy_version": self.policy_version,
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
        if config.ragged and parts["format"] < RAGGED_FROM:
            raise ValueError(f"format {parts['format']} has no ragged fields, and it names {config.ragged}")
        seed, step = checked_int("seed", parts["seed"], 0, MAX_COUNT), checked_int("step", parts["step"], 0, MAX_DRAWS)
        stream = 0 if parts["format"] == 3 else checked_int("stream", parts["stream"], 0, MAX_STREAM)
        expected = {3: GRID[0], 4: GRID[0], 5: CLEARED, 6: DROPPED, 7: DROPPED}.get(parts["format"], COUNTS)
        if len(parts["counts"]) != expected:
            raise ValueError(f"it has {len(parts['counts'])} counters, not {expected}")
        counts = _counts([*parts["counts"], *(0,) * (COUNTS - expected)])
        shards = tuple((_shard_name(file), int(size), int(crc)) for file, size, crc in parts["shards"])
        version = checked_int("policy_version", parts.get("policy_version", 0), 0, MAX_COUNTER)
        description = cls(config, seed, stream, step, counts, shards, parts["format"], version)
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
            number = checked_number("a counter", count, 0.0)
            if place == MAX_RAW and number > MAX_FLOAT32:
                raise ValueError(f"the largest priority is {number}: expected at most {MAX_FLOAT32}")
            return number
        most = {HEAD: MAX_HEAD, DRAWS: MAX_DRAWS // 2, STREAMS: MAX_STREAM}.get(place, MAX_COUNTER)
        least = -MAX_COUNTER if place == AGES else 0
        return checked_int("a counter", count, least, MAX_GRID if place in GRID else most)

    return tuple(checked(place, count) for place, count in enumerate(given))


def without_grid(counts: Sequence[int | float]) -> tuple[int | float, ...]:
    """Returns counters of priorities that are not all those that were counted: the grid is chosen for them."""
    return tuple(0 if place in GRID else count for place, count in enumerate(counts))


class RowsGone(CheckpointError):
    """A file of rows is missing."""


def with_rows(directory: str | os.PathLike[str], use: Callable[[Description], T]) -> T:
    """Returns what `use` makes of a checkpoint; of the next one, if a save has taken its files away meanwhile.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    return with_description(directory, lambda: Description.read(directory), use, RowsGone)


def require_alike(saved: Config, config: Config, directory: str | os.PathLike[str]) -> None:
    """Raises CheckpointError unless the rows of a checkpoint fit into a buffer."""
    if saved.fields != config.fields:
        raise CheckpointError(
            f"the checkpoint in {Path(directory)} is of another spec: it has {_names(saved)}, the buffer "
            f"{_names(config)}"
        )
    if reason := saved.lacks(config.view):
        raise CheckpointError(
            f"the rows in {Path(directory)} were written under {saved.view}, and the buffer's view is {config.view}: "
            f"{reason}"
        )


def column_names(config: Config) -> list[str]:
    """Returns the names of the tensors that a checkpoint's files hold: of fields, of lengths, then `ROW_COLUMNS`."""
    fields = (f"/{name}" if name == METADATA else name for name in _names(config))
    return [*fields, *lengths_of(config), *ROW_COLUMNS]


def lengths_of(config: Config) -> list[str]:
    """Returns the names of the tensors that tell the lengths of ragged values."""
    return [LENGTHS + name for name in length_names(config.fields)]


def _names(config: Config) -> list[str]:
    return ["/".join(path) for path in config.fields]


def _shard_name(name: Any) -> str:
    """Returns the name of a file of rows: one in the checkpoint's own directory."""
    if not SHARD_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no file of rows")
    return str(name)
