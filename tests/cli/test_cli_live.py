"""The commands for live buffers, as a user calls them: in processes, in pipes and on terminals, killed and ended."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from multiprocessing import Pipe
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from watched_buffers import content_of, full_disk, learn_for_ever, make, write_for_ever

import torchreplay as tr
from torchreplay.cli import main
from torchreplay.cli.explorers import ExplorerWeights
from torchreplay.monitoring.recording import Recording
from torchreplay.workers.worker_table import WorkerTable

PNG = b"\x89PNG\r\n\x1a\n"


def run_command(arguments, out):
    """In a process of its own: the command, whose output goes to a descriptor."""
    for stream in (0, 1, 2):
        os.dup2(out, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have commands in the background ignore it
    for name in ("COLUMNS", "LINES"):  # pytest-xdist sets them, and they come before the terminal's own size
        os.environ.pop(name, None)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code or 0)


class Command(Forked):
    """A command in a process of its own, whose output is in a file."""

    def __init__(self, path, *arguments):
        self._path = path
        with path.open("wb") as file:
            super().__init__(run_command, arguments, file.fileno())

    def output(self):
        return self._path.read_text()

    def lines(self, name):
        return [line for line in self.output().splitlines() if name in line]


@pytest.fixture
def call(tmp_path):
    """Calls a command, and returns its status and its output."""

    def call(*arguments):
        with Command(tmp_path / "output", *arguments) as command:
            return SimpleNamespace(status=command.wait(), output=command.output())

    return call


class Terminal(Forked):
    """A command on a terminal of its own."""

    def __init__(self, *arguments, columns=120, lines=50):
        self._mine, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        os.set_blocking(self._mine, False)
        self._seen = b""
        os.environ["TERM"] = "xterm-256color"
        super().__init__(run_command, arguments, theirs)
        os.close(theirs)

    @property
    def text(self):
        return self._seen.decode(errors="replace")

    def shows(self, text):
        try:
            while data := os.read(self._mine, 1 << 16):
                self._seen += data
        except OSError:  # nothing there, or the command has ended
            pass
        return text in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.text)

    def close(self):
        os.close(self._mine)


each_signal = pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)


@pytest.fixture
def run():
    """A buffer that an explorer fills and a learner draws from, neither of them as fast as it could."""
    buffer = make(4096, limiter=tr.SamplesPerInsert(8.0, min_size=64))
    rows, batches = shared_counters(1), shared_counters(1)
    with Forked(write_for_ever, buffer, rows), Forked(learn_for_ever, buffer, batches, 0.002):
        eventually(lambda: batches[0] > 5)
        yield buffer
    buffer.close()


# Commands


@pytest.mark.parametrize(("typed", "meant"), [("wach", "watch"), ("lst", "list"), ("plott", "plot")])
def test_a_command_that_is_not_there_names_the_one_that_is_most_like_it(call, typed, meant):
    result = call(typed)
    assert result.status == 2
    assert f"did you mean {meant}?" in result.output


def test_a_command_that_is_like_none_is_refused_without_a_suggestion(call):
    result = call("zzzzzz")
    assert result.status == 2
    assert "did you mean" not in result.output


@pytest.mark.parametrize("columns", [30, 80, 120])
def test_bench_cuts_no_number_on_a_terminal_of_any_width(monkeypatch, capsys, columns):
    from torchreplay.checking.speed import Figure
    from torchreplay.cli import bench

    monkeypatch.setenv("COLUMNS", str(columns))
    figures = [Figure("extend by an episode of 250 frames", 0.0123456789, 4.88, 251, 1_771_056)]
    monkeypatch.setattr(bench, "measure", lambda seconds: figures)
    bench.command.callback(1.0, False)
    row = re.sub(" +", " ", capsys.readouterr().out.splitlines()[1])
    assert row == "extend by an episode of 250 frames 12,345.7 ± 488 % 20,331 0.14"


# list


def test_list_shows_each_live_buffer(run, call):
    other = make()
    output = call("list").output
    for buffer in (run, other):
        (line,) = [line for line in output.splitlines() if buffer.name in line]
        assert f"#{os.fstat(buffer._segment.fd).st_ino}" in line
        assert str(os.getpid()) in line
    other.close()


def test_list_as_json_has_all_figures(run, call):
    (one,) = [one for one in json.loads(call("list", "--json").output) if one["name"] == run.name]
    assert (one["capacity"], one["nbytes"], one["nonce"]) == (run.capacity, run.nbytes, run._nonce)
    assert (one["writers"], one["learners"], one["pid"]) == (1, 1, os.getpid())
    assert one["rows_per_second"] > 0 < one["batches_per_second"]
    assert one["trouble"] == ""


def test_list_and_watch_show_both_measures_of_a_buffer_with_values_of_any_length(call):
    spec = {"tokens": tr.Ragged(torch.uint8)}
    name = f"ragged {os.getpid()}"
    with tr.ReplayBuffer(spec, 1000, ragged_bytes=1 << 20, name=name) as buffer, make() as other:
        buffer.extend(tokens=[b"x" * 5000] * 100)
        buffer.extend(tokens=[b"x" * 5000] * 50)
        buffer.sample(4)
        fill = buffer.stats().ragged_fill
        assert 0.7 < fill < 0.8
        lines = call("list").output.splitlines()
        told = next(line for line in lines if name in line)
        assert "150 / 1.00 k" in told
        assert f"{100 * fill:.0f} % of 1.00 MiB" in told
        assert " - " in next(line for line in lines if other.name in line)
        entry = next(entry for entry in json.loads(call("list", "--json").output) if entry["name"] == name)
        assert (entry["ragged_bytes"], entry["ragged_fill"]) == (1 << 20, fill)
        line = call("watch", name, "--plain", "--seconds", 0.3, "--interval", 0.1).output.splitlines()[0]
        assert f"150/1,000 rows, values {100 * fill:.0f} % of 1.00 MiB" in line


def test_list_without_a_buffer_says_what_to_do(monkeypatch, call):
    monkeypatch.setattr("torchreplay.monitoring.survey.shared_files", list)
    assert "start yours" in call("list").output
    assert json.loads(call("list", "--json").output) == []


def test_list_says_which_buffers_are_of_another_version(call):
    buffer = make()
    content = bytearray(content_of(buffer))
    content[8:16] = struct.pack("<Q", 2)
    fd = os.memfd_create("torchreplay-replay-buffer-old")
    os.write(fd, content)
    output = call("list").output
    # The command, a child, has inherited it: which of the two is named is a matter of their numbers.
    named = rf"#{os.fstat(fd).st_ino} \(process \d+\): the segment has format version 2, this build reads"
    assert re.search(named, output)
    os.close(fd)
    buffer.close()


@pytest.mark.slow
def test_list_of_a_cluster_shows_its_shards(cluster, tmp_path):
    from torchreplay.ray import ShardedReplay

    name = f"listed {os.getpid()}"  # other tests' shards are on this machine, too
    with ShardedReplay({"x": tr.Field(2)}, 1000, name=name) as replay:
        replay.extend(x=np.zeros((10, 2)))
        address = cluster.ray.get_runtime_context().gcs_address
        code = f"from torchreplay.cli import main; main(['list', '--json', '--ray', {address!r}])"
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170)
        assert answer.returncode == 0, answer.stderr
        listed = json.loads(answer.stdout[answer.stdout.index("[") :])
        shards = {one["name"]: one for one in listed if one["name"].startswith(f"{name}/")}
        assert set(shards) == {f"{name}/0", f"{name}/1"}
        assert sum(one["rows"] for one in shards.values()) == 10
        assert {one["node"] for one in shards.values()} <= set(cluster.node_ids)


def test_list_of_a_cluster_that_is_not_there_says_so(call):
    pytest.importorskip("ray")
    result = call("list", "--ray", "no such:address:at all")
    assert result.status != 0
    assert "the Ray cluster at 'no such:address:at all' cannot be reached" in result.output


# watch


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


@pytest.mark.parametrize("columns", [60, 200, pytest.param(80, marks=pytest.mark.slow)])
def test_watch_fits_terminals_of_any_width(run, columns):
    with Terminal("watch", run.name, "--interval", 0.2, columns=columns) as command:
        eventually(lambda: command.shows("late TD errors"), timeout=20)
        command.signal(signal.SIGINT)
        assert command.wait() == 0
        command.shows("")
        command.close()
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", command.text[command.text.rindex("\x1b[?1049l") :])
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
        command.signal(signal.SIGINT)
        assert command.wait() == 0
        command.shows("")
        command.close()
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", command.text[command.text.rindex("\x1b[?1049l") :])
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
    assert re.search(r" 100 / 100 +100 % +0 +0 +1 +2 +70 +30 +\d", row)
    (listed,) = [one for one in json.loads(call("list", "--json").output) if one["name"] == sick_queue.name]
    assert (listed["to_draw"], listed["held_items"], listed["dropped_items"]) == (70, 30, 0)
    assert listed["oldest_age"] > 0


@pytest.mark.parametrize("columns", [30, 45, 60, 120])
def test_watch_of_a_queue_fits_terminals_of_any_width(sick_queue, columns):
    with Terminal("watch", sick_queue.name, "--interval", 0.2, columns=columns) as command:
        eventually(lambda: command.shows("items held"), timeout=20)
        command.signal(signal.SIGINT)
        assert command.wait() == 0
        command.shows("")
        command.close()
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", command.text[command.text.rindex("\x1b[?1049l") :])
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


# record and plot


def test_a_recording_has_what_the_buffer_counted_meanwhile(run, tmp_path, call):
    path = tmp_path / "run.rec"
    before = run.stats()
    assert call("record", path, run.name, "--seconds", 0.5, "--rate", 40).status == 0
    after = run.stats()
    recording = Recording.read(path)
    assert 10 <= len(recording.seconds) <= 22
    for name, low, high in (
        ("head", before.rows_written, after.rows_written),
        ("sampled", before.sampled, after.sampled),
        ("updated", before.updated, after.updated),
    ):
        values = recording.counters[name]
        assert low <= values[0] < values[-1] <= high
        assert (np.diff(values) >= 0).all()
    assert set(recording.counters["writers"]) == {1}


@pytest.mark.slow
def test_plot_makes_a_picture_of_a_recording(run, tmp_path, call):
    path = tmp_path / "run.rec"
    call("record", path, run.name, "--seconds", 0.5)
    assert call("plot", path).output.strip() == str(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)
    assert call("plot", path, "-o", tmp_path / "dark.png", "--dark").status == 0
    assert (tmp_path / "dark.png").read_bytes() != (tmp_path / "run.png").read_bytes()
    assert call("plot", path, "-o", tmp_path / "dark.xyz").status == 1


@each_signal
def test_a_recording_may_be_ended_by_any_signal(run, tmp_path, number):
    path = tmp_path / "run.rec"
    with Command(tmp_path / "out", "record", path, run.name, "--rate", 50) as command:
        eventually(lambda: path.exists() and path.stat().st_size > 2000)
        command.signal(number)
        status = command.wait()
    assert status == (-number if number == signal.SIGKILL else 0)
    assert len(Recording.read(path).seconds) > 5
    assert ("records over" in command.output()) == (number != signal.SIGKILL)


def test_record_on_a_full_disk_ends_with_a_sentence_and_keeps_what_it_has(run, tmp_path, call):
    path = tmp_path / "run.rec"
    with full_disk():
        result = call("record", path, run.name, "--rate", 100)
    assert result.status == 1
    told = re.search(r"Error: .* cannot be written any further: File too large. It has (\d+) records", result.output)
    recording = Recording.read(path)
    records = len(recording.seconds)
    assert records - int(told[1]) in (0, 1)  # the last one may have come through
    assert records > 5
    assert "Traceback" not in result.output


def test_record_does_not_write_over_a_file(run, tmp_path, call):
    path = tmp_path / "mine.rec"
    path.write_text("mine")
    result = call("record", path, run.name)
    assert result.status == 1
    assert "there is a file at" in result.output
    assert path.read_text() == "mine"


def test_plot_does_not_write_over_the_recording(run, tmp_path, call):
    path = tmp_path / "run.png"
    call("record", path, run.name, "--seconds", 0.3)
    content = path.read_bytes()
    result = call("plot", path)
    assert result.status == 1
    assert "is the recording itself" in result.output
    assert path.read_bytes() == content


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_watched(run, tmp_path, call):
    result = call("watch", run.name, "--picture", tmp_path / "nowhere" / "x.svg", "--seconds", 60)
    assert result.status == 1
    assert "there is no directory" in result.output


def test_plot_of_another_file_says_what_it_expects(tmp_path, call):
    path = tmp_path / "other"
    path.write_text("nothing")
    result = call("plot", path)
    assert result.status == 1
    assert "expected a file of `torchreplay record`" in result.output


@pytest.mark.slow
def test_help_of_all_commands_needs_neither_ray_nor_matplotlib():
    code = (
        "import sys; from torchreplay.cli import main; "
        "[main([name, '--help'], standalone_mode=False) for name in ('list', 'watch', 'record', 'plot')]; "
        "sys.exit(bool({'ray', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_plot_without_matplotlib_names_the_extra(run, tmp_path, call, monkeypatch):
    recording = tmp_path / "run.trr"
    assert call("record", recording, run.name, "--seconds", 0.3).status == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "torchreplay.monitoring.pictures", raising=False)
    monkeypatch.delitem(sys.modules, "torchreplay.plots", raising=False)
    result = call("plot", recording)
    assert result.status == 1
    assert "[plot]" in result.output
