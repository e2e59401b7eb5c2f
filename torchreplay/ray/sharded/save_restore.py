"""Saving all shards of a `ShardedReplay` while others write and draw, and filling new shards from the files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torchreplay.checkpoint.description import ROW_COLUMNS, Description, require_alike
from torchreplay.checkpoint.directory import is_checkpoint, replace_checkpoint
from torchreplay.checkpoint.joined_rows import divided
from torchreplay.errors import CheckpointError
from torchreplay.ray.runtime.cluster import errors_as_raised
from torchreplay.ray.sharded.coordinator_client import checked_capacity
from torchreplay.ray.sharded.manifest import SHARDS, Counts, Manifest, Part
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.ray.sharded.shard_table import LostShard, ShardEntry
from torchreplay.ray.sharded.sharded_sampler import ShardedSampler
from torchreplay.schema.config import Config

POLL: Final = 0.05
"""Seconds between two looks at shards that save or load."""


def save_shards(shards: ShardClient, config: Config, sampler: ShardedSampler, root: Path) -> None:
    """Does what `ShardedReplay.save` does; `draws` are those of this process, which may go on."""

    def write(data: Path) -> dict[str, Any]:
        entries = shards.look().entries
        paths = {number: str(data / str(number)) for number in entries}
        saved = _until_done(shards, entries, lambda number, actor: actor.save.remote(paths[number]))
        if not saved:
            raise RuntimeError("there is no shard to save: all are lost. What was saved before is as it was")
        for number in paths.keys() - saved.keys():
            shutil.rmtree(paths[number], ignore_errors=True)
        _require_parts([data / str(number) for number in saved])
        # Counted after the rows, as those of each shard are.
        return _described(shards, config, saved, sampler, data.name).as_data()

    replace_checkpoint(root, SHARDS, write)


def restore_shards(shards: ShardClient, config: Config, manifest: Manifest, root: Path) -> None:
    """Does what `ShardedReplay.restore` does, without setting this process's stream of draws."""
    require_alike(manifest.config, config, root)
    shards.exchange()
    held = "has lost a shard" if shards.table.lost else "holds rows"
    if shards.table.lost or any(figures.stats.rows_written for figures in shards.figures.values()):
        raise CheckpointError(f"the buffer {held} already: restore a new one, before its explorers start")
    entries = shards.table.entries
    _require_parts([manifest.path_of(root, part) for part in manifest.parts])
    parts = assigned(manifest, root, {number: entry.node for number, entry in entries.items()})
    numbers, born = _numbered(entries, parts, manifest.counts.born)
    if any(figures.stats.writers and numbers.get(number) != number for number, figures in shards.figures.items()):
        raise CheckpointError(
            "explorers of this buffer have writers already, whose keys would be those of other shards' rows: restore a "
            "new one, before its explorers start"
        )
    paths = {number: [str(manifest.path_of(root, part)) for part in mine] for number, mine in parts.items()}
    try:
        filled = _until_done(shards, entries, lambda number, it: it.restore.remote(numbers[number], paths[number]))
        for number in entries.keys() - filled.keys():
            raise RuntimeError(f"shard {number} on node {entries[number].node} was lost while it was being restored")
        # Keys of a part that has joined another are those of a shard that is gone, without any of its rows.
        gone = [LostShard(part.number, part.node, 0, 0) for mine in parts.values() for part in mine[1:]]
        shards.restored(replace(manifest, lost=(*manifest.lost, *gone)), numbers, born)
    except BaseException as error:
        with suppress(Exception):  # the directory may be gone
            shards.coordinator.ask("stop")
            shards.look()
        error.add_note(
            "the buffer that was to be restored may hold a part of the checkpoint, and was stopped: close it, and "
            "restore a new one"
        )
        raise


def _numbered(
    entries: Mapping[int, ShardEntry], parts: Mapping[int, Sequence[Part]], born: int
) -> tuple[dict[int, int], int]:
    """Returns which number each shard takes, by its present one, and how many numbers were given then.

    `parts` says which of the saved shards each becomes; others are new. `born` numbers were given before.
    """
    numbers = {number: mine[0].number for number, mine in parts.items() if mine}
    for number in sorted(entries.keys() - numbers.keys()):  # old keys must not name rows of shards that are new
        numbers[number], born = born, born + 1
    return numbers, born


