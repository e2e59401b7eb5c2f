"""What tests did in numbers and what they found broken, added up at the end of the run."""

from collections import Counter

import pytest
from forked import Hang

import torchreplay as tr

COUNTS = pytest.StashKey[Counter]()
NOTES = pytest.StashKey[list]()

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


@pytest.fixture
def tally(request):
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
        Tally(item.config)(kind_of(call.excinfo.value))
    return report


def pytest_sessionfinish(session):
    """Sends what this process has counted to the one that prints the summary, where tests run in several."""
    config = session.config
    if hasattr(config, "workeroutput") and COUNTS in config.stash:
        config.workeroutput["tally"] = (dict(config.stash[COUNTS]), config.stash[NOTES])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Adds what a process of tests has sent at its end; one that died has sent nothing."""
    counts, notes = getattr(node, "workeroutput", {}).get("tally", ({}, []))
    if counts or notes:
        tally = Tally(node.config)
        for what, n in counts.items():
            tally(what, n)
        for text in notes:
            tally.note(text)


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
