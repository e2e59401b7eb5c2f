"""What tests did in numbers and what they found broken, added up at the end of the run; nothing may be left of them."""

import contextlib
import gc
import os
from collections import Counter
from pathlib import Path

import pytest
from forked import Hang, eventually

import torchreplay as tr

COUNTS = pytest.StashKey[Counter]()
NOTES = pytest.StashKey[list]()
FAILED = pytest.StashKey[bool]()

# pytest-timeout ends a test by pytest.fail.
HANGS = (Hang, tr.ReplayTimeout, tr.WouldBlockForever, pytest.fail.Exception)
BROKEN = ("hang", "torn row", "foreign row", "lost row", "lost slot", "stale TD error", "leak")


class Tally:
    """Counts and remarks of all tests of a run."""

    def __init__(self, config):
        self._counts = config.stash.setdefault(COUNTS, Counter())
        self._notes = config.stash.setdefault(NOTES, [])

    def __call__(self, what, n=1):
        self._counts[what] += n

    def note(self, text):
        self._notes.append(text)


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # that of the listing itself
        return None


class Belongings:
    """Child processes, open descriptors, and files in /dev/shm as Python, torch or torchreplay would name them."""

    def __init__(self):
        self.children = set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
        self.descriptors = {fd: _target(fd) for fd in os.listdir("/proc/self/fd")}
        self.files = {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "sem.", "torch"))}

    def are_no_more_than(self, before):
        return (
            self.children <= before.children
            and len(self.descriptors) <= len(before.descriptors)
            and self.files <= before.files
        )


@pytest.fixture
def nothing_is_left(request):
    """No process, no descriptor and no file that was not there before the test; a failure's traceback may hold some."""
    before = Belongings()
    yield
    if FAILED in request.node.stash or Belongings().are_no_more_than(before):
        return
    gc.collect()
    # Other programs of the machine make files there, too, for a moment.
    with contextlib.suppress(Hang):
        eventually(lambda: Belongings().are_no_more_than(before), timeout=10)
    now = Belongings()
    assert now.are_no_more_than(before), f"leak: {vars(now)}, and before {vars(before)}"


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
