"""Saving all shards of a `ShardedReplay` beside those who write and draw, and filling new ones from that."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torchreplay.checkpoint import NAME, alone, is_checkpoint, remove_unfinished, replace_file, require_alike
from torchreplay.config import Config
from torchreplay.errors import CheckpointError
from torchreplay.ray.directory import Place
from torchreplay.ray.members import Shards
from torchreplay.ray.session import import_ray
from torchreplay.ray.sharded_checkpoint import Counts, Manifest, Part

POLL: Final = 0.05
"""Seconds between two looks at shards that save or load."""


def save_shards(shards: Shards, config: Config, seed: int, stream: int, step: int, root: Path) -> None:
    """Does what `ShardedReplay.save` does.

    Args:
        shards: What to save.
        config: Of the union.
        seed: Of its draws.
        stream: The number of this process's stream of draws.
        step: The position there.
        root: Where to.
    """
    root.mkdir(parents=True, exist_ok=True)
    with alone(root):
        data = root / f"shards-{secrets.token_hex(8)}"
        data.mkdir()
        try:
            places = shards.look().places
            paths = {number: str(data / str(number)) for number in places}
            _until_done(shards, places, lambda number, actor: actor.save.remote(paths[number]), "saved")
            _require_parts([data / str(number) for number in places])
            # Counted after the rows, as those of each shard are.
            manifest = _described(shards, config, places, seed, stream, step, data.name)
            replace_file(root / NAME, manifest.to_text().encode())
        except BaseException:
            shutil.rmtree(data, ignore_errors=True)
            raise
        # What the checkpoint before had, and what saves that were killed left.
        for other in root.glob("shards-*"):
            if other != data:
                shutil.rmtree(other, ignore_errors=True)
        remove_unfinished(root, NAME)


def restore_shards(shards: Shards, config: Config, manifest: Manifest, root: Path) -> None:
    """Does what `ShardedReplay.restore` does, but for this process's stream of draws."""
    require_alike(manifest.config, config, root)
    shards.exchange()
    if shards.table.lost or any(figures.issued for figures in shards.figures.values()):
        raise CheckpointError("the buffer holds rows already: restore a new one, before its explorers start")
    places = shards.table.places
    require_room(manifest, len(places), root)
    _require_parts([manifest.path_of(root, part) for part in manifest.parts])
    parts = assigned(manifest.parts, places)
    numbers, born = {number: part.number for number, part in parts.items()}, manifest.counts.born
    for number in sorted(places.keys() - parts.keys()):  # old keys must not name rows of shards that are new
        numbers[number], born = born, born + 1
    paths = {number: str(manifest.path_of(root, part)) for number, part in parts.items()}
    _until_done(
        shards, places, lambda number, actor: actor.restore.remote(numbers[number], paths.get(number)), "restored"
    )
    shards.restored(numbers, manifest.seed, replace(manifest.counts, born=born), manifest.lost, manifest.config.limiter)


def require_room(manifest: Manifest, nodes: int, root: Path) -> None:
    """Raises CheckpointError if there are fewer nodes than shards that were saved."""
    if nodes < len(manifest.parts):
        raise CheckpointError(
            f"the checkpoint in {root} has {len(manifest.parts)} shards, and there are {nodes} nodes for them: each "
            f"needs one of its own. Load it on a cluster of as many nodes or more"
        )


def assigned(parts: Sequence[Part], places: Mapping[int, Place]) -> dict[int, Part]:
    """Returns which shard, by its present number, gets which part: its own node's, if that is still there."""
    at_home = {place.node: number for number, place in places.items()}
    found = {at_home[part.node]: part for part in parts if part.node in at_home}
    free = iter(sorted(places.keys() - found.keys()))
    return found | {next(free): part for part in parts if part.node not in at_home}


def _until_done(shards: Shards, places: Mapping[int, Place], call: Callable[[int, Any], Any], what: str) -> None:
    """Calls shards until each says that it has ended what the first call began.

    Raises:
        RuntimeError: One is lost.
        OSError, CheckpointError: One cannot.
    """
    left = dict(places)
    while left:
        try:
            answers = shards.calls.collect({number: call(number, place.actor) for number, place in left.items()})
        except import_ray().exceptions.RayTaskError as error:
            raise error.cause from None
        gone = [left[number] for number in left.keys() - answers.keys()]
        if gone:
            raise RuntimeError(
                f"shard {gone[0].number} on node {gone[0].node} was lost while it was being {what}: try again"
            )
        left = {number: place for number, place in left.items() if not answers[number]}
        if left:
            time.sleep(POLL)


def _require_parts(paths: Sequence[Path]) -> None:
    for path in paths:
        if not is_checkpoint(path):
            raise CheckpointError(
                f"the part of the checkpoint in {path} is missing, as seen from here: a ShardedReplay is saved to a "
                f"directory that all its nodes share, and loaded from one"
            )


def _described(
    shards: Shards, config: Config, places: Mapping[int, Place], seed: int, stream: int, step: int, name: str
) -> Manifest:
    born, streams = shards.ask("counts")
    shards.exchange()
    table, counted = shards.table, shards.union_limiter
    return Manifest(
        replace(config, limiter=table.rule.limiter),
        seed,
        stream,
        step,
        name,
        tuple(Part(place.number, place.node, place.capacity) for place in places.values()),
        Counts(
            born,
            streams,
            table.rule.inserted_before,
            max(0, counted.sampled - counted.under_way),
            counted.drawn,
            counted.steps,
            table.lost_updates,
        ),
        tuple(lost for lost in table.lost if lost.number not in places),
    )
