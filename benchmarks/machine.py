"""What the figures were measured on, and whether a case fits into its memory."""

import ctypes
import gc
import os
import platform
from collections.abc import Sequence
from importlib import metadata

from torchreplay.segment import reservation

PACKAGES = ("torchreplay", "torch", "numpy", "cpprb", "tianshou", "torchrl", "stable_baselines3")
RESERVE = 1 << 30
"""Bytes that the benchmarks leave to everybody else on the machine."""


def require_memory(needed: int, purpose: str) -> None:
    """Checks that memory is there before a benchmark takes it.

    Raises:
        MemoryError: Less than ``needed`` bytes and a reserve are available.
    """
    reservation.require_memory(needed, purpose, RESERVE)


def resident_bytes() -> int:
    """Returns this process's resident memory, shared mappings included, without what is garbage or free in the heap."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def describe() -> dict[str, str | int]:
    """Returns processor, cores, Python and package versions."""
    described: dict[str, str | int] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    return described | versions(PACKAGES)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the installed versions; packages that are not installed are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        for entry in cpuinfo:
            if entry.startswith("model name"):
                return entry.split(":", 1)[1].strip()
    return platform.machine()
