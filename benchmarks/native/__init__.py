"""The C++ driver of the trees, compiled when it is first needed."""

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BATCH_SIZE = 256
"""Draws or updates in one batch, fixed in the driver."""


class NativeTree:
    """A full tree driven from C++: torchreplay's core, or a textbook binary tree.

    Args:
        capacity: Number of leaves.
        binary: The textbook tree instead of the core's.

    Raises:
        MemoryError: There is no memory for the tree.
    """

    def __init__(self, capacity: int, binary: bool = False) -> None:
        self._library = load_driver()
        self._tree = self._library.tree_new(capacity, int(binary))
        if not self._tree:
            raise MemoryError(f"no memory for a tree of {capacity:,} leaves: run with --quick")

    def sample(self, batches: int) -> None:
        """Draws ``batches`` stratified batches of 256."""
        self._library.tree_sample(self._tree, batches)

    def update(self, batches: int) -> None:
        """Sets ``batches`` batches of 256 random leaves."""
        self._library.tree_update(self._tree, batches)

    def close(self) -> None:
        """Frees the tree."""
        self._library.tree_delete(self._tree)


def load_driver() -> Any:
    """Returns the driver's library, compiled from ``cpp/tree.h`` when that or the driver has changed.

    The flags are the package's own: no ``-march``, the tree chooses its instructions at run time.

    Raises:
        RuntimeError: The compiler (``$CXX``, or ``g++``) failed; the text is its own.
    """
    library = ROOT / "build" / "benchmarks" / "tree_driver.so"
    sources = [*HERE.glob("*.cpp"), *HERE.glob("*.h"), *(ROOT / "cpp").glob("*.h")]
    if not library.exists() or library.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(library)
    driver = ctypes.CDLL(str(library))
    driver.tree_new.restype = ctypes.c_void_p
    driver.tree_new.argtypes = [ctypes.c_int64, ctypes.c_int]
    driver.tree_sample.argtypes = driver.tree_update.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    driver.tree_delete.argtypes = [ctypes.c_void_p]
    return driver


def _compile(library: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    flags = ["-O3", "-std=c++20", "-shared", "-fPIC", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    command = [compiler, *flags, f"-I{ROOT / 'cpp'}", str(HERE / "tree_driver.cpp"), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise RuntimeError(f"cannot compile the tree driver with {compiler}:\n{built.stderr[-2000:]}")
