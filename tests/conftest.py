"""What every test runs under: one torch thread, repeatable examples, no GPU tests without a GPU, nothing left over,
counts at the end.

Fixtures for many files: the path of a buffer in a file, a Ray, a cluster, what pools run on, Lightning's two names, and
what waits for the lock say.
"""

import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch
from cluster import RayCluster, SharedCluster
from tally import (
    pytest_runtest_makereport,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    tally,
)

import torchreplay as tr
from torchreplay import _C
from torchreplay.segment import waits

__all__ = [
    "pytest_runtest_makereport",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
    "tally",
]

OURS = {str(path) for path in Path(tr.__file__).parent.rglob("*.py")}
THREADS_END = 5.0
"""Seconds within which threads are gone that have been told to end."""
NODES = Counter[Path]()
"""How many nodes of the shared Ray the tests of a file ask for, as far as it matters for the order."""

# Several processes share few cores: a thread pool in each of them measures the scheduler, not the code.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Ray's workers, those of the examples too: at its niceness of 15 they hardly ever run beside other tests.
os.environ.setdefault("RAY_worker_niceness", "0")

# No deadline: a busy machine is no failure. The same examples on every run: a red build must be repeatable.
hypothesis.settings.register_profile("torchreplay", deadline=None, derandomize=True)
hypothesis.settings.load_profile("torchreplay")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Lets `-k` find tests by the Ray or the cluster that they use; skips `gpu` tests where CUDA is missing.

    Lightning's two libraries have the same code. Slow tests of the second one are left to `make soak`.
    Modules that share a Ray come one after another. Among them, those with most tests come first.
    """
    for item in items:
        item.extra_keyword_matches.update({"ray", "cluster"} & {*getattr(item, "fixturenames", ())})
        callspec = getattr(item, "callspec", None)
        if item.get_closest_marker("slow") and callspec and callspec.params.get("lightning") == "lightning.pytorch":
            item.add_marker(pytest.mark.soak)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    yield
    for item in items:
        names = {*getattr(item, "fixturenames", ())}
        asked = 2 if {"shared_cluster", "cluster"} <= names else int(bool({"shared_cluster", "backend"} & names))
        NODES[item.path] = max(NODES[item.path], asked)
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (-NODES[item.path], -tests[item.path], item.path))


def pytest_collection_finish() -> None:
    """Spares the collections of garbage, one after nearly every test, what stays until the end: modules and tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[SharedCluster]:
    """The Ray that modules share, one after another."""
    shared = SharedCluster()
    yield shared
    shared.end()


@pytest.fixture(scope="module", autouse=True)
def no_ray_unless_a_test_asks_for_it(request: pytest.FixtureRequest) -> None:
    """Ends the shared Ray where a module has no test that asks for it."""
    if not NODES[request.node.path]:
        request.getfixturevalue("shared_cluster").end()


@pytest.fixture(scope="module")
def ray(shared_cluster: SharedCluster) -> Iterator[ModuleType]:
    """A Ray of one node, which has two CPUs."""
    with shared_cluster.of(1) as cluster:
        yield cluster.ray


@pytest.fixture(scope="module")
def cluster(shared_cluster: SharedCluster) -> Iterator[RayCluster]:
    """A Ray cluster of two nodes. The rows of sharded buffers are known on both."""
    pytest.importorskip("ray")
    import sharded_rows

    with shared_cluster.of(2) as cluster:
        cluster.ray.cloudpickle.register_pickle_by_value(sharded_rows)  # workers have no tests to import it from
        yield cluster


@pytest.fixture(scope="module", params=["ray", "process"])
def backend(request: pytest.FixtureRequest) -> str:
    """What a pool runs its workers on: each test of it holds for both."""
    if request.param == "ray":
        request.getfixturevalue("ray")
    return str(request.param)


@pytest.fixture(params=["pytorch_lightning", "lightning.pytorch"])
def lightning(request: pytest.FixtureRequest) -> ModuleType:
    """One of the two libraries; each test of it runs under both, in one process."""
    return pytest.importorskip(request.param)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the rows of a checkpoint many files."""
    monkeypatch.setattr("torchreplay.checkpoint.buffer_checkpoint.SHARD_BYTES", 4096)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test may make a buffer in a file."""
    return tmp_path / "replay.bin"


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What long waits for the lock say, every other slice, in this process and in those that it forks."""
    texts: list[str] = []
    _C.init_waits(tr.ReplayTimeout, texts.append, 0.08)
    yield texts
    _C.init_waits(tr.ReplayTimeout, waits.logger.warning, waits.LOG_EVERY)


@pytest.fixture(autouse=True)
def nothing_is_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves files in /dev/shm, child processes, or threads or descriptors of ours behind.

    What fixtures of a module or of the session have made is there before, and may stay.
    """
    before = _belongings()
    yield
    if _belongings() <= before:
        return
    request.node.funcargs = {}  # pytest keeps what fixtures have returned for longer
    gc.collect()
    deadline = time.monotonic() + THREADS_END
    while (left := _belongings() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"the test left behind: {', '.join(map(_described, sorted(left)))}"


def _belongings() -> set[str]:
    return _files_in_dev_shm() | _children() | _threads() | _descriptors()


def _files_in_dev_shm() -> set[str]:
    """Files in shared memory, without those of Ray, multiprocessing's semaphores, and files named after another living
    process, as torch and the tests beside this one make them."""
    names = (name for name in os.listdir("/dev/shm") if not name.startswith(("plasma", "ray", "sem.")))
    return {f"/dev/shm/{name}" for name in names if not _is_anothers(name)}


def _is_anothers(name: str) -> bool:
    if not name.startswith(("torch_", "torchreplay_")):
        return False
    pid = name.split("_")[1]
    return pid != str(os.getpid()) and os.path.exists(f"/proc/{pid}")


def _children() -> set[str]:
    """Child processes, without the two that multiprocessing starts once and keeps."""
    kept = {str(resource_tracker._resource_tracker._pid), str(forkserver._forkserver._forkserver_pid)}
    children = set[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            children.update((task / "children").read_text().split())
    return {f"process {pid}" for pid in children - kept}


def _described(name: str) -> str:
    """Returns the name of a belonging; of a process what it executes, too, which changes while it starts."""
    kind, _, pid = name.partition(" ")
    if kind == "process":
        with suppress(OSError):
            return f"{name}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')}"
    return name


def _threads() -> set[str]:
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


def _descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the one by which the directory was listed
            continue
        if target.startswith("/memfd:torchreplay-"):
            found.add(f"descriptor {fd} of {target}")
    return found
