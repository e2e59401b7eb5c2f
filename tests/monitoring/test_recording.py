"""Recordings: exact, small, and whole up to the last record, wherever their writer died."""

import json
import math
import os
import random
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from belongings import descriptors
from forked import Forked, eventually, shared_counters
from matplotlib.figure import Figure
from watched_buffers import full_disk, look_at, make, write

import torchreplay as tr
from torchreplay import plots
from torchreplay.monitoring.pictures import draw_recording
from torchreplay.monitoring.recording import COUNTERS, Recorder, Recording
from torchreplay.monitoring.slots import sample_slots
from torchreplay.schema.config import Config

PNG = b"\x89PNG\r\n\x1a\n"


def record(path, looks=20, capacity=100, **options):
    """A recording of a run of which nothing is known but what was looked at; and those looks."""
    buffer = make(capacity, **options)
    generator = np.random.default_rng(0)
    seen = []
    with look_at(buffer) as live, Recorder(path, live) as recorder:
        for moment in range(looks):
            write(buffer, int(generator.integers(1, 30)))
            batch = buffer.sample(8)
            buffer.update_priorities(batch, generator.random(8))
            now = replace(live.snapshot(), time=100.0 + moment / 10)
            seen.append((now, live.fill(now), len(now.alive("writer"))))
            recorder.add(now)
            if moment % 10 == 0:
                recorder.add_slots(now.time, sample_slots(live, now.head))
    return buffer, seen


def test_a_recording_has_what_was_looked_at(tmp_path):
    buffer, seen = record(tmp_path / "run.rec", limiter=tr.SamplesPerInsert(1.0, tolerance=1e4))
    recording = Recording.read(tmp_path / "run.rec")
    for name in COUNTERS:
        assert recording.counters[name].tolist() == [float(getattr(now, name)) for now, _, _ in seen], name
    assert recording.counters["fill"].tolist() == [fill for _, fill, _ in seen]
    assert recording.counters["writers"].tolist() == [writers for _, _, writers in seen]
    assert recording.seconds == pytest.approx(np.arange(20) / 10)
    assert (recording.name, recording.config.capacity) == (buffer.name, 100)
    assert recording.priorities["time"].tolist() == [100.0, 101.0]


def test_a_buffer_without_a_ratio_has_a_target_of_zero(tmp_path):
    record(tmp_path / "run.rec")
    assert set(Recording.read(tmp_path / "run.rec").counters["target_ratio"]) == {0.0}


def test_priorities_in_a_recording_are_the_items_own(tmp_path):
    buffer = make(1000)
    keys = write(buffer, 1000)
    td = np.random.default_rng(1).random(1000)
    buffer.update_priorities(keys, td)
    with look_at(buffer) as live, Recorder(tmp_path / "run.rec", live) as recorder:
        now = live.snapshot()
        recorder.add(now)
        recorder.add_slots(now.time, sample_slots(live, now.head))
    table = Recording.read(tmp_path / "run.rec").priorities
    assert [table[name][0] for name in ("p10", "p50", "p90")] == pytest.approx(
        np.quantile(td, [0.1, 0.5, 0.9]), rel=1e-5
    )


def test_a_recording_cut_off_anywhere_has_all_whole_records_before(tmp_path):
    path, cut = tmp_path / "run.rec", tmp_path / "cut.rec"
    record(path, looks=8)
    content, whole = path.read_bytes(), Recording.read(path)
    lengths = set()
    for end in range(len(content)):
        cut.write_bytes(content[:end])
        try:
            part = Recording.read(cut)
        except ValueError:
            assert end < 1000  # the description, or the first record, is not whole
            continue
        n = len(part.seconds)
        lengths.add(n)
        for name, values in part.counters.items():
            assert values.tolist() == whole.counters[name][:n].tolist()
    assert lengths == set(range(1, 9))


