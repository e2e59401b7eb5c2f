"""`torchreplay doctor` and `bench`: what this machine gives, line by line."""

import json
import os
import resource
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from limited_memory import Machine

from torchreplay.checking import machine, speed
from torchreplay.cli import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def by_topic(found):
    return {finding.topic: finding for finding in found}


def test_every_line_that_is_not_ok_says_what_to_change():
    found = machine.examine()
    assert all(finding.advice for finding in found if not finding.ok)
    assert {"memory", "huge pages", "/dev/shm", "cores", "page-locking", "CUDA", "torch"} <= by_topic(found).keys()


def test_versions_and_cores_are_those_of_this_process():
    found = by_topic(machine.examine())
    assert found["torch"].value == torch.__version__
    assert found["numpy"].value == np.__version__
    assert found["cores"].value.startswith(f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}")


def test_json_and_exit_code_agree():
    result = run("doctor", "--json")
    lines = json.loads(result.output)
    assert result.exit_code == (0 if all(line["ok"] for line in lines) else 1)


def test_one_core_is_a_warning(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    finding = by_topic(machine.examine())["cores"]
    assert not finding.ok
    assert "two or more" in finding.advice


def test_a_forbidden_huge_page_is_a_warning_that_names_the_variable(monkeypatch):
    monkeypatch.setenv("TORCHREPLAY_HUGE_PAGES", "0")
    finding = by_topic(machine.examine())["huge pages"]
    assert not finding.ok
    assert "TORCHREPLAY_HUGE_PAGES=0" in finding.advice


@pytest.mark.parametrize(("left", "ok"), [(2 << 30, True), (1 << 29, False)])
def test_a_memory_limit_is_advised_to_be_raised_where_little_is_left(monkeypatch, left, ok):
    monkeypatch.setattr(machine, "available_memory", lambda: left)
    finding = by_topic(machine.examine())["memory limit"]
    assert "are left under the cgroup's limit" in finding.value
    assert (finding.ok, finding.advice == "") == (ok, ok)


def test_few_open_files_are_a_warning(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert not by_topic(machine.examine())["open files"].ok


def test_an_old_version_of_a_library_is_a_warning(monkeypatch):
    real = machine.metadata.version
    monkeypatch.setattr(machine.metadata, "version", lambda name: "1.0.3" if name == "numpy" else real(name))
    monkeypatch.setattr(machine.metadata, "requires", lambda _: ["numpy>=1.26", 'ray>=2.40; extra == "ray"'])
    found = by_topic(machine.examine())
    assert (found["numpy"].ok, found["numpy"].advice) == (False, "torchreplay needs 1.26 or later")
    assert found["ray"].ok


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a", {"a/cpu.max": "max 100000"}, None),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2.0),
        ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/a", {}, None),
    ],
    ids=["of a parent", "none", "version 1", "none of version 1", "another controller"],
)
def test_cores_are_those_that_the_cgroups_allow(tmp_path, monkeypatch, groups, files, cores):
    limited = Machine(tmp_path, monkeypatch)
    limited.in_cgroup(groups)
    for name, text in files.items():
        limited.write(f"sys/fs/cgroup/{name}", text)
    assert machine._cpu_limit() == cores


@pytest.mark.slow
def test_the_lines_name_the_instructions_that_the_core_was_told_to_use():
    """In a process of its own: the core decides once."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "torchreplay", "doctor", "--json"]
    environment = os.environ | {"TORCHREPLAY_SIMD": "portable"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True)
    (line,) = [line for line in json.loads(told.stdout) if line["topic"] == "vector instructions"]
    assert (line["value"], line["ok"]) == ("portable", False)


@pytest.mark.slow
def test_bench_has_every_call_beside_a_copy_within_its_time():
    result = run("bench", "--seconds", 1, "--json")
    figures = {figure["name"]: figure for figure in json.loads(result.output)}
    assert result.exit_code == 0
    assert len(figures) == 9
    assert all(figure["seconds"] > 0 for figure in figures.values())
    copied = figures["copy as many bytes (memcpy)"]["nbytes"]
    assert copied == figures["sample 256, stacks of 4 frames"]["nbytes"] == 256 * 2 * 4 * 84 * 84


def test_what_bench_draws_is_not_overwritten_by_what_it_writes():
    with ExitStack() as opened:
        calls = {name: call for name, (call, _, _) in speed._small(opened).items()}
        for _ in range(speed.SMALL_ROWS // 64 + 1):
            calls["extend by 64 rows"]()
        assert len(calls["gather 256"]()["key"]) == 256