def assigned(manifest: Manifest, root: Path, nodes: Mapping[int, str]) -> dict[int, list[Part]]:
    """Returns which parts each shard gets, by its present number: its own node's, if that is one of the `nodes`.

    The others go to nodes that have none, and where there are too few to those with the fewest rows.
    """
    at_home = {node: number for number, node in nodes.items()}
    found: dict[int, list[Part]] = {number: [] for number in sorted(nodes)}
    away = list[Part]()
    for part in manifest.parts:
        (found[at_home[part.node]] if part.node in at_home else away).append(part)
    rows = {part: rows_in(manifest.path_of(root, part)) for part in manifest.parts if len(manifest.parts) > len(nodes)}
    for part in sorted(away, key=lambda part: -rows.get(part, 0)):
        min(found.values(), key=lambda mine: (len(mine) > 0, sum(rows.get(each, 0) for each in mine))).append(part)
    return found


def capacities_for(manifest: Manifest, root: Path, nodes: Sequence[str], capacity: int | None) -> list[int]:
    """Returns how many rows of `capacity` each node gets, for `load`; None: as many in all as before, or more nodes.

    As evenly as they can be divided with room for the rows of every part. Where not all rows fit, the largest parts
    lose some. Raises as `ShardedReplay.load` does.
    """
    if capacity is None:
        before = sum(part.capacity for part in manifest.parts) or manifest.config.capacity
        each = -(-before // max(1, len(manifest.parts)))
        capacity = before + each * max(0, len(nodes) - max(1, len(manifest.parts)))
    capacity = checked_capacity(capacity, len(nodes))
    _require_parts([manifest.path_of(root, part) for part in manifest.parts])
    parts = assigned(manifest, root, dict(enumerate(nodes)))
    rows = [[max(1, rows_in(manifest.path_of(root, part))) for part in parts[k]] or [1] for k in range(len(nodes))]
    if sum(map(sum, rows)) <= capacity:
        return divided(capacity, [sum(mine) for mine in rows])
    shares = iter(divided(capacity, [n for mine in rows for n in mine]))
    return [sum(next(shares) for _ in mine) for mine in rows]


def rows_in(part: Path) -> int:
    """Returns how many rows the checkpoint of a shard holds, or a few more."""
    told = Description.read(part)
    row = sum(field.nbytes for field in told.config.fields.values()) + sum(
        dtype.itemsize for dtype in ROW_COLUMNS.values()
    )
    return min(int(told.counts[0]), told.config.capacity, sum(size for _, size, _ in told.shards) // row)


def _until_done(
    shards: ShardClient, entries: Mapping[int, ShardEntry], call: Callable[[int, Any], Any]
) -> dict[int, ShardEntry]:
    """Calls shards until each says that it has ended what the first call began, or is lost; returns those that have.

    Raises:
        OSError, CheckpointError: One cannot.
    """
    left, done = dict(entries), dict[int, ShardEntry]()
    while left:
        with errors_as_raised():
            answers = shards.calls.collect({number: call(number, entry.actor) for number, entry in left.items()})
        done |= {number: left[number] for number, ended in answers.items() if ended}
        there = shards.table.entries  # one whose answer has not come is asked again, unless it is lost
        left = {number: entry for number, entry in left.items() if number not in done and number in there}
        if left:
            time.sleep(POLL)
    return dict(sorted(done.items()))


def _require_parts(paths: Sequence[Path]) -> None:
    for path in paths:
        if not is_checkpoint(path):
            raise CheckpointError(
                f"the part of the checkpoint in {path} is missing, as seen from here: a ShardedReplay is saved to a "
                f"directory that all its nodes share, and loaded from one"
            )


def _described(
    shards: ShardClient, config: Config, entries: Mapping[int, ShardEntry], sampler: ShardedSampler, name: str
) -> Manifest:
    born, streams = shards.coordinator.ask("counts")
    shards.exchange()
    table, counted = shards.table, shards.limiter
    return Manifest(
        replace(config, limiter=table.rule.limiter),
        sampler.seed,
        sampler.stream,
        sampler.made,
        name,
        tuple(Part(entry.number, entry.node, entry.capacity) for entry in entries.values()),
        Counts(
            born,
            streams,
            table.rule.inserted_before,
            table.rule.cleared,
            counted.counted,
            counted.drawn,
            counted.steps,
            table.lost_updates,
        ),
        tuple(lost for lost in table.lost if lost.number not in entries),
    )
