"""What this machine gives to shared replay, and what to change where it could give more."""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

from torchreplay import _C
from torchreplay.segment.reservation import available_memory, cgroup_levels, new_memory, size_text

HUGE_PAGE: Final = 2 << 20
GIB: Final = 1 << 30
PACKAGES: Final = {
    "numpy": "",
    "torch": "",
    "ray": "pip install ray brings explorers on many nodes",
    "lightning": "pip install lightning brings the callbacks for its Trainer",
    "pytorch-lightning": "pip install pytorch-lightning brings the callbacks for its Trainer",
    "gymnasium": "pip install gymnasium brings specs from environments",
    "h5py": "pip install h5py brings Minari's file format",
    "matplotlib": "pip install matplotlib brings plots of a run",
}
"""Those that torchreplay works with, and what each is good for where it may be missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one thing.

    Attributes:
        topic: The thing.
        value: What was found.
        ok: Whether it is as it should be.
        advice: What to change, and why; "" where there is nothing to say.
    """

    topic: str
    value: str
    ok: bool
    advice: str = ""


def examine() -> list[Finding]:
    """Returns what this machine gives, a finding a line. Takes 4 MB of memory for a moment, and changes nothing."""
    looks: tuple[Callable[[], Finding | None], ...] = (
        _kernel,
        _memory,
        _cgroup,
        _memory_files,
        _huge_pages,
        _dev_shm,
        _cores,
        _simd,
        _open_files,
        _page_locking,
    )
    found = [finding for look in looks if (finding := look()) is not None]
    return [*found, _cuda(), *_versions()]


def _kernel() -> Finding:
    release = os.uname().release
    numbers = [int(number) for number in re.findall(r"\d+", release)[:2]]
    ok = numbers >= [6, 1]
    return Finding("kernel", f"Linux {release}", ok, "" if ok else "Linux 6.1 or later gives shared memory huge pages")


def _memory() -> Finding:
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(info[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    ok = free > GIB
    advice = "end other processes: a buffer is reserved in full when it is made, or refused"
    return Finding("memory", f"{size_text(free)} of {size_text(total)} can be had", ok, "" if ok else advice)


def _cgroup() -> Finding | None:
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    machine, here = int(info["MemAvailable"].split()[0]) * 1024, available_memory()
    if here > machine - (64 << 20):  # the machine's own memory moves between two looks
        return Finding("memory limit", "none below what the machine has", True)
    advice = "raise the container's or the job's memory limit: shared memory counts towards it"
    ok = here > GIB
    return Finding("memory limit", f"{size_text(here)} are left under the cgroup's limit", ok, "" if ok else advice)


def _memory_files() -> Finding:
    try:
        os.close(new_memory(HUGE_PAGE, "doctor"))
    except OSError as error:
        return Finding(
            "memfd", f"refused: {error.strerror}", False, "allow memfd_create and its seals (seccomp profile)"
        )
    return Finding("memfd", "anonymous shared memory can be made and sealed", True)


def _huge_pages() -> Finding:
    """Asks for one, as buffers do: settings say less than the answer."""
    wanted = os.environ.get("TORCHREPLAY_HUGE_PAGES") != "0"
    try:
        fd = new_memory(2 * HUGE_PAGE, "doctor")
    except OSError as error:
        return Finding("huge pages", f"not tried: {error.strerror}", False)
    try:
        taken = _C.take_huge_pages(fd, 0, HUGE_PAGE)
    finally:
        os.close(fd)
    if taken:
        return Finding("huge pages", "given: 2 MB each", True)
    advice = (
        "take TORCHREPLAY_HUGE_PAGES=0 out of the environment"
        if not wanted
        else (
            "use Linux 6.1 or later, with /sys/kernel/mm/transparent_hugepage/enabled not set to 'never': "
            "with pages of 4 KB draws from large buffers miss the translation buffer at nearly each row"
        )
    )
    return Finding("huge pages", "not given", False, advice)


def _dev_shm() -> Finding:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding("/dev/shm", "is not there", False, "mount a tmpfs there: DataLoader workers and Ray need it")
    ok = size >= GIB
    advice = "docker run --shm-size=4g: buffers do not use it, but DataLoader workers and Ray's object store do"
    return Finding("/dev/shm", f"{size_text(size)}, of which buffers use nothing", ok, "" if ok else advice)


def _cores() -> Finding:
    machine, mine = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    share = _cpu_limit()
    usable = min(float(mine), share or mine)
    text = f"{mine} of {machine} may be used" + (f", {share:g} at a time (cgroup)" if share and share < mine else "")
    if usable < 2:
        return Finding("cores", text, False, "give it two or more: explorers and learner take turns on one")
    return Finding("cores", text, True)


def _cpu_limit() -> float | None:
    """Returns how many cores the cgroups allow; None for no limit, or none that can be seen."""
    limits = []
    with suppress(OSError):
        for version, level in cgroup_levels("cpu"):
            with suppress(OSError, ValueError):  # the root has no limit; "max" is none
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
                quota, period = " ".join((level / name).read_text() for name in names).split()
                limits.append(int(quota) / int(period))
    return min((limit for limit in limits if limit > 0), default=None)  # in version 1, -1 is none


def _simd() -> Finding:
    used = _C.simd()
    if used != "portable":
        return Finding("vector instructions", used, True)
    if os.environ.get("TORCHREPLAY_SIMD") == "portable":
        return Finding("vector instructions", "portable", False, "take TORCHREPLAY_SIMD out of the environment")
    return Finding("vector instructions", "portable: this processor has no AVX-512", True, "draws take somewhat longer")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = soft == resource.RLIM_INFINITY or soft >= 1024
    return Finding(
        "open files", f"at most {soft:,}", ok, "" if ok else "ulimit -n 65536: each attached buffer takes one"
    )


def _page_locking() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if soft == resource.RLIM_INFINITY else f"at most {size_text(soft)} a process"
    if soft == resource.RLIM_INFINITY or not torch.cuda.is_available():
        return Finding("page-locking", text, True)
    advice = "ulimit -l unlimited: some drivers count what pin='staging' and pin='ring' page-lock"
    return Finding("page-locking", text, False, advice)


def _cuda() -> Finding:
    if not torch.cuda.is_available():
        built = (
            f"torch was built with CUDA {torch.version.cuda}" if torch.version.cuda else "torch was built without it"
        )
        ok = not torch.version.cuda
        return Finding(
            "CUDA", f"no device; {built}", ok, "" if ok else "look at nvidia-smi, and at CUDA_VISIBLE_DEVICES"
        )
    names = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    return Finding(
        "CUDA", f"{torch.version.cuda}, {torch.cuda.device_count()} devices: {', '.join(sorted(names))}", True
    )


def _versions() -> Iterator[Finding]:
    yield Finding("python", sys.version.split()[0], True)
    least = dict(_least_versions())
    for name, use in PACKAGES.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "not installed", True, use)
            continue
        ok = _numbers(version) >= _numbers(least.get(name, "0"))
        yield Finding(name, version, ok, "" if ok else f"torchreplay needs {least[name]} or later")


def _least_versions() -> Iterator[tuple[str, str]]:
    """Yields the names and least versions of what torchreplay asks for, also where it is optional."""
    try:
        asked = metadata.requires("torchreplay") or []
    except metadata.PackageNotFoundError:  # it runs from its sources
        return
    for requirement in asked:
        if match := re.match(r"([\w.-]+)(?:\[[^]]*\])?[^;]*?>=\s*([\d.]+)", requirement):
            yield match.group(1), match.group(2)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3]]