def test_damage_anywhere_leaves_all_whole_records_before(tmp_path):
    path, hurt = tmp_path / "run.rec", tmp_path / "hurt.rec"
    record(path, looks=30)
    content, whole = path.read_bytes(), Recording.read(path)
    blocks = [at for at in range(len(content)) if content.startswith(b"\x00\x00\xff\xff", at)]  # the end of a flush
    assert len(blocks) >= 1 + 30
    for record_number, end in list(enumerate(blocks))[10:]:
        # A block of zlib's reserved type, which nothing can be read from.
        hurt.write_bytes(content[: end + 4] + b"\x07" + content[end + 5 :])
        part = Recording.read(hurt)
        n = len(part.seconds)
        assert n + len(part.priorities["time"]) == record_number
        assert part.counters["head"].tolist() == whole.counters["head"][:n].tolist()


@pytest.mark.parametrize("written", [0, 5], ids=["nothing of it", "a part of it"])
def test_an_interrupted_record_is_the_last_and_leaves_those_before(tmp_path, monkeypatch, written):
    path, whole = tmp_path / "run.rec", os.write
    buffer = make()

    def interrupted(fd, data):
        whole(fd, data[:written])
        raise KeyboardInterrupt

    def run():
        with look_at(buffer) as live, Recorder(path, live) as recorder:
            for _ in range(50):
                write(buffer, 3)
                recorder.add(live.snapshot())
            before = path.stat().st_size
            monkeypatch.setattr("torchreplay.monitoring.recording.os.write", interrupted)
            try:
                recorder.add(live.snapshot())
            finally:
                monkeypatch.undo()
                sizes.append(before + written)

    sizes = []
    with pytest.raises(KeyboardInterrupt):
        run()
    assert [path.stat().st_size] == sizes
    assert Recording.read(path).counters["head"].tolist() == [3.0 * n for n in range(1, 51)]


def test_a_full_disk_is_an_error_that_leaves_all_records_and_no_open_descriptor(tmp_path):
    path, added, buffer = tmp_path / "run.rec", [], make()

    def run(live):
        with full_disk(), Recorder(path, live) as recorder:
            while True:
                recorder.add(live.snapshot())
                added.append(1)

    with look_at(buffer) as live:
        before = descriptors()
        with pytest.raises(OSError, match="File too large"):
            run(live)
        assert descriptors() <= before
    assert len(added) > 5
    assert len(Recording.read(path).seconds) - len(added) in (0, 1)  # the last one may have come through


def record_for_ever(name, path, records):
    from torchreplay.monitoring.survey import choose

    with choose(name) as live, Recorder(path, live) as recorder:
        while True:
            recorder.add(live.snapshot())
            records[0] += 1


def test_a_recorder_that_is_killed_leaves_all_records_it_had_written(tmp_path, tally):
    buffer = make()
    write(buffer, 10)
    chance = random.Random(1)
    for number in range(15):
        path, records = tmp_path / f"{number}.rec", shared_counters(1)
        with Forked(record_for_ever, buffer.name, path, records):
            enough = chance.randrange(1, 200)
            eventually(lambda n=enough, r=records: r[0] >= n, interval=0)
        kept = len(Recording.read(path).seconds)
        assert records[0] <= kept <= records[0] + 1
        tally("recorders killed", 1)


def test_an_hour_at_ten_looks_a_second_takes_a_few_megabytes(tmp_path):
    path = tmp_path / "run.rec"
    record(path, looks=400)
    assert path.stat().st_size / 400 * 36_000 < 4e6


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    path = tmp_path / "run.rec"
    path.write_text("mine")
    with look_at(make()) as live, pytest.raises(FileExistsError):
        Recorder(path, live)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"nothing", b"\x89PNG\r\n\x1a\n" + bytes(100), b"torchreplay recording 9\n"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.rec"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no recording of this version"):
        Recording.read(path)


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        Recording.read(tmp_path / "pipe")


def test_a_recording_without_a_record_says_so(tmp_path):
    path = tmp_path / "run.rec"
    with look_at(make()) as live:
        Recorder(path, live).close()
    with pytest.raises(ValueError, match="has no record: the recorder ended before its first look"):
        Recording.read(path)


WHOLE = {
    "name": "run",
    "started": 1.0,
    "config": json.loads(Config.of({"x": tr.Field()}, 3, None, None, None).to_text()),
}


