"""What tests did in numbers and what they found broken, added up at the end of the run; nothing may be left of them."""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
from forked import Hang

import torchreplay as tr

COUNTS = pytest.StashKey[Counter]()
NOTES = pytest.StashKey[list]()
FAILED = pytest.StashKey[bool]()

# pytest-timeout ends a test by pytest.fail.
HANGS = (Hang, tr.ReplayTimeout, tr.WouldBlockForever, pytest.fail.Exception)
BROKEN = ("hang", "torn row", "foreign row", "lost row", "lost slot", "stale TD error")


class Tally:
    """Counts and remarks of all tests of a run."""

    def __init__(self, config):
        self._counts = config.stash.setdefault(COUNTS, Counter())
        self._notes = config.stash.setdefault(NOTES, [])

    def __call__(self, what, n=1):
        self._counts[what] += n

    def note(self, text):
        self._notes.append(text)


def belongings():
    """Child processes, open descriptors, and files in /dev/shm as Python, torch or torchreplay would name them."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    files = [name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "sem.", "torch"))]
    return children, len(os.listdir("/proc/self/fd")), sorted(files)


@pytest.fixture
def nothing_is_left(request):
    """No process, no descriptor and no file that was not there before the test; a failure's traceback may hold some."""
    before = belongings()
    yield
    if belongings() != before and FAILED not in request.node.stash:
        gc.collect()
        assert belongings() == before


@pytest.fixture
def tally(request, nothing_is_left):
    """`tally("rows checked", n)` adds to a line of the summary; `tally.note(text)` is a line by itself."""
    return Tally(request.config)


def kind_of(error):
    """Which promise a failure breaks, or just that it is one."""
    if isinstance(error, HANGS):
        return "hang"
    return next((kind for kind in BROKEN if kind in str(error)), "other failure")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if "tally" in item.fixturenames and report.failed:
        item.stash[FAILED] = True
        Tally(item.config)(kind_of(call.excinfo.value))
    return report


def pytest_terminal_summary(terminalreporter, config):
    counts = config.stash.get(COUNTS, None)
    if counts is None:
        return
    terminalreporter.section("what was counted")
    done = sorted(counts.keys() - {*BROKEN, "other failure"})
    for what in (*done, *BROKEN, "other failure"):
        terminalreporter.write_line(f"{counts[what]:>16,}  {what if what in done else what + 's'}")
    for text in config.stash[NOTES]:
        terminalreporter.write_line(f"  {text}")
