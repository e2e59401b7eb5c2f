"""`torchreplay list`, and commands that are not there, as a user calls them."""

import json
import os
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from watched_buffers import content_of, make

import torchreplay as tr

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