@pytest.mark.parametrize(
    "described",
    [
        [],
        WHOLE | {"started": 10**400},
        WHOLE | {"config": {"capacity": 3}},
        WHOLE | {"started": None},
        WHOLE | {"started": "soon"},
        {name: WHOLE[name] for name in ("config", "started")},
        {name: WHOLE[name] for name in ("config", "name")},
    ],
)
def test_a_damaged_description_is_refused(tmp_path, described):
    path = tmp_path / "run.rec"
    for told, message in ((WHOLE, "has no record"), (described, "the description in .* is damaged")):
        text = json.dumps(told).encode()
        path.write_bytes(b"torchreplay recording 1\n" + zlib.compress(struct.pack("<I", len(text)) + text))
        with pytest.raises(ValueError, match=message):
            Recording.read(path)


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
def test_the_picture_of_a_recording_is_a_png(tmp_path, dark):
    record(tmp_path / "run.rec", limiter=tr.SamplesPerInsert(1.0, tolerance=1e4))
    draw_recording(Recording.read(tmp_path / "run.rec"), tmp_path / "run.png", "a run", dark)
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


def test_a_run_in_which_nothing_happened_can_be_drawn(tmp_path):
    buffer = make()
    with look_at(buffer) as live, Recorder(tmp_path / "run.rec", live) as recorder:
        for moment in range(3):
            recorder.add(replace(live.snapshot(), time=float(moment)))
        recorder.add_slots(1.0, sample_slots(live, 0))
    recording = Recording.read(tmp_path / "run.rec")
    assert math.isnan(recording.priorities["p50"][0])
    draw_recording(recording, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


def test_one_record_alone_is_no_picture(tmp_path):
    record(tmp_path / "run.rec", looks=1)
    with pytest.raises(ValueError, match="rates need two at least"):
        draw_recording(Recording.read(tmp_path / "run.rec"), tmp_path / "run.png")
    assert not os.path.exists(tmp_path / "run.png")


def test_a_recording_of_a_queue_has_its_items_and_no_priorities(tmp_path):
    buffer = make(30, sampler=tr.Fifo(when_full="drop_oldest"))
    written = handed_out = 0
    expected = []
    with look_at(buffer) as live, Recorder(tmp_path / "run.rec", live) as recorder:
        for moment in range(12):
            write(buffer, 5)
            written += 5
            if moment < 4:
                buffer.sample(3)  # and is done with those before
                handed_out += 3
            buffer.stats()  # a look, with which rows become items
            recorder.add(replace(live.snapshot(), time=float(moment)))
            there = min(30, written)
            held = max(0, min(3, handed_out - (written - there)))
            to_draw = min(there, written - handed_out)
            expected.append((to_draw, held, max(0, written - handed_out - there)))
    assert recorder.records == 12
    recording = Recording.read(tmp_path / "run.rec")
    series = [recording.queue[name].tolist() for name in ("drawable", "held_items", "dropped_items")]
    assert list(zip(*series, strict=True)) == expected
    assert (recording.queue["oldest_age"] >= 0).all()
    assert recording.queue["time"].tolist() == recording.counters["time"].tolist() == list(range(12))
    assert not len(recording.priorities["time"])
    draw_recording(recording, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


def test_the_plots_of_a_run_show_the_items_of_a_queue_in_place_of_priorities(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "draw_priorities", lambda *_: drawn.append("priorities"))
    buffer = make(30, sampler=tr.Fifo())
    history = plots.ReplayHistory(buffer)
    for step in range(4):
        write(buffer, 5)
        history.observe(buffer.sample(3))
        history.record(step)
    axes = Figure().subplots()
    plots.draw_queue(axes, history)
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines == {"to draw": [2, 4, 6, 8], "held": [3, 3, 3, 3]}
    plots.replay_health(history, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)
    assert not drawn


def test_a_recording_of_no_queue_has_no_series_of_one(tmp_path):
    record(tmp_path / "run.rec", looks=2)
    assert not len(Recording.read(tmp_path / "run.rec").queue["time"])
