"""How a dataset that waits for its first rows shows it."""

import os
import pty
import sys

import pytest
from forked import Forked, eventually
from limited_buffers import buffer_with, extend

import torchreplay as tr
from torchreplay.segment import waits

FIGURES = "10 items were inserted, 100 are needed and 10 can be drawn; writers alive: "
ERASE_LINE = "\x1b[2K"


@pytest.fixture
def buffer():
    buffer = buffer_with(tr.MinSize(100))
    extend(buffer, 10)
    return buffer


def draw_on_a_terminal(buffer, slave):
    os.environ.update(TERM="xterm", COLUMNS="200")
    sys.stderr = os.fdopen(slave, "w")
    batches = iter(tr.ReplayDataset(buffer, batch_size=4))
    next(batches)
    sys.stderr.write("<first>")
    sys.stderr.flush()
    buffer.limiter = tr.MinSize(300)
    next(batches)


def test_a_terminal_shows_one_live_line_that_is_gone_when_the_first_batch_comes(buffer, monkeypatch):
    monkeypatch.setattr(waits, "LONG_AFTER", 0.0)
    master, slave = pty.openpty()
    shown = [""]

    def read():
        shown[0] += os.read(master, 4096).decode()
        return shown[0]

    with Forked(draw_on_a_terminal, buffer, slave) as learner:
        eventually(lambda: read().count(FIGURES) > 2)
        assert "\n" not in shown[0], "it is one line"
        extend(buffer, 100)
        eventually(lambda: "<first>" in read())
        line, after = shown[0].split("<first>")
        assert ERASE_LINE in line.rsplit(FIGURES, 1)[1], "the line is still there"
        eventually(lambda: buffer.limiter == tr.MinSize(300))
        extend(buffer, 500)
        assert learner.wait() == 0
    os.close(slave)
    os.close(master)
    assert "waiting for rows" not in after  # only the first batch is worth a line


def test_elsewhere_a_log_line_comes_every_so_often(buffer, monkeypatch, caplog):
    assert waits.LOG_EVERY == 10.0
    monkeypatch.setattr(waits, "LOG_EVERY", 0.1)
    buffer.handle()  # somebody else could write
    with pytest.raises(tr.ReplayTimeout):
        next(iter(tr.ReplayDataset(buffer, batch_size=4, timeout=0.3)))
    lines = [record.getMessage() for record in caplog.records]
    assert lines
    assert all(line.startswith("waiting for rows since 0 s: " + FIGURES) for line in lines)
    assert len(lines) <= 3


def test_a_wait_that_ends_in_an_error_takes_its_line_away_too(buffer, monkeypatch):
    monkeypatch.setattr(waits, "LONG_AFTER", 0.0)
    seen = []

    class Line:
        def show(self, text):
            seen.append(text)

        def close(self):
            seen.append("closed")

    monkeypatch.setattr(waits.LiveLine, "on_terminal", Line)
    buffer.handle()
    with pytest.raises(tr.ReplayTimeout):
        next(iter(tr.ReplayDataset(buffer, batch_size=4, timeout=0.2)))
    assert seen[0].startswith("waiting for rows since 0 s: " + FIGURES)
    assert seen[-1] == "closed"
    assert seen.count("closed") == 1
