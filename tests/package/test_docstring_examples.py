"""Each public name of `torchreplay` has an example in its docstring, which runs.

The example of a method goes on with what the example of its class has made.
"""

import builtins
import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

import torchreplay as tr

VIEWS = ("Hindsight", "Rows", "Sequences", "Transitions")
NOT_FOR_USERS = {
    *(f"{view}.{name}" for view in VIEWS for name in ("native", "plan", "roles")),
    *(f"{limiter}.{name}" for limiter in ("Admission", "MinSize", "SamplesPerInsert") for name in ("bounds", "native")),
    "Hindsight.as_data",
    "Hindsight.finish",
    "Hindsight.is_same_but_for_functions",
    "Hindsight.travelling",
    "Hindsight.with_functions_of",
    "ReplayDataset.end",
    "ReplayDataset.forget_drawn_of_other_sizes",
    "Stats.of",
}
"""What the package itself calls."""
WITHOUT = {
    "Spec": "an alias of a type; the example of Field makes one",
    "ReplayBatch.pin_memory": "needs a CUDA device",
}


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the public methods of a class, and properties; also those inherited from another of ours, if that is not
    public: one that is shows its own.

    Properties of one line are left out: that line says all there is, and they are read by their name.
    """
    for name, value in inspect.getmembers_static(kind):
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if name.startswith("_") or not owner.__module__.startswith("torchreplay"):
            continue
        if owner is not kind and owner.__name__ in tr.__all__:
            continue
        called = isinstance(value, classmethod | staticmethod) or inspect.isroutine(value)
        if called or (isinstance(value, property) and "\n" in (inspect.getdoc(value) or "")):
            yield name, getattr(kind, name)


def public() -> dict[str, Any]:
    found = {name: getattr(tr, name) for name in tr.__all__}
    methods = {f"{name}.{member}": value for name in found for member, value in members_of(found[name])}
    return {name: value for name, value in (found | methods).items() if name not in NOT_FOR_USERS}


def members_of(value: Any) -> Iterator[tuple[str, Any]]:
    return members(value) if inspect.isclass(value) else iter(())


def example_of(name: str, names: dict[str, Any]) -> doctest.DocTest:
    text = "" if name == "Spec" else inspect.getdoc(PUBLIC[name]) or ""
    return doctest.DocTestParser().get_doctest(text, names, name, None, None)


PUBLIC = public()
WITH = sorted(PUBLIC.keys() - WITHOUT)
SLOW = {"ReplayBatch.to_tensordict"}  # it imports tensordict


def pages_from(page: Path) -> Iterator[str]:
    """Yields the text of a page of the site, and of those below it, in the order of its table of contents."""
    text = page.read_text()
    yield text
    for listed in re.findall(r"^```{toctree}\n(?::.*\n)*\n((?:.+\n)+)```", text, re.MULTILINE):
        for name in listed.split():
            yield from pages_from(page.parent / f"{name}.md")


def shown() -> list[str]:
    """Returns what the reference shows, in its order."""
    text = "".join(pages_from(ROOT / "docs" / "api" / "index.md"))
    found = []
    for name, options in re.findall(r"^\.\. auto\w+:: torchreplay\.([\w.]+)\n((?:   :.*\n)*)", text, re.MULTILINE):
        found.append(name)
        if ":members:\n" in options:
            left_out = re.findall(r"\w+", "".join(re.findall(":exclude-members:(.*)", options)))
            found += [f"{name}.{member}" for member, _ in members_of(getattr(tr, name, None)) if member not in left_out]
    return found


def test_the_reference_shows_each_public_method_once_and_no_other():
    found = [name for name in shown() if hasattr(tr, name.partition(".")[0])]
    assert len(found) == len(set(found))
    assert PUBLIC.keys() <= set(found)
    assert not NOT_FOR_USERS & set(found)


def test_the_reference_of_the_buffer_has_the_order_of_use():
    of_use = "", ".writer", ".sample", ".update_priorities", ".rewrite", ".save", ".stats"
    places = [shown().index(f"ReplayBuffer{name}") for name in of_use]
    assert places == sorted(places)


def test_each_public_name_has_an_example_or_a_reason_why_not():
    lacking = {name for name in PUBLIC if not example_of(name, {}).examples}
    assert lacking == set(WITHOUT)


def test_an_example_is_short():
    lines = {name: sum(text.source.count("\n") for text in example_of(name, {}).examples) for name in WITH}
    assert {name: n for name, n in lines.items() if n > 12} == {}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in WITH]
)
def test_an_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for those that save
    monkeypatch.setattr(builtins, "_", None, raising=False)  # the value printed last, which would live on
    names, said = {"tr": tr, "torch": torch}, list[str]()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    kind, _, method = name.partition(".")
    for part in (kind, name) if method else (name,):
        test = example_of(part, {})
        test.globs = names
        runner.run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
