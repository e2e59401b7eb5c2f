"""What every test runs under: one torch thread, repeatable examples, no GPU tests without a GPU, nothing left over,
counts at the end.

Fixtures for many files: the path of a buffer in a file, a Ray, a cluster, what pools run on, Lightning's two names, and
what waits for the lock say.
"""

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import resource_sharer
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch
from belongings import belongings, described
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

THREADS_END = 5.0
"""Seconds within which threads are gone that have been told to end."""
SLOW_AS = 25
"""How many quick tests take as long as a slow one, on the average."""
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
    Modules that share a Ray come one after another. What takes longest comes first, so that all processes have work
    until the end.
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
    work = Counter[Path]()
    for item in items:
        work[item.path] += SLOW_AS if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: (-NODES[item.path], -work[item.path], item.path))


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
    _C.init_waits(tr.ReplayTimeout, tr.Stopped, texts.append, 0.08)
    yield texts
    _C.init_waits(tr.ReplayTimeout, tr.Stopped, waits.logger.warning, waits.LOG_EVERY)


@pytest.fixture(autouse=True)
def nothing_is_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves files in /dev/shm, child processes, or threads or descriptors of ours behind.

    What fixtures of a module or of the session have made is there before, and may stay. A thread with which a test has
    passed descriptors on to processes would stay for all tests behind it: a wait believes that it may write or draw.
    """
    resource_sharer.stop()
    before = belongings()
    yield
    if belongings() <= before:
        return
    request.node.funcargs = {}  # pytest keeps what fixtures have returned for longer
    gc.collect()
    deadline = time.monotonic() + THREADS_END
    while (left := belongings() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"the test left behind: {', '.join(map(described, sorted(left)))}"
