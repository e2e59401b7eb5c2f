"""What the checkpoint of a `ShardedReplay` says besides the rows.

A checkpoint is a directory. Its `checkpoint.json` names a subdirectory, in which each shard has an ordinary checkpoint
of its own, and has what the union has counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from torchreplay.checkpoint.description import MAX_COUNT, MAX_COUNTER, MAX_DRAWS
from torchreplay.checkpoint.directory import TOKEN, read_description
from torchreplay.ray.sharded.shard_keys import MAX_SHARDS
from torchreplay.ray.sharded.shard_table import LostShard
from torchreplay.schema.config import MAX_CAPACITY, Config
from torchreplay.validation import checked_int

FORMAT: Final = 2
KIND: Final = "ShardedReplay"
SHARDS: Final = "shards"
"""What the name of the subdirectory begins with."""


@dataclass(frozen=True, slots=True)
class Part:
    """A shard that was saved."""

    number: int  # of the shard, by which its subdirectory is named
    node: str  # Ray's id of the node that it was on
    capacity: int  # rows that it held at most


@dataclass(frozen=True, slots=True)
class Counts:
    """What the union has counted, all nodes together."""

    born: int  # numbers of shards that were given
    streams: int  # numbers of learners that were given
    inserted_before: int  # items that the limiter does not count
    cleared: int  # items inserted before the last `clear`
    sampled: int  # items drawn that it counts
    items: int  # items drawn in all
    batches: int  # batches drawn in all
    lost_updates: int  # TD errors dropped because their shard was gone


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `checkpoint.json` says."""

    config: Config  # the arguments of the union; its capacity is that of one shard
    seed: int  # of the draws
    stream: int  # the number of the saving process's stream of draws
    step: int  # its position there
    shards: str  # the name of the subdirectory
    parts: tuple[Part, ...]  # what is in it
    counts: Counts  # what was counted
    lost: tuple[LostShard, ...]  # shards lost before

    def path_of(self, root: Path, part: Part) -> Path:
        """Returns where a shard's own checkpoint is."""
        return root / self.shards / str(part.number)

    def as_data(self) -> dict[str, Any]:
        """Returns it as what JSON can hold."""
        return {
            "kind": KIND,
            "format": FORMAT,
            "config": json.loads(self.config.to_text()),
            "seed": self.seed,
            "stream": self.stream,
            "step": self.step,
            "shards": self.shards,
            "parts": [asdict(part) for part in self.parts],
            "counts": asdict(self.counts),
            "lost": [asdict(lost) for lost in self.lost],
        }

    @classmethod
    def from_data(cls, told: Mapping[str, Any]) -> Manifest:
        """Returns what `as_data` described.

        Raises:
            ValueError: It is damaged, of another format, or of a `ReplayBuffer`.
        """
        if told.get("kind") != KIND:
            raise ValueError("it is of a ReplayBuffer: ReplayBuffer.load(directory) brings it back")
        if told["format"] != FORMAT:
            raise ValueError(f"it has format {told['format']}, this version of torchreplay reads format {FORMAT}")
        if not re.fullmatch(f"{SHARDS}-{TOKEN}", told["shards"]):
            raise ValueError(f"{told['shards']!r} is no directory of shards")
        parts = tuple(_part(part) for part in told["parts"])
        if len({part.number for part in parts}) < len(parts):
            raise ValueError("a shard is there twice")
        return cls(
            Config.from_text(json.dumps(told["config"])),
            _count(told, "seed"),
            _count(told, "stream", MAX_DRAWS),
            _count(told, "step", MAX_DRAWS),
            told["shards"],
            parts,
            Counts(**{name: _count(told["counts"], name, MAX_COUNTER) for name in Counts.__slots__}),
            tuple(_lost(lost) for lost in told["lost"]),
        )

    @classmethod
    def read(cls, root: Path) -> Manifest:
        """Returns what a checkpoint says.

        Raises:
            CheckpointError: There is none, it is damaged, or of another kind.
        """
        return read_description(root, cls.from_data, "checkpoint of a ShardedReplay")


def _count(told: Mapping[str, Any], name: str, most: int = MAX_COUNT) -> int:
    return checked_int(name, told[name], 0, most)


def _part(told: Mapping[str, Any]) -> Part:
    return Part(_count(told, "number", MAX_SHARDS - 1), str(told["node"]), _count(told, "capacity", MAX_CAPACITY))


def _lost(told: Mapping[str, Any]) -> LostShard:
    return LostShard(
        _count(told, "number", MAX_SHARDS - 1), str(told["node"]), _count(told, "rows"), _count(told, "inserted")
    )
