"""`torchreplay record` and `plot`, as a user calls them: killed, ended, and on a full disk."""

import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from forked import eventually
from live_commands import PNG, Command, each_signal
from watched_buffers import full_disk

from torchreplay.monitoring.recording import Recording


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
