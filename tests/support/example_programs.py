"""The examples, as programs that tests run and as modules whose parts they try."""

import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import warm_interpreter
from paths import ROOT

EXAMPLES = ROOT / "examples"


def imported(name, monkeypatch):
    """The module of an example, or of the demo's panel: for one test, under a name that no other module has."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def run(name, cwd, *flags, timeout):
    """Runs an example in a directory until it ends; returns its exit status and what it printed."""
    return warm_interpreter.run(EXAMPLES / f"{name}.py", flags, cwd, timeout)


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
    with pytest.raises(SystemExit) as done:
        parsed(name, monkeypatch, "--help")
    assert done.value.code == 0
    text = capsys.readouterr().out
    return sum(line.strip("│ ").startswith("--") for line in text.splitlines()), words(text)


def refusal(name, monkeypatch, capsys, *flags):
    """What it says to flags that it does not take."""
    with pytest.raises(SystemExit) as done:
        parsed(name, monkeypatch, *flags)
    assert done.value.code == 2
    return words(capsys.readouterr().err)


def parsed(name, monkeypatch, *flags):
    """What an example reads from its command line."""
    tyro = pytest.importorskip("tyro")
    return tyro.cli(imported(name, monkeypatch).Args, args=flags, prog=f"{name}.py")


def words(text):
    """A text without the frames and line breaks of a terminal."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def curve(directory, tag="charts/mean_return"):
    """What TensorBoard reads back from a directory: {step: value}."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(directory)).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def assert_tensorboard_says(lines, directory):
    """Asserts that the only curves in a directory are those of a run that printed these lines."""
    assert curve(directory) == {line["step"]: pytest.approx(line["mean_return"], rel=1e-6) for line in lines}
    assert curve(directory, "replay/size")
