"""Files of transitions: ours, which hold arrays and nothing else, and cpprb's, whose pickles are read with care."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

VERSION = 1
PREFIX = "column:"


class ArrayUnpickler(pickle.Unpickler):
    """Reads NumPy arrays in dicts and lists, and refuses the rest: a pickle may call anything."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns what rebuilds an array.

        Raises:
            ValueError: It is something else.
        """
        if module.split(".")[0] == "numpy" and name in {"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"}:
            return super().find_class(module, name)
        raise ValueError(f"the file would call {module}.{name}: it is none that cpprb has written")


def save_columns(file: str | Path | IO[bytes], columns: Mapping[str, NDArray[Any]], nstep: bool) -> None:
    """Writes columns `[n, *shape]`, and whether they are n-step transitions, as a compressed npz file."""
    arrays: dict[str, Any] = {f"{PREFIX}{name}": values for name, values in columns.items()}
    np.savez_compressed(file, torchreplay=np.int64(VERSION), nstep=np.bool_(nstep), **arrays)


def load_columns(file: str | Path | IO[bytes], nstep: bool) -> dict[str, NDArray[Any]]:
    """Returns the columns of a file of ours, or of cpprb's.

    Args:
        file: Its name, or a file that is open for reading.
        nstep: Whether they must be n-step transitions.

    Raises:
        ValueError: It is no such file, of a later version, or `nstep` is not so.
    """
    with np.load(file, allow_pickle=False) as data:
        ours = "torchreplay" in data
        if not ours and not {"version", "Nstep"} <= set(data):
            raise ValueError("the file holds no transitions that save_transitions has written")
        version, stored = (data["torchreplay"], data["nstep"]) if ours else (data["version"], data["Nstep"])
        if int(version) != VERSION:
            raise ValueError(f"the file is of version {int(version)}: expected {VERSION}")
        if bool(stored) != nstep:
            kinds = ("transitions of one step", "n-step transitions")
            raise ValueError(f"the file holds {kinds[bool(stored)]}, and the buffer {kinds[nstep]}")
        if ours:
            return {name.removeprefix(PREFIX): data[name] for name in data.files if name.startswith(PREFIX)}
        return _columns_of_cpprb(data)


def _columns_of_cpprb(data: Any) -> dict[str, NDArray[Any]]:
    """Returns the columns of a file that cpprb has written, of either kind."""
    columns: dict[str, NDArray[Any]] = _object_in(data, "data")
    if data["safe"]:
        return columns
    # Stored as in cpprb's ring: next values are in the next row, and in `cache` where that is another episode's.
    names = _object_in(data, "next_of")
    for name in [] if names is None else names:
        columns[f"next_{name}"] = np.roll(columns[name], -1, axis=0)
    columns = {name: np.array(values) for name, values in columns.items()}
    for place, values in _object_in(data, "cache").items():
        for name, value in values.items():
            columns[name][place] = value
    return columns


def _object_in(data: Any, name: str) -> Any:
    """Returns an array, or the object that one without dimensions holds as a pickle."""
    with data.zip.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        _, _, dtype = read(member)
        return ArrayUnpickler(member).load().item() if dtype.hasobject else data[name]
