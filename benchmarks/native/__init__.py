"""C++ drivers of the core, compiled when they are first needed."""

import ctypes
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BATCH_SIZE = 256
"""Draws or updates in one batch, fixed in the drivers."""


class NativeTree:
    """A full tree driven from C++: torchreplay's core, or a textbook binary tree.

    Args:
        capacity: Number of leaves.
        binary: The textbook tree instead of the core's.

    Raises:
        MemoryError: There is no memory for the tree.
    """

    def __init__(self, capacity: int, binary: bool = False) -> None:
        self._library = load_driver("tree_driver")
        self._library.tree_new.restype = ctypes.c_void_p
        self._library.tree_new.argtypes = [ctypes.c_int64, ctypes.c_int]
        self._library.tree_sample.argtypes = self._library.tree_update.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._library.tree_delete.argtypes = [ctypes.c_void_p]
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


class Mortals:
    """A full buffer whose learners die in the middle of their work.

    Args:
        capacity: Rows.
        linked: They are the rows of transitions.

    Raises:
        MemoryError: There is no memory for the buffer.
    """

    def __init__(self, capacity: int, linked: bool) -> None:
        self._library = load_driver("recovery_driver")
        self._library.recovery_new.restype = ctypes.c_void_p
        self._library.recovery_new.argtypes = [ctypes.c_int64, ctypes.c_int]
        for call in (self._library.recovery_absorbing, self._library.recovery_updating):
            call.restype = ctypes.c_double
            call.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._library.recovery_delete.argtypes = [ctypes.c_void_p]
        self._buffer = self._library.recovery_new(capacity, int(linked))
        if not self._buffer:
            raise MemoryError(f"no memory for a buffer of {capacity:,} rows: run with --quick")

    def after_absorbing(self, rows: int) -> float:
        """Returns the seconds of the first draw after a learner died that had absorbed ``rows`` of 200 new rows."""
        return self._survived(self._library.recovery_absorbing(self._buffer, rows))

    def after_updating(self, priorities: int) -> float:
        """Returns the seconds of the first draw after a learner died that had set ``priorities`` of 256 priorities."""
        return self._survived(self._library.recovery_updating(self._buffer, priorities))

    def _survived(self, seconds: float) -> float:
        if seconds < 0:
            raise RuntimeError("the learner did not die where it should")
        return seconds

    def close(self) -> None:
        """Frees the buffer."""
        self._library.recovery_delete(self._buffer)


def load_driver(name: str) -> ctypes.CDLL:
    """Returns a driver's library, compiled from the core's headers when those or the driver have changed.

    The flags are the package's own: no ``-march``, the tree chooses its instructions at run time.

    Raises:
        RuntimeError: The compiler (``$CXX``, or ``g++``) failed; the text is its own.
    """
    library = ROOT / "build" / "benchmarks" / f"{name}.so"
    sources = [*HERE.glob("*.cpp"), *HERE.glob("*.h"), *(ROOT / "cpp").rglob("*.h")]
    if not library.exists() or library.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(HERE / f"{name}.cpp", library)
    return ctypes.CDLL(str(library))


def _compile(driver: Path, library: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    flags = ["-O3", "-std=c++20", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC"]
    flags += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    command = [compiler, *flags, f"-I{ROOT / 'cpp'}", str(driver), "-o", str(library), "-pthread"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise RuntimeError(f"cannot compile {driver.name} with {compiler}:\n{built.stderr[-2000:]}")
