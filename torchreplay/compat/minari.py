"""Recorded episodes in Minari's file format, HDF5: read into a buffer, and written from one.

The layout is that of Minari's `main_data.hdf5`: a group `episode_<i>` with `observations` `[T + 1, ...]`, `actions`,
`rewards`, `terminations` and `truncations` `[T, ...]`. Dict spaces are groups, tuple spaces groups of `_index_<k>`.
Tested with h5py 3.16; Minari itself is not needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import torch

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.schema.batch_plan import as_path
from torchreplay.schema.spec import Field, spec_like
from torchreplay.schema.views import View

NAMES: Final[Mapping[str, str]] = {
    "obs": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminations",
    "truncated": "truncations",
}
"""Fields of a buffer, and what Minari calls them."""

TUPLE_INDEX: Final = re.compile(r"_index_(\d+)")


def episodes(path: str | os.PathLike[str], names: Mapping[str, str] = NAMES) -> Iterator[dict[str, Any]]:
    """Yields the episodes of a file, as `ReplayBuffer.extend(**episode)` takes them, in the order of their numbers.

    Args:
        path: An HDF5 file, or the directory of a Minari data set.
        names: The fields wanted, and their names in the file.

    Raises:
        FileNotFoundError: There is no file.
        ValueError: It is no HDF5 file, holds no episode, or one lacks a field.
    """
    with _opened(path) as file:
        for group in _groups(file):
            missing = [there for there in names.values() if there not in group]
            if missing:
                raise ValueError(f"{group.name} in {path} has no {missing[0]!r}: it has {sorted(group)}")
            yield {name: _read(group[there]) for name, there in names.items()}


def spec_of(path: str | os.PathLike[str], names: Mapping[str, str] = NAMES) -> dict[str, Any]:
    """Returns the spec of a buffer for the episodes of a file: shapes and dtypes of the first one; rewards float32.

    Raises:
        As `episodes` does.
    """
    spec = spec_like(next(episodes(path, names)))
    return {name: Field() if names[name] == "rewards" else value for name, value in spec.items()}


def read(path: str | os.PathLike[str], buffer: ReplayBuffer, names: Mapping[str, str] = NAMES) -> int:
    """Writes the episodes of a file into a buffer.

    Args:
        path: An HDF5 file, or the directory of a Minari data set.
        buffer: Of a view that links rows. Its dtypes may differ from the file's: values are cast.
        names: The buffer's fields, and their names in the file.

    Returns:
        The number of episodes.

    Raises:
        As `episodes` and `ReplayBuffer.extend` do. Episodes that were written before stay.
    """
    number = 0
    for episode in episodes(path, names):
        buffer.extend(casting="unsafe", **episode)
        number += 1
    return number


def write(
    buffer: ReplayBuffer,
    path: str | os.PathLike[str],
    names: Mapping[str, str] = NAMES,
    *,
    unfinished: bool = False,
) -> int:
    """Writes the episodes that a buffer holds into a new file, while others go on writing to the buffer.

    Args:
        buffer: Of a view that links rows. Fields that `names` lacks keep their own name in the file.
        path: The file.
        names: The buffer's fields, and their names in the file.
        unfinished: As for `ReplayBuffer.episodes`. Their last step counts as truncated.

    Returns:
        The number of episodes.

    Raises:
        FileExistsError: There is a file.
        ValueError: The view links no rows.
    """
    return write_episodes(buffer.episodes(unfinished=unfinished), buffer.view, path, names)


def write_episodes(
    found: Iterable[Mapping[str, Any]], view: View, path: str | os.PathLike[str], names: Mapping[str, str] = NAMES
) -> int:
    """Writes episodes into a new file, one at a time.

    Args:
        found: As `ReplayBuffer.episodes` yields them.
        view: Of their buffer, which links rows.
        path: The file.
        names: The buffer's fields, and their names in the file.

    Returns:
        The number of episodes.

    Raises:
        FileExistsError: There is a file.
    """
    terminated, truncated = (_place(flag, names) for flag in (view.terminated, view.truncated))  # type: ignore[union-attr]
    number = steps = 0
    with h5py.File(path, "x") as file:
        for episode in found:
            group = file.create_group(f"episode_{number}")
            for name, value in episode.items():
                _write(group, names.get(name, name), value)
            length = len(group[terminated])
            if not group[terminated][-1]:
                group[truncated][-1] = True
            group.attrs.update(id=number, total_steps=length)
            number, steps = number + 1, steps + length
        file.attrs.update(total_episodes=number, total_steps=steps)
    return number


def _place(field: str, names: Mapping[str, str]) -> str:
    """Returns where a field, named as views do, lies in an episode's group."""
    first, *rest = as_path(field)
    return "/".join((names.get(first, first), *rest))


def _opened(path: str | os.PathLike[str]) -> h5py.File:
    place = Path(path)
    if place.is_dir():
        place = next((p for p in (place / "data" / "main_data.hdf5", place / "main_data.hdf5") if p.is_file()), place)
    if not place.is_file():
        raise FileNotFoundError(f"{path} is no HDF5 file, and no directory of a Minari data set")
    try:
        return h5py.File(place, "r")
    except OSError as error:
        raise ValueError(f"{place} is no HDF5 file: {error}") from None


def _groups(file: h5py.File) -> list[h5py.Group]:
    numbered = [(int(name.removeprefix("episode_")), name) for name in file if re.fullmatch(r"episode_\d+", name)]
    if not numbered:
        raise ValueError(f"{file.filename} holds no episode: expected groups episode_0, episode_1, ...")
    return [file[name] for _, name in sorted(numbered)]


def _read(node: Any) -> Any:
    if isinstance(node, h5py.Dataset):
        return node[()]
    indices = [TUPLE_INDEX.fullmatch(name) for name in node]
    return {
        index.group(1) if index else name: _read(node[name]) for index, name in zip(indices, node, strict=True)
    }  # a Tuple space is a dict of "0", "1", ... in a buffer


def _write(group: h5py.Group, name: str, value: Any) -> None:
    if isinstance(value, dict):
        inner = group.create_group(name)
        for part, content in value.items():
            _write(inner, f"_index_{part}" if part.isdigit() else part, content)
    else:
        # HDF5 has no bfloat16.
        narrow = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
        group.create_dataset(name, data=np.asarray(value.float() if narrow else value))
