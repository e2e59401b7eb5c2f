"""Cells that are played at once. They are here because a process that plays one imports the module that has it."""

from functools import partial

from benchmarks.learning.cell import Point, Question


def played(seed, directory):
    """A run that can be counted: it fails where it was played before."""
    (directory / f"played-{seed}").touch(exist_ok=False)
    return [Point(step, seed + step, 0.5) for step in (10, 20)]


def fail(seed):
    raise ValueError(f"seed {seed}")


def question(directory):
    return Question("q", "Title", "steps", "return", {"task": {"a": partial(played, directory=directory)}})
