"""What this process has of the system's: files in shared memory, children, threads and descriptors.

They have names and are not counted: what an earlier test has left may end meanwhile.
"""

import os
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from warm_interpreter import warm_process

import torchreplay as tr

OURS = {str(path) for path in Path(tr.__file__).parent.rglob("*.py")}


def threads():
    """The ids of all threads, of Python and native ones. One that was joined may be listed a moment longer."""
    return set(os.listdir("/proc/self/task"))


def descriptors():
    """The number of each open descriptor, and what it is of: device and inode."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one by which the directory was listed
            of = os.stat(f"/proc/self/fd/{fd}")
            found.add((fd, of.st_dev, of.st_ino))
    return found


def belongings() -> set[str]:
    """The names of all that a test must not leave behind."""
    return _files_in_dev_shm() | _children() | our_threads() | our_descriptors()


def _files_in_dev_shm() -> set[str]:
    """Files in shared memory, without those of Ray, multiprocessing's semaphores, and files named after another living
    process, as torch and the tests beside this one make them. A process that is killed may leave one of torch's: it
    takes the name away in a second call."""
    names = (name for name in os.listdir("/dev/shm") if not name.startswith(("plasma", "ray", "sem.")))
    return {f"/dev/shm/{name}" for name in names if not _is_anothers(name)}


def _is_anothers(name: str) -> bool:
    if not name.startswith(("torch_", "torchreplay_")):
        return False
    pid = name.split("_")[1]
    return pid != str(os.getpid()) and (name.startswith("torch_") or os.path.exists(f"/proc/{pid}"))


def _children() -> set[str]:
    """Child processes, without the two that multiprocessing starts once and keeps, and that which runs programs."""
    started_once = (resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid, warm_process())
    kept = {str(pid) for pid in started_once}
    children = set[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            children.update((task / "children").read_text().split())
    return {f"process {pid}" for pid in children - kept}


def described(name: str) -> str:
    """Returns the name of a belonging; of a process what it executes, too, which changes while it starts."""
    kind, _, pid = name.partition(" ")
    if kind == "process":
        with suppress(OSError):
            return f"{name}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')}"
    return name


def our_threads() -> set[str]:
    """Threads that execute code of the package, and native ones that draw; those of a buffer's copies wait for ever."""
    found = set()
    for ident, frame in sys._current_frames().items():
        if ident != threading.main_thread().ident:
            codes = [frame.f_code for frame, _ in traceback.walk_stack(frame) if frame.f_code.co_filename in OURS]
            found.update(f"thread {ident} in {code.co_qualname}" for code in codes[-1:])
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text() == "replay-ahead\n":
                found.add(f"thread {task.name} that draws ahead")
    return found


def our_descriptors() -> set[str]:
    """Descriptors of the package's shared memory."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the one by which the directory was listed
            continue
        if target.startswith("/memfd:torchreplay-"):
            found.add(f"descriptor {fd} of {target}")
    return found
