"""`torchreplay watch`, as a user calls it: in pipes and on terminals, killed and ended."""

import json
import os
import re
import signal
import struct
import time
from multiprocessing import Pipe
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from live_commands import Command, Terminal, each_signal
from watched_buffers import make, write_for_ever

import torchreplay as tr
from torchreplay.cli.explorers import ExplorerWeights
from torchreplay.workers.worker_table import WorkerTable


def test_watch_in_a_pipe_prints_a_plain_line_for_each_interval(run, tmp_path):
    with Command(tmp_path / "out", "watch", run.name, "--interval", 0.1, "--seconds", 1.0) as command:
        assert command.wait() == 0
    lines = command.lines(run.name)
    assert len(lines) >= 3
    for line in lines:
        assert re.match(r"\d\d:\d\d:\d\d test [\d.]+: [\d,]+/4,096 rows, ", line), line
        assert "\x1b" not in line
        assert "1 writer, 1 learner" in line
        assert "(target 8)" in line


def test_watch_on_a_terminal_shows_a_panel_and_leaves_it_at_the_end(run):
    with Terminal("watch", run.name, "--interval", 0.2) as command:
        for text in (
            run.name,
            "rows written",
            "samples per insert",
            "explorers wait",
            "|TD error|",
            "learner",
            "works",
        ):
            eventually(lambda wanted=text: command.shows(wanted), timeout=20)
        command.signal(signal.SIGINT)
        assert command.wait() == 0
        command.shows("")
        command.close()
    assert "\x1b[?1049l" in command.text  # the screen of before is back
    assert run.name in command.text[command.text.rindex("\x1b[?1049l") :]  # and below it the last panel


