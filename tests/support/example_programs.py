"""The examples, as programs that tests run and as modules whose parts they try."""

import json
import subprocess
import sys
from importlib import import_module

import pytest
from paths import ROOT

EXAMPLES = ROOT / "examples"


def imported(name, monkeypatch):
    """The module of an example, or of what the examples share."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module(name)


def run(name, cwd, *flags, timeout):
    """Runs an example in a directory until it ends; returns its exit status and what it printed."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *flags]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)


def succeed(name, cwd, *flags, timeout):
    """The same, for one that must end well."""
    done = run(name, cwd, *flags, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done


def evaluations(done):
    """What it printed: one JSON line per evaluation."""
    return [json.loads(line) for line in done.stdout.splitlines()]


def explanation(name, monkeypatch, capsys):
    """What it says when it is asked for help: (how many flags it explains, all the words)."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as done:
        imported("command_line", monkeypatch).parse(imported(name, monkeypatch).Args)
    assert done.value.code == 0
    text = capsys.readouterr().out
    return sum(line.lstrip().startswith("--") for line in text.splitlines()), " ".join(text.split())
