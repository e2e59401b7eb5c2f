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
from torchreplay.errors import CheckpointError
from torchreplay.ray.runtime.cluster import errors_as_raised
from torchreplay.ray.sharded.coordinator_client import checked_capacity
from torchreplay.ray.sharded.manifest import SHARDS, Counts, Manifest, Part
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.ray.sharded.shard_table import ShardEntry
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
    require_room(manifest, len(entries), root)
    _require_parts([manifest.path_of(root, part) for part in manifest.parts])
    parts = assigned(manifest.parts, {number: entry.node for number, entry in entries.items()})
    numbers, born = _numbered(entries, parts, manifest.counts.born)
    if any(figures.stats.writers and numbers.get(number) != number for number, figures in shards.figures.items()):
        raise CheckpointError(
            "explorers of this buffer have writers already, whose keys would be those of other shards' rows: restore a "
            "new one, before its explorers start"
        )
    paths = {number: str(manifest.path_of(root, part)) for number, part in parts.items()}
    try:
        filled = _until_done(shards, entries, lambda number, it: it.restore.remote(numbers[number], paths.get(number)))
        for number in entries.keys() - filled.keys():
            raise RuntimeError(f"shard {number} on node {entries[number].node} was lost while it was being restored")
        shards.restored(manifest, numbers, born)
    except BaseException as error:
        with suppress(Exception):  # the directory may be gone
            shards.coordinator.ask("stop")
            shards.look()
        error.add_note(
            "the buffer that was to be restored may hold a part of the checkpoint, and was stopped: close it, and "
            "restore a new one"
        )
        raise


def _numbered(entries: Mapping[int, ShardEntry], parts: Mapping[int, Part], born: int) -> tuple[dict[int, int], int]:
    """Returns which number each shard takes, by its present one, and how many numbers were given then.

    `parts` says which of the saved shards each becomes; others are new. `born` numbers were given before.
    """
    numbers = {number: part.number for number, part in parts.items()}
    for number in sorted(entries.keys() - parts.keys()):  # old keys must not name rows of shards that are new
        numbers[number], born = born, born + 1
    return numbers, born


def require_room(manifest: Manifest, nodes: int, root: Path) -> None:
    """Raises CheckpointError if there are fewer nodes than shards that were saved."""
    if nodes < len(manifest.parts):
        raise CheckpointError(
            f"the checkpoint in {root} has {len(manifest.parts)} shards, and there are {nodes} nodes for them: each "
            f"needs one of its own. Load it on a cluster of as many nodes or more"
        )


def assigned(parts: Sequence[Part], nodes: Mapping[int, str]) -> dict[int, Part]:
    """Returns which shard, by its present number, gets which part: its own node's, if that is one of the `nodes`."""
    at_home = {node: number for number, node in nodes.items()}
    found = {at_home[part.node]: part for part in parts if part.node in at_home}
    free = iter(sorted(nodes.keys() - found.keys()))
    return found | {next(free): part for part in parts if part.node not in at_home}


def capacities_for(manifest: Manifest, root: Path, nodes: Sequence[str], capacity: int | None) -> list[int]:
    """Returns how many rows of `capacity` each node gets, for `load`; None: as many on each node as before.

    As evenly as they can be divided with room for the rows of every part. Where not all rows fit, the largest parts
    lose some.

    Raises:
        CheckpointError: There are fewer nodes than parts, or a part is missing or damaged.
        ValueError: That is too few for so many nodes, or too many.
    """
    require_room(manifest, len(nodes), root)
    if capacity is None:
        before = sum(part.capacity for part in manifest.parts) or manifest.config.capacity
        each = -(-before // max(1, len(manifest.parts)))
        capacity = before + each * (len(nodes) - max(1, len(manifest.parts)))
    capacity = checked_capacity(capacity, len(nodes))
    _require_parts([manifest.path_of(root, part) for part in manifest.parts])
    parts = assigned(manifest.parts, dict(enumerate(nodes)))
    held = [_rows_in(manifest.path_of(root, parts[k])) if k in parts else 0 for k in range(len(nodes))]
    return divided(capacity, [max(1, rows) for rows in held])


def divided(capacity: int, rows: Sequence[int]) -> list[int]:
    """Returns `capacity` divided over as many nodes, so that as many of their `rows` fit as can, as even as that is.

    Above a level all nodes have what their rows need; or if that is too much, below it. The others are at the level.
    """
    fits = sum(rows) <= capacity
    each, left = [0] * len(rows), capacity
    # The first ones have more than the level if all fit, else less.
    for rank, place in enumerate(sorted(range(len(rows)), key=lambda k: -rows[k] if fits else rows[k])):
        whole, rest = divmod(left, len(rows) - rank)
        level = whole + (rest > 0)
        each[place] = max(rows[place], level) if fits else min(rows[place], level)
        left -= each[place]
    return each


def _rows_in(part: Path) -> int:
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