def interrupted(command):
    """The last panel, which stays below the screen of before."""
    command.signal(signal.SIGINT)
    assert command.wait() == 0
    command.shows("")
    command.close()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", command.text[command.text.rindex("\x1b[?1049l") :])


@pytest.mark.parametrize("columns", [60, 200, pytest.param(80, marks=pytest.mark.slow)])
def test_watch_fits_terminals_of_any_width(run, columns):
    with Terminal("watch", run.name, "--interval", 0.2, columns=columns) as command:
        eventually(lambda: command.shows("late TD errors"), timeout=20)
        last = interrupted(command)
    assert max(len(line) for line in last.splitlines()) <= columns


def test_watch_goes_on_where_a_terminal_has_hardly_any_width(run):
    with Terminal("watch", run.name, "--interval", 0.1, columns=4) as command:
        eventually(lambda: command.shows("─") and command.text.count("\x1b[H") > 2, timeout=20)
        command.signal(signal.SIGINT)
        assert command.wait() == 0
        command.close()


def test_on_a_terminal_of_few_lines_charts_are_left_out_and_advice_is_not(run):
    with Terminal("watch", run.name, "--interval", 0.2, lines=24) as command:
        eventually(lambda: command.shows("works") and command.shows("✓ nothing looks wrong"), timeout=20)
        assert not command.shows("log scale")
        command.kill()
        command.close()


def test_watch_ends_when_the_buffer_is_gone(tmp_path):
    mine, theirs = Pipe()

    def own():
        buffer = make(name=f"mortal {os.getpid()}")
        theirs.send(buffer.name)
        signal.pause()

    with Forked(own) as owner:
        name = mine.recv()
        with Command(tmp_path / "out", "watch", name, "--interval", 0.1) as command:
            eventually(lambda: command.lines(name))
            owner.kill()
            assert command.wait(20) == 0
        assert command.output().splitlines()[-1].startswith(f"{name} is gone: the last process that had it has ended")


@each_signal
def test_watch_may_be_ended_by_any_signal(run, tmp_path, number):
    with Command(tmp_path / "out", "watch", run.name, "--interval", 0.1) as command:
        eventually(lambda: command.lines(run.name))
        command.signal(number)
        command.wait()
    stats = run.stats()
    assert (stats.writers, stats.learners) == (1, 1)


def test_watch_saves_its_last_screen_as_a_picture(run, tmp_path, call):
    text, svg = tmp_path / "screen.txt", tmp_path / "screen.svg"
    for path in (text, svg):
        assert call("watch", run.name, "--seconds", 0.3, "--picture", path).status == 0
    assert run.name in text.read_text()
    assert "samples per insert" in text.read_text()
    assert svg.read_text().startswith("<svg")
    assert "http" not in svg.read_text().replace("http://www.w3.org/2000/svg", "")


def test_watch_says_where_it_saved_the_picture(run, tmp_path, call):
    path = tmp_path / "screen.txt"
    assert f"saved {path}" in call("watch", run.name, "--seconds", 0.3, "--picture", path).output


def test_the_first_line_in_a_pipe_has_rates_of_the_time_since_the_first_look(run, tmp_path):
    with Command(tmp_path / "out", "watch", run.name, "--seconds", 2.5) as command:
        assert command.wait() == 0
    first = command.lines(run.name)[0]
    rate = re.search(r"([\d.]+( k)?) rows/s, ([\d.]+) batches/s", first)
    assert float(rate[3]) > 0
    assert rate[1] != "0"


@pytest.mark.parametrize("columns", [30, 45])
def test_watch_on_a_narrow_terminal_cuts_no_number(run, columns):
    with Terminal("watch", run.name, "--interval", 0.2, columns=columns) as command:
        eventually(lambda: command.shows("late TD errors"), timeout=20)
        last = interrupted(command)
    lines = [line.strip("│ ") for line in last.splitlines()]
    for label in ("rows written", "items drawn", "batches drawn", "TD errors"):
        assert any(re.fullmatch(rf"{label} +[\d.]+( [kMG])?/s", line) for line in lines), (label, last)
    assert "of 4,096 rows" in re.sub(r"\s+", " ", " ".join(lines))
    assert not any(re.search(r"\d…", line) for line in lines)


# Queues


@pytest.fixture
def sick_queue():
    """A full queue: an explorer waits for room, a stopped learner holds 30 of 100 items, another one waits for 90."""
    queue = make(100, sampler=tr.Fifo(commit="manual"))
    ready = shared_counters(2)

    def hold():
        ready[0] = len(queue.sample(30)["x"])
        signal.pause()

    def learn():
        ready[1] = 1
        queue.sample(90)

    with Forked(write_for_ever, queue, None, 1) as explorer:
        eventually(lambda: len(queue) == 100)
        with Forked(hold) as holder:
            eventually(lambda: ready[0] == 30)
            holder.signal(signal.SIGSTOP)
            with Forked(learn) as other:
                eventually(lambda: ready[1])
                yield SimpleNamespace(name=queue.name, explorer=explorer.pid, holder=holder.pid, other=other.pid)
                other.kill()
            holder.kill()
        explorer.kill()
    queue.close()


def test_watch_shows_of_a_queue_what_is_there_who_has_it_and_who_waits_for_whom(sick_queue, tmp_path, call):
    path = tmp_path / "screen.txt"
    assert call("watch", sick_queue.name, "--seconds", 1.5, "--picture", path).status == 0
    screen = re.sub("[ │\n]+", " ", path.read_text())
    assert "100 of 100 rows in use 100 %" in screen
    assert "Rows, Fifo(commit=manual)" in screen
    assert re.search(r"items to draw 70 .* the oldest came [\d.]+ m?s ago items held 30 .* by 1 process ", screen)
    assert re.search(r"explorers wait .* of their time; 1 of 1 at this moment", screen)
    assert re.search(r"learners wait .* of their time; 1 of 2 at this moment", screen)
    assert re.search(rf"learner {sick_queue.holder} .*? 30 stopped", screen)
    assert re.search(rf"learner {sick_queue.other} .* waits for items", screen)
    assert re.search(
        rf"writer {sick_queue.explorer} .* waits for room, which process {sick_queue.holder} holds", screen
    )
    assert f"! Process {sick_queue.holder}, a learner, is stopped and holds 30 items, which nobody else gets" in screen
    for word in ("TD error", "samples per insert", "priorities"):  # there is no such thing
        assert word not in screen


def test_watch_in_a_pipe_and_list_say_how_much_of_a_queue_waits_and_is_held(sick_queue, call):
    (line,) = [text for text in call("watch", sick_queue.name, "--seconds", 1).output.splitlines() if "rows/s" in text][
        :1
    ]
    assert re.search(
        r": 100/100 rows, .* batches/s, 70 items to draw, 30 held, oldest [\d.]+ m?s, .*, 0 dropped, ", line
    )
    (row,) = [text for text in call("list").output.splitlines() if sick_queue.name in text]
    # Where a buffer of others on this machine has values of any length, there is a column for these.
    assert re.search(r" 100 / 100 +100 % +(- +)?0 +0 +1 +2 +70 +30 +\d", row)
    (listed,) = [one for one in json.loads(call("list", "--json").output) if one["name"] == sick_queue.name]
    assert (listed["to_draw"], listed["held_items"], listed["dropped_items"]) == (70, 30, 0)
    assert listed["oldest_age"] > 0


@pytest.mark.parametrize("columns", [30, 45, 60, 120])
def test_watch_of_a_queue_fits_terminals_of_any_width(sick_queue, columns):
    with Terminal("watch", sick_queue.name, "--interval", 0.2, columns=columns) as command:
        eventually(lambda: command.shows("items held"), timeout=20)
        last = interrupted(command)
    assert max(len(line) for line in last.splitlines()) <= columns
    assert not any(re.search(r"\d…", line) for line in last.splitlines())


def test_watch_of_what_is_not_there_says_what_is(run, call):
    result = call("watch", "nobody")
    assert result.status == 1
    assert "no live buffer is called 'nobody': there are" in result.output
    assert run.name in result.output


def test_watch_works_on_a_buffer_in_a_file(path, call):
    buffer = tr.ReplayBuffer({"x": tr.Field(2)}, 100, path=path)
    buffer.extend(x=np.zeros((10, 2)))
    result = call("watch", path, "--seconds", 1.2, "--interval", 0.5)
    assert "replay.bin: 10/100 rows" in result.output
    buffer.close()
    result = call("watch", path)
    assert result.status == 1


def test_watch_knows_the_weights_that_explorers_of_a_pool_act_on():
    table = WorkerTable(3)
    weights = tr.SharedWeights(module())
    table.begin(1)
    entry = table.entries[1]
    entry["weight_version"], entry["heartbeat"] = 0, time.monotonic()
    for _ in range(4):
        weights.publish(module())
    with ExplorerWeights() as known:
        (one,) = known.of({os.getpid()})
        assert (one.index, one.pid, one.version, one.published, one.behind) == (1, os.getpid(), 0, 4, 4)
        assert known.of({1}) == ()


@pytest.mark.parametrize(
    "content",
    [b"", bytes(3), bytes(4099), struct.pack("<8sqqq", b"Tworkers", 1, 0, 0) + bytes(4000)],
    ids=["not sized yet", "too short", "of another layout", "of another version"],
)
def test_watch_passes_over_tables_of_pools_that_it_cannot_read(content):
    other = os.memfd_create("torchreplay-table-of-a-pool-of-workers")
    os.write(other, content)
    table = WorkerTable(1)
    table.begin(0)
    try:
        with ExplorerWeights() as known:
            assert [one.index for one in known.of({os.getpid()})] == [0]
    finally:
        os.close(other)


def module():
    return torch.nn.Linear(2, 2)
